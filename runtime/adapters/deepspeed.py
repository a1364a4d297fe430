"""DeepSpeed: ``initialize`` returns an engine that trains under the plan, or DeepSpeed's own where that is the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from paro_advise.errors import TrainingError
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.runtime.adapters.deepspeed_config import (
    STAGES,
    batch_sizes,
    check_table,
    make_optimizer,
    make_scheduler,
    read_table,
    set_strategy,
)
from paro_advise.runtime.adapters.names import replace_name
from paro_advise.runtime.adapters.wrapping import Wrapping, copy_from_rank_0
from paro_advise.runtime.import_hooks import when_imported

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable
    from types import ModuleType

    from torch.optim.optimizer import ParamsT

    from paro_advise.runtime.adapters.deepspeed_config import Scheduler, Table
    from paro_advise.runtime.adapters.session import Session

    # An engine, its optimizer, a data loader, a scheduler.
    Made: TypeAlias = tuple[object, object, object, object]
    MakeOptimizer: TypeAlias = Callable[[ParamsT], torch.optim.Optimizer]
    MakeScheduler: TypeAlias = Callable[[torch.optim.Optimizer], Scheduler]

_P = ParamSpec("_P")


def install(session: Session) -> None:
    """Replace ``deepspeed.initialize`` once deepspeed is imported."""
    when_imported("deepspeed", lambda module: _replace(module, session))


def _replace(module: ModuleType, session: Session) -> None:
    run = _Initialization(session, module.initialize).run
    replace_name("initialize", _end_job_on_error(session, run), module)


def _end_job_on_error(session: Session, function: Callable[_P, Made]) -> Callable[_P, Made]:
    """Let what a plan cannot express end the job with its reason and no traceback."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> Made:
        try:
            return function(*args, **kwargs)
        except TrainingError as error:
            session.refuse(error)

    return call


class _Initialization:
    """``deepspeed.initialize`` under a plan.

    Args:
        session: the planned process.
        original: DeepSpeed's own.
    """

    def __init__(self, session: Session, original: Callable[..., Made]) -> None:
        self._session = session
        self._original = original

    def run(
        self,
        args: Namespace | None = None,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        model_parameters: ParamsT | None = None,
        training_data: object = None,
        lr_scheduler: Scheduler | MakeScheduler | None = None,
        *rest: object,
        config: Table | str | Path | None = None,
        config_params: Table | str | Path | None = None,
        dist_init_required: bool | None = None,
        **others: object,
    ) -> Made:
        """Return what DeepSpeed returns: its own engine where it can run the plan itself, else ours."""
        self._session.is_reached = True
        wanted = config if config is not None else config_params
        table = read_table(wanted if wanted is not None else getattr(args, "deepspeed_config", None))
        assert model is not None
        chosen = self._session.plan.chosen
        if chosen.collectives == CollectiveBackend.NATIVE and chosen.triple in STAGES:
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if args is not None and getattr(args, "deepspeed_config", None):
                args.deepspeed_config = None  # DeepSpeed takes one of the two
            given = (args, model, optimizer, model_parameters, training_data, lr_scheduler, *rest)
            made = self._original(*given, config=set_strategy(table, chosen), **others)
            self._session.accept_own_settings("DeepSpeed", num_parameters)
            return made
        check_table(table, training_data=training_data, mpu=rest[1] if len(rest) > 1 else None)
        if dist_init_required is not False and not dist.is_initialized():
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return self._make_engine(table, model, optimizer, model_parameters, lr_scheduler)

    def _make_engine(
        self,
        table: Table,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None,
        model_parameters: ParamsT | None,
        lr_scheduler: Scheduler | MakeScheduler | None,
    ) -> Made:
        model.to(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu")
        made = optimizer(model_parameters or model.parameters()) if callable(optimizer) else optimizer
        if made is None:
            made = make_optimizer(table, model_parameters or model.parameters())
        scheduler = lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler
        if scheduler is None and table.get("scheduler", {}).get("type"):
            scheduler = make_scheduler(table["scheduler"], made)
        return PlannedEngine(self._session, model, made, scheduler, table), made, None, scheduler


class PlannedEngine(nn.Module):
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
        lr_scheduler: Scheduler | None,
        table: Table,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.global_steps = self.micro_steps = 0
        self._session = session
        self._norm: float | None = None
        self._in_backward = False
        self._clip = float(table.get("gradient_clipping", 0.0))
        self._micro_batch, self._accumulation = batch_sizes(table)
        copy_from_rank_0(model)
        bf16 = (table.get("bf16") or table.get("bfloat16") or {}).get("enabled")
        self._wrapping = Wrapping(origin="DeepSpeed", param_dtype=torch.bfloat16 if bf16 else None)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the model, sharded before its first pass."""
        last = (self.micro_steps + 1) % self._accumulation == 0
        self._session.gate(self.module, synchronizes=last)
        self._session.before_forward(self.module, lambda: self._wrapping)
        sharded = self._session.sharded(self.module)
        if sharded is not None:
            sharded.set_requires_gradient_sync(last)
        output: object = self.module(*args, **kwargs)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._scale_gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return output

    def _scale_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Take the mean over micro-batches where the script calls ``loss.backward()`` itself, as DeepSpeed does."""
        return gradient if self._in_backward else gradient / self._accumulation

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: object
    ) -> torch.Tensor:
        """Accumulate the gradients of the mean over micro-batches."""
        scaled = loss / self._accumulation if scale_wrt_gas else loss
        self._in_backward = True
        try:
            scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            self._in_backward = False
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss: only fp16 scales it, which a plan refuses."""
        return loss

    def destroy(self) -> None:
        """Do nothing: what belongs to the plan ends with the process."""

    def step(self, *_: object, **__: object) -> None:
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
        """Return the micro-batches per step."""
        return self._accumulation

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per rank in a micro-batch."""
        return self._micro_batch

    def train_batch_size(self) -> int:
        """Return the samples of all ranks in a step."""
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
        """Discard all gradients."""
        self.optimizer.zero_grad(set_to_none)

    def save_checkpoint(
        self, save_dir: str, tag: str | None = None, client_state: dict[str, object] | None = None, **_: object
    ) -> bool:
        """Write a checkpoint in our format."""
        from paro_advise.runtime import save_checkpoint

        save_checkpoint(Path(save_dir) / (tag or f"global_step{self.global_steps}"), self.module, extra=client_state)
        return True

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *_: object, **__: object
    ) -> tuple[str, dict[str, object]]:
        """Read a checkpoint in our format.

        Raises:
            TrainingError: the model is not sharded yet; DeepSpeed's own files are not read.
        """
        from paro_advise.runtime import load_checkpoint

        if self._session.engine(self.module) is None or tag is None:
            raise TrainingError(
                "a planned engine reads its own checkpoints, by tag and after the first step",
                hint="begin the planned run from a checkpoint loaded into the model before deepspeed.initialize",
            )
        path = Path(load_dir) / tag
        load_checkpoint(path, self.module)
        return str(path), {}
