"""DeepSpeed: ``initialize`` returns an engine that trains under the plan, or DeepSpeed's own where that is the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.errors import TrainingError
from paro_advise.policies.strategy import Collectives
from paro_advise.runtime.adapters.session import Wrapping, from_rank_0
from paro_advise.runtime.import_hooks import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.runtime.adapters.session import Session

_STAGES = {"NNN": 0, "NNG": 1, "NGG": 2, "GGG": 3}
_NO_PLAN = "run this script without a plan"
# Keys that change what is computed and that our runtime has no word for.
_REFUSED = ("amp", "communication_data_type", "prescale_gradients", "sparse_gradients", "compression_training")


def install(session: Session) -> None:
    """Replace ``deepspeed.initialize`` once deepspeed is imported."""
    when_imported("deepspeed", lambda module: _replace(module, session))


def _replace(module: Any, session: Session) -> None:
    original = module.initialize

    def initialize(*given: Any, **settings: Any) -> Any:
        try:
            return _initialize(original, session, *given, **settings)
        except TrainingError as error:
            session.refuse(error)

    module.initialize = initialize


def _initialize(
    original: Callable[..., Any],
    session: Session,
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *rest: Any,
    config: Any = None,
    config_params: Any = None,
    dist_init_required: bool | None = None,
    **others: Any,
) -> Any:
    """Return (engine, optimizer, data loader, scheduler), as deepspeed.initialize does."""
    wanted = config if config is not None else config_params
    table = _table(wanted if wanted is not None else getattr(args, "deepspeed_config", None))
    chosen = session.plan.chosen
    if chosen.collectives == Collectives.NATIVE and chosen.triple in _STAGES:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        table = {**table, "zero_optimization": {**table.get("zero_optimization", {})}}
        table["zero_optimization"]["stage"] = _STAGES[chosen.triple]
        for state, setting in (("optimizer", "offload_optimizer"), ("parameter", "offload_param")):
            if state in chosen.offload:
                table["zero_optimization"][setting] = {"device": "cpu", "pin_memory": True}
                # Else DeepSpeed refuses the script's own optimizer.
                table.setdefault("zero_force_ds_cpu_optimizer", False)
        if args is not None and getattr(args, "deepspeed_config", None):
            args.deepspeed_config = None  # DeepSpeed takes one of the two
        made = original(
            args, model, optimizer, model_parameters, training_data, lr_scheduler, *rest, config=table, **others
        )
        session.took_own_settings("DeepSpeed", num_parameters)
        return made
    _check(table, training_data=training_data, others={**others, "mpu": rest[1] if len(rest) > 1 else None})
    if dist_init_required is not False and not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    model.to(device)
    made = optimizer(model_parameters or model.parameters()) if callable(optimizer) else optimizer
    if made is None:
        made = _optimizer(table, model_parameters or model.parameters())
    scheduler = lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler
    if scheduler is None and table.get("scheduler", {}).get("type"):
        scheduler = _scheduler(table["scheduler"], made)
    engine = PlannedEngine(session, model, made, scheduler, table)
    return engine, made, None, scheduler


def _table(config: Any) -> dict[str, Any]:
    if isinstance(config, dict):
        return config
    if config is None:
        raise TrainingError("deepspeed.initialize must get a config", hint="pass config= or --deepspeed_config")
    found: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    return found


def _check(table: dict[str, Any], *, training_data: Any, others: dict[str, Any]) -> None:
    """Refuse what would be lost.

    Raises:
        TrainingError: it names the key.
    """
    zero = table.get("zero_optimization", {})
    for name, found in (
        ("fp16", table.get("fp16", {}).get("enabled")),
        ("zero_optimization.offload_param", zero.get("offload_param", {}).get("device", "none") != "none"),
        ("zero_optimization.offload_optimizer", zero.get("offload_optimizer", {}).get("device", "none") != "none"),
        ("training_data", training_data is not None),
        ("mpu", others.get("mpu") is not None),
        *((key, table.get(key)) for key in _REFUSED),
    ):
        if found:
            raise TrainingError(f"a plan cannot express DeepSpeed's {name}", hint=_NO_PLAN)


def _optimizer(table: dict[str, Any], parameters: Any) -> torch.optim.Optimizer:
    section = table.get("optimizer") or {}
    kind, settings = str(section.get("type", "")).lower(), dict(section.get("params", {}))
    decoupled = settings.pop("adam_w_mode", True)  # DeepSpeed's Adam is AdamW unless told otherwise
    is_torchs = settings.pop("torch_adam", False)
    if not settings.pop("bias_correction", True):
        raise TrainingError("a plan cannot express DeepSpeed's Adam without bias_correction", hint=_NO_PLAN)
    classes: dict[str, type[torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.AdamW if decoupled else torch.optim.Adam,
        "sgd": torch.optim.SGD,
    }
    if kind not in classes:
        raise TrainingError(
            f"a plan needs an optimizer of type Adam, AdamW or SGD, got {section.get('type')!r}",
            hint="pass optimizer= to deepspeed.initialize",
        )
    if kind in ("adam", "adamw") and not is_torchs:
        settings.setdefault("weight_decay", 0.0)  # as DeepSpeed's own, unlike torch's AdamW
    return classes[kind](parameters, **settings)


def _scheduler(section: dict[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    from deepspeed.runtime import lr_schedules

    cls = getattr(lr_schedules, section["type"], None) or getattr(torch.optim.lr_scheduler, section["type"], None)
    if cls is None:
        raise TrainingError(f"the scheduler must be one of DeepSpeed's or torch's, got {section['type']!r}")
    return cls(optimizer, **section.get("params", {}))


class PlannedEngine(nn.Module):  # type: ignore[misc]
    """What a training script uses of DeepSpeed's engine.

    Args:
        session: the planned process.
        model, optimizer, lr_scheduler: what is trained.
        table: DeepSpeed's config.

    Attributes:
        global_steps, micro_steps: optimizer steps and backward passes so far.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        table: dict[str, Any],
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.micro_steps = 0
        self._session = session
        self._norm: float | None = None
        self._clip = float(table.get("gradient_clipping", 0.0))
        self._micro_batch, self._accumulation = _batches(table)
        from_rank_0(model)
        bf16 = (table.get("bf16") or table.get("bfloat16") or {}).get("enabled")
        self._wrapping = Wrapping(origin="DeepSpeed", param_dtype=torch.bfloat16 if bf16 else None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, sharded before its first pass."""
        last = (self.micro_steps + 1) % self._accumulation == 0
        self._session.gate(synchronizes=last)
        self._session.before_forward(self.module, lambda: self._wrapping)
        if self._session.root is not None:
            self._session.root.set_requires_gradient_sync(last)
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any
    ) -> torch.Tensor:
        """Add up the gradients of the mean over micro-batches."""
        scaled = loss / self._accumulation if scale_wrt_gas else loss
        scaled.backward(retain_graph=retain_graph)
        return loss

    def step(self, *_: Any, **__: Any) -> None:
        """Step the optimizer if this was the last micro-batch."""
        ends = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not ends:
            return
        if self._clip > 0:
            self._norm = float(torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        self.global_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next step() steps the optimizer."""
        return (self.micro_steps + 1) % self._accumulation == 0

    def gradient_accumulation_steps(self) -> int:
        """Return micro-batches a step."""
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return samples of a rank in a micro-batch."""
        return self._micro_batch

    def train_batch_size(self) -> int:
        """Return samples of all ranks in a step."""
        return int(self._micro_batch * self._accumulation * dist.get_world_size())

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm before the last clipping; None without clipping."""
        return self._norm

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        return next(self.module.parameters()).device

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, Any] | None = None, **_: Any
    ) -> bool:
        """Write a checkpoint of ours."""
        from paro_advise.runtime import save_checkpoint

        save_checkpoint(Path(save_dir) / (tag or f"global_step{self.global_steps}"), self.module, extra=client_state)
        return True

    def load_checkpoint(self, load_dir: str, tag: str | None = None, *_: Any, **__: Any) -> tuple[str, dict[str, Any]]:
        """Read a checkpoint of ours.

        Raises:
            TrainingError: the model is not sharded yet; DeepSpeed's own files are not read.
        """
        from paro_advise.runtime import load_checkpoint

        if self._session.root is None or tag is None:
            raise TrainingError(
                "a planned engine reads its own checkpoints, by tag and after the first step",
                hint="begin the planned run from a checkpoint loaded into the model before deepspeed.initialize",
            )
        path = Path(load_dir) / tag
        load_checkpoint(path, self.module)
        return str(path), {}


def _batches(table: dict[str, Any]) -> tuple[int, int]:
    """Return samples of a micro-batch of one rank, and micro-batches a step, by DeepSpeed's rule.

    Raises:
        TrainingError: the config does not tell.
    """
    whole, micro, passes = (
        table.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    world = dist.get_world_size()
    if micro is None and whole is not None:
        micro = whole // (world * (passes or 1))
    if passes is None:
        passes = 1 if whole is None or micro is None else whole // (world * micro)
    if micro is None or not passes:
        raise TrainingError("DeepSpeed's config must tell train_batch_size or train_micro_batch_size_per_gpu")
    return int(micro), int(passes)
