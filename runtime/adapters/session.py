"""One planned training process: which modules and optimizers there are, and when they are sharded.

A model is sharded at its first forward pass that makes gradients: then its optimizer exists, and
schedulers and checkpoints have been made and loaded in the script's own way.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from paro_advise.errors import ParoAdviseError, TrainingError
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.policies.strategy_name import grouped_triple
from paro_advise.runtime.adapters.attendance import Attendance
from paro_advise.runtime.adapters.boundary import Boundary
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.planned import check_facts
from paro_advise.runtime.adapters.switchboard import Switchboard
from paro_advise.runtime.adapters.wrapping import copy_from_rank_0, outermost_units, plain_name
from paro_advise.runtime.job import mark_applied
from paro_advise.runtime.sharding.module import ShardedModule, engine_of
from paro_advise.runtime.sharding.shard import shard

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, MutableMapping

    from torch import nn

    from paro_advise.policies.plan import Plan
    from paro_advise.runtime.adapters.wrapping import Wrapping
    from paro_advise.runtime.sharding.parameters.units import Slot

_NOTE_OF_SHARDS = (
    "checkpoints now hold this rank's shards as DTensors: save them with torch.distributed.checkpoint or "
    "paro_advise.runtime.save_checkpoint on all ranks; evaluation runs on all ranks too"
)
_NOTE_OF_WHOLE = (
    "state_dict() returns whole tensors, on rank 0 alone or on all ranks; evaluation runs on all ranks, since none "
    "holds everything"
)
_NOTE_OF_RANK_0 = "state_dict() returns whole tensors, and evaluation runs, on rank 0 alone or on all ranks"


class Session:
    """The planned process.

    Args:
        plan: what to run.
        job: folder for switches, None for none.

    Attributes:
        root: the sharded model, None before its first forward pass.
        optimizers: those that the script has made.
        of_process: the session of this process, None without a plan that changes anything.
    """

    of_process: ClassVar[Session | None] = None

    def __init__(self, plan: Plan, job: str | None) -> None:
        self.plan = plan
        self.root: nn.Module | None = None
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._boundary: Boundary | None = None
        self._wrapping: Wrapping | None = None
        self._attendance: Attendance | None = None
        self._gate: bool | None = None
        self._switchboard = Switchboard(job) if job else None
        # From parameters that the script may have kept to where those of today are.
        self._replaced: MutableMapping[torch.Tensor, Slot] = WeakIdKeyDictionary()

    @property
    def sharded_model(self) -> ShardedModule | None:
        """Return the root as what sharding has made of it; None before."""
        return self.root if isinstance(self.root, ShardedModule) else None

    @property
    def norms_are_dtensors(self) -> bool:
        """Tell whether the script's framework returns norms as DTensors."""
        return self._wrapping is not None and self._wrapping.norms_are_dtensors

    def current(self, tensors: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Return today's parameters for those that the script has kept from before the sharding."""
        if isinstance(tensors, torch.Tensor):
            return self._replaced[tensors].parameter if tensors in self._replaced else tensors
        return [self._replaced[item].parameter if item in self._replaced else item for item in tensors]

    # ---- accumulation -------------------------------------------------------------------------

    def gate(self, *, synchronizes: bool) -> None:
        """Note whether the next backward pass is the last of its step, as the script says."""
        self._gate = synchronizes

    @property
    def next_pass_is_last(self) -> bool:
        """Tell what the script set last; without that every pass is the last of its step."""
        return self._gate is not False

    def attend(self) -> None:
        """Pass a point that all ranks pass together."""
        if self._attendance is not None:
            self._attendance.attend()

    def finish_gradients(self) -> None:
        """Reduce the gradients of passes that were mistaken for inner ones."""
        if self._boundary is not None:
            self._boundary.finish()

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is one of the sharded model's."""
        return self._boundary is not None and self._boundary.is_of(optimizer)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn from a step of an optimizer; look for a request to switch if it was the sharded model's."""
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
                self._refuse_if_impossible(lambda: self._shard(module, wrapping()))
        elif module is self.root:
            self.attend()
            if self._switchboard is not None:
                self._refuse_if_impossible(lambda: self._switch(module))
        elif not any(part is module for part in self.root.modules()) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            self.refuse(
                TrainingError(
                    f"a plan shards one model, {plain_name(module)} is wrapped beside {plain_name(self.root)}",
                    hint=NO_PLAN,
                )
            )

    def accept_own_settings(self, framework: str, num_parameters: int) -> None:
        """Check the plan against a job that the framework itself runs by the plan's settings.

        Args:
            framework: that does.
            num_parameters: of the model, before it was sharded.
        """
        self._refuse_if_impossible(lambda: check_facts(self.plan, num_parameters))
        mark_applied()
        if dist.get_rank() == 0:
            name = grouped_triple(self.plan.chosen.triple, self.plan.chosen.group_size)
            print(
                f"paro-advise: {framework} runs {name} by its own settings (plan {self.plan.plan_id})",
                file=sys.stderr,
                flush=True,
            )

    def _refuse_if_impossible(self, action: Callable[[], None]) -> None:
        try:
            action()
        except ParoAdviseError as error:
            self.refuse(error)

    def refuse(self, error: ParoAdviseError) -> NoReturn:
        """End the job on this rank with a reason and no traceback."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        lines = [f"paro-advise: rank {rank}: the plan cannot be applied", *error.lines()]
        print("\n".join(lines), file=sys.stderr, flush=True)
        sys.exit(error.exit_code)

    def _shard(self, module: nn.Module, wrapping: Wrapping) -> None:
        check_facts(self.plan, sum(parameter.numel() for parameter in module.parameters()))
        if wrapping.init_from_rank_0:
            copy_from_rank_0(module)
        optimizers = self._optimizers_of(module)
        chosen = self.plan.chosen
        if "parameter" in chosen.offload:
            raise TrainingError(
                "the runtime cannot keep parameters on the host, as this plan wants",
                hint="export the plan for DeepSpeed: paro-advise recommend ... --export deepspeed=FILE",
            )
        if wrapping.let_go is not None:
            wrapping.let_go()
        before = dict(module.named_parameters())
        shard(
            module,
            optimizers,
            chosen.triple,
            group_size=chosen.group_size or self.plan.preconditions.gpus_per_node,
            units=outermost_units(module, wrapping.units),
            param_dtype=wrapping.param_dtype,
            reduce_dtype=wrapping.reduce_dtype,
            offload_optimizer=chosen.offload == "optimizer",
            native_collectives=chosen.collectives == CollectiveBackend.NATIVE,
        )
        self.root, self._wrapping = module, wrapping
        engine = engine_of(module)
        engine.stands_for_fsdp2 = wrapping.norms_are_dtensors
        slots = {name: slot for unit in engine.units for slot in unit.spec.slots for name in slot.aliases}
        for name, parameter in before.items():
            self._replaced[parameter] = slots[name]
        if wrapping.compile is not None:
            # Unit by unit, as FSDP2's users do: what surrounds a unit's forward must run as it is.
            for unit in engine.units[:-1]:
                unit.spec.module.forward = wrapping.compile(unit.spec.module.forward)
        if wrapping.states_are_whole:
            self._attendance = engine.whole_reader = Attendance(engine)
            if wrapping.evaluates_alone:
                engine.homes.before_gather = self._attendance.before_gather
        if self._gate is not None:
            engine.gradients.set_synchronizes(enabled=self._gate)
        self._boundary = Boundary(engine, optimizers, is_gated=self._gate is not None)
        if self._switchboard is not None:
            self._switchboard.open(self.plan)
        mark_applied()
        if dist.get_rank() == 0:
            self._announce(f"{len(engine.units)} units, {' and '.join(map(plain_name, optimizers))}", module, wrapping)

    def _announce(self, parts: str, module: nn.Module, wrapping: Wrapping) -> None:
        """Print what runs now, and what it means for checkpoints."""
        chosen = self.plan.chosen
        print(
            f"paro-advise: {wrapping.origin} of {plain_name(module)} "
            f"runs as {grouped_triple(chosen.triple, chosen.group_size)} with "
            f"{'native collectives' if chosen.collectives == CollectiveBackend.NATIVE else 'HO-Ring'}, {parts} "
            f"(plan {self.plan.plan_id})",
            file=sys.stderr,
            flush=True,
        )
        if not wrapping.norms_are_dtensors:
            note = _NOTE_OF_WHOLE if wrapping.states_are_whole else _NOTE_OF_SHARDS
            if wrapping.evaluates_alone:
                note = _NOTE_OF_RANK_0
            print(f"paro-advise: {note}", file=sys.stderr, flush=True)

    def _switch(self, module: nn.Module) -> None:
        assert self._switchboard is not None
        changed = self._switchboard.take(module)
        if changed is not None:
            self.plan = changed
            if self._boundary is not None:
                self._boundary.restart()

    def _optimizers_of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        parameters = {id(parameter) for parameter in module.parameters()}
        owners = []
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None and any(
                id(item) in parameters for group in optimizer.param_groups for item in group["params"]
            ):
                owners.append(optimizer)
        # Torchtitan's container of optimizers is one itself, over all their parameters.
        owners = [owner for owner in owners if not any(_holds(owner, other) for other in owners)]
        if not owners:
            raise TrainingError(
                "a planned model must have an optimizer over its parameters, got none",
                hint="make the optimizer before the first training step, and after fully_shard",
            )
        return owners


def _holds(container: object, item: object) -> bool:
    """Tell whether an object keeps another one among its attributes, alone or in a list, tuple or dictionary."""
    for value in vars(container).values():
        kept = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        if any(other is item for other in kept):
            return True
    return False
