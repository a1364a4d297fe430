"""One planned training process: which modules and optimizers there are, and when they are sharded.

A model is sharded at its first forward pass that makes gradients: then its optimizer exists, and
schedulers and checkpoints have been made and loaded in the script's own way.
"""

from __future__ import annotations

import functools
import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from paro_advise.errors import ParoAdviseError, TrainingError
from paro_advise.policies.strategy_name import grouped_triple
from paro_advise.runtime.adapters.boundary import Boundary
from paro_advise.runtime.adapters.planned import check_facts
from paro_advise.runtime.adapters.switchboard import Switchboard
from paro_advise.runtime.job import mark_applied
from paro_advise.runtime.sharding.shard import engine_of, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from paro_advise.policies.plan import Plan


_NOTE = (
    "checkpoints now hold this rank's shards as DTensors: save them with torch.distributed.checkpoint or "
    "paro_advise.runtime.save_checkpoint on all ranks; evaluation runs on all ranks too"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """What a script asked of its framework.

    Attributes:
        origin: the framework's call, for people.
        units: modules or classes that it wraps one by one; None for the repeated blocks.
        param_dtype, reduce_dtype: mixed precision.
        norms_are_dtensors: the framework's clipping returns DTensors.
        init_from_rank_0: the framework copies rank 0's parameters to all ranks.
    """

    origin: str
    units: tuple[type[nn.Module] | nn.Module, ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    norms_are_dtensors: bool = False
    init_from_rank_0: bool = False


class Session:
    """The planned process.

    Args:
        plan: what to run.
        job: folder for switches, None for none.

    Attributes:
        root: the sharded model, None before its first forward pass.
    """

    def __init__(self, plan: Plan, job: str | None) -> None:
        self.plan = plan
        self.root: nn.Module | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._boundary: Boundary | None = None
        self._wrapping: Wrapping | None = None
        self._gate: bool | None = None
        self._mesh: DeviceMesh | None = None
        self._switchboard = Switchboard(job) if job else None
        # Parameters as the script may have remembered them, and where those of today are.
        self._replaced: Any = WeakIdKeyDictionary()

    def install(self) -> None:
        """Notice optimizers, their steps, and clipping."""
        original = torch.optim.Optimizer.__init__
        session = self

        @functools.wraps(original)
        def init(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            session._optimizers.append(weakref.ref(self))

        torch.optim.Optimizer.__init__ = init
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            home.clip_grad_norm_ = self._clipping(home.clip_grad_norm_)
            for name in ("clip_grad_value_", "get_total_norm"):
                if hasattr(home, name):
                    setattr(home, name, self._looking(getattr(home, name)))
        torch.amp.GradScaler.unscale_ = self._finishing(torch.amp.GradScaler.unscale_)

    def _clipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            self.finish_gradients()
            norm = original(self._current(parameters), *args, **kwargs)
            return norm if self.root is None else self._as_expected(norm)

        return clip_grad_norm_

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def look(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self.finish_gradients()
            return original(self._current(tensors), *args, **kwargs)

        return look

    def _finishing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.finish_gradients()
            return original(*args, **kwargs)

        return call

    def _current(self, parameters: Any) -> Any:
        """Return the model's parameters as they are now for those that the script remembered from before."""
        if isinstance(parameters, torch.Tensor):
            return self._replaced[parameters].parameter if parameters in self._replaced else parameters
        return [self._replaced[item].parameter if item in self._replaced else item for item in parameters]

    def _before_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Bring gradients on before an optimizer sees them; a closure is run before that."""
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if self.root is None or closure is None:
            self.finish_gradients()
            return None
        if isinstance(args[0], torch.optim.LBFGS):
            self.refuse(TrainingError("a plan cannot express LBFGS, which calls its closure several times"))
        with torch.enable_grad():
            loss = closure()
        self.finish_gradients()
        return (args[0],), {**{k: v for k, v in kwargs.items() if k != "closure"}, "closure": lambda: loss}

    def _as_expected(self, norm: Any) -> Any:
        """Return a norm in the kind that the script's own framework would return."""
        wants = self._wrapping is not None and self._wrapping.norms_are_dtensors
        if isinstance(norm, DTensor) and not wants:
            return norm.full_tensor()
        if not isinstance(norm, DTensor) and wants:
            if self._mesh is None:
                ranks = torch.arange(dist.get_world_size())
                self._mesh = torch.distributed.device_mesh.DeviceMesh(norm.device.type, ranks)
            return DTensor.from_local(norm, self._mesh, [Replicate()], run_check=False)
        return norm

    # ---- accumulation -------------------------------------------------------------------------

    def gate(self, *, synchronizes: bool) -> None:
        """Take the script's word on whether the next backward pass is the last of its step."""
        self._gate = synchronizes

    @property
    def gated(self) -> bool:
        """Tell what the script said last; without a word every pass is the last."""
        return self._gate is not False

    def finish_gradients(self) -> None:
        """Bring gradients of passes that were taken for inner ones to the optimizer."""
        if self._boundary is not None:
            self._boundary.finish()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._boundary is not None and self._boundary.after_step(optimizer) and self._switchboard is not None:
            self._switchboard.look()

    # ---- sharding -----------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, wrapping: Callable[[], Wrapping]) -> None:
        """Shard a model if this is its first pass that makes gradients; ends the process if it cannot be.

        Args:
            module: about to be called, the outermost of those that the script wrapped.
            wrapping: what the script asked for it.
        """
        if not torch.is_grad_enabled():
            return
        if self.root is None:
            if any(parameter.requires_grad for parameter in module.parameters()):
                self._refusing(lambda: self._shard(module, wrapping()))
        elif module is self.root:
            if self._switchboard is not None:
                self._refusing(lambda: self._switch(module))
        elif not any(part is module for part in self.root.modules()):
            self.refuse(
                TrainingError(
                    f"a plan shards one model, {_plain(module)} is wrapped beside {_plain(self.root)}",
                    hint="run this script without a plan",
                )
            )

    def took_own_settings(self, framework: str, num_parameters: int) -> None:
        """Hold the plan against a job that the framework itself runs by the plan's settings.

        Args:
            framework: that does.
            num_parameters: of the model, before it was sharded.
        """
        self._refusing(lambda: check_facts(self.plan, num_parameters))
        mark_applied()
        if dist.get_rank() == 0:
            name = grouped_triple(self.plan.chosen.triple, self.plan.chosen.group_size)
            print(
                f"paro-advise: {framework} runs {name} by its own settings (plan {self.plan.plan_id})",
                file=sys.stderr,
                flush=True,
            )

    def _refusing(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ParoAdviseError as error:
            self.refuse(error)

    def refuse(self, error: ParoAdviseError) -> None:
        """End the job on this rank with a reason and no traceback."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        lines = [f"paro-advise: rank {rank}: the plan cannot be applied", *error.lines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)

    def _shard(self, module: nn.Module, wrapping: Wrapping) -> None:
        check_facts(self.plan, sum(parameter.numel() for parameter in module.parameters()))
        if wrapping.init_from_rank_0:
            from_rank_0(module)
        optimizer = self._optimizer_of(module)
        chosen = self.plan.chosen
        if "parameter" in chosen.offload:
            raise TrainingError(
                "the runtime cannot keep parameters on the host, as this plan wants",
                hint="export the plan for DeepSpeed: paro-advise recommend ... --export deepspeed=FILE",
            )
        before = dict(module.named_parameters())
        shard(
            module,
            optimizer,
            chosen.triple,
            group_size=chosen.group_size or self.plan.preconditions.gpus_per_node,
            units=self._units(module, wrapping.units),
            param_dtype=wrapping.param_dtype,
            reduce_dtype=wrapping.reduce_dtype,
            offload_optimizer=chosen.offload == "optimizer",
        )
        self.root, self._wrapping = module, wrapping
        engine = engine_of(module)
        slots = {name: slot for unit in engine.units for slot in unit.spec.slots for name in slot.aliases}
        for name, parameter in before.items():
            self._replaced[parameter] = slots[name]
        if self._gate is not None:
            engine.set_synchronizes(enabled=self._gate)
        self._boundary = Boundary(engine, optimizer, is_gated=self._gate is not None)
        if self._switchboard is not None:
            self._switchboard.open(self.plan)
        mark_applied()
        if dist.get_rank() == 0:
            print(
                f"paro-advise: {wrapping.origin} of {_plain(module)} "
                f"runs as {grouped_triple(chosen.triple, chosen.group_size)} with HO-Ring, {len(engine.units)} units, "
                f"{_plain(optimizer)} (plan {self.plan.plan_id})",
                file=sys.stderr,
                flush=True,
            )
            if not wrapping.norms_are_dtensors:
                print(f"paro-advise: {_NOTE}", file=sys.stderr, flush=True)

    def _switch(self, module: nn.Module) -> None:
        assert self._switchboard is not None
        changed = self._switchboard.take(module)
        if changed is not None:
            self.plan = changed
            if self._boundary is not None:
                self._boundary.restart()

    @staticmethod
    def _units(
        module: nn.Module, wrapped: Sequence[type[nn.Module] | nn.Module] | None
    ) -> list[type[nn.Module] | nn.Module] | None:
        """Return the outermost wrapped modules inside a model."""
        if wrapped is None:
            return None
        inner: list[type[nn.Module] | nn.Module] = [item for item in wrapped if isinstance(item, type)]
        modules = {id(item): item for item in wrapped if isinstance(item, nn.Module) and item is not module}
        covered: set[int] = set()
        for part in module.modules():  # parents come before their children
            if id(part) in modules and id(part) not in covered:
                inner.append(part)
                covered |= {id(below) for below in part.modules()}
        return inner or None

    def _optimizer_of(self, module: nn.Module) -> torch.optim.Optimizer:
        parameters = {id(parameter) for parameter in module.parameters()}
        found = []
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None and any(
                id(item) in parameters for group in optimizer.param_groups for item in group["params"]
            ):
                found.append(optimizer)
        if len(found) != 1:
            raise TrainingError(
                f"a planned model must have one optimizer over its parameters, got {len(found)}",
                hint="make the optimizer before the first training step"
                if not found
                else "run this script without a plan",
            )
        return found[0]


def from_rank_0(module: nn.Module) -> None:
    """Copy rank 0's parameters and buffers to all ranks."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), 0)


def _plain(thing: object) -> str:
    """Return the name of a class without what was mixed into it."""
    name = type(thing).__name__
    for prefix in ("Sharded", "FSDP", "Planned"):
        name = name.removeprefix(prefix)
    return name
