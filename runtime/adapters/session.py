"""One planned training process: which modules and optimizers there are, and when they are sharded.

Each model that the script wraps is sharded at its first forward pass that makes gradients: then its optimizer exists,
and schedulers and checkpoints have been made and loaded in the script's own way.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from paro_advise.core.plural import plural
from paro_advise.errors import ParoAdviseError, TrainingError
from paro_advise.policies.frameworks.model import Offload
from paro_advise.policies.strategy import CollectiveBackend, Level
from paro_advise.policies.strategy_name import grouped_triple
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.adapters.planned.attendance import Attendance
from paro_advise.runtime.adapters.planned.attended_reader import AttendedReader
from paro_advise.runtime.adapters.planned.boundary import Boundary
from paro_advise.runtime.adapters.planned.handed_out import HandedOutStates
from paro_advise.runtime.adapters.planned.planned import agree_on_plan, check_facts, same_count
from paro_advise.runtime.adapters.planned.planned_model import PlannedModel, are_related
from paro_advise.runtime.adapters.planned.script_collectives import ScriptCollectives
from paro_advise.runtime.adapters.planned.switchboard import Switchboard
from paro_advise.runtime.adapters.planned.wrapping import copy_from_rank_0, outermost_units, plain_name
from paro_advise.runtime.dtensor_calls import let_dtensors_meet_plain_tensors
from paro_advise.runtime.job import mark_applied, mark_refused
from paro_advise.runtime.messages import tell, write_lines
from paro_advise.runtime.sharding.checks import untested_torch
from paro_advise.runtime.sharding.module import engine_of
from paro_advise.runtime.sharding.parameters.owned import attributes_of, carry_attributes, is_in_backward
from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.parameters.whole import (
    FrameworksShard,
    WholeTensor,
    current,
)
from paro_advise.runtime.sharding.shard import shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, MutableMapping

    from paro_advise.policies.plan import Choice, Plan
    from paro_advise.runtime.adapters.planned.wrapping import Wrapping
    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.module import ShardedModule
    from paro_advise.runtime.sharding.parameters.units import Slot


class Session:
    """The planned process.

    Args:
        plan: what to run.
        job: folder for switches, None for none.

    Attributes:
        is_reached: the script has called an entry point of a framework that the plan stands in for.
        models: that are sharded, in the order of their first training passes; a GAN has two.
        optimizers: those that the script has made.
        handed_out: what the script holds of state dicts from before.
        collectives: the script's own.
        left_gathered: what FSDP2 would leave gathered behind backward passes since, and the script has not freed.
        of_process: the session of this process, None without a plan that changes anything.
    """

    of_process: ClassVar[Session | None] = None

    def __init__(self, plan: Plan, job: str | None) -> None:
        self.plan = plan
        self.is_reached = False
        self.models: list[PlannedModel] = []
        self.optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.collectives = ScriptCollectives()
        self._attendance: Attendance | None = None
        self._gates: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._switchboard = Switchboard(job) if job else None
        # From parameters that the script may have kept to where those of today are.
        self._replaced: MutableMapping[torch.Tensor, Slot] = WeakIdKeyDictionary()
        self.handed_out = HandedOutStates()
        self.left_gathered: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def engine(self, module: nn.Module) -> Engine | None:
        """Return what runs the model that a module is, is a part of, or wraps; None before it is sharded."""
        return next((model.engine for model in self.models if model.is_of(module)), None)

    def sharded(self, module: nn.Module) -> ShardedModule | None:
        """Return the sharded model that a module is, is a part of, or wraps; None before it is sharded."""
        return next((model.sharded for model in self.models if model.is_of(module)), None)

    @property
    def norms_are_dtensors(self) -> bool:
        """Tell whether the script's framework returns norms as DTensors."""
        return any(model.wrapping.norms_are_dtensors for model in self.models)

    def current(self, tensors: torch.Tensor | Iterable[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
        """Return today's parameters for those that the script has kept from before the sharding."""
        if isinstance(tensors, torch.Tensor):
            return self._replaced[tensors].parameter if tensors in self._replaced else tensors
        return [self._replaced[item].parameter if item in self._replaced else item for item in tensors]

    # ---- accumulation -------------------------------------------------------------------------

    def gate(self, module: nn.Module, *, synchronizes: bool, recurse: bool = True) -> None:
        """Note whether a model's next backward pass is the last of its step, as the script says.

        A pass is the last of a step only if the script says so of all parts: gradients of a part that is told to wait
        add up, and a reduction of the others at the last pass gives what theirs at each pass give.

        Args:
            module: the model, or a part of it.
            synchronizes: what the script says.
            recurse: it says so of all inside it.
        """
        for part in module.modules() if recurse else (module,):
            self._gates.pop(part, None)
        self._gates[module] = synchronizes
        engine = self.engine(module)
        if engine is not None:
            root = next(model.root for model in self.models if model.engine is engine)
            engine.gradients.set_synchronizes(enabled=self._gate_of(root) is not False)

    def boundary(self, module: nn.Module) -> Boundary:
        """Return what tells which backward passes of a sharded model are the last of their steps."""
        return next(model.boundary for model in self.models if model.is_of(module))

    def next_pass_is_last(self, module: nn.Module) -> bool:
        """Tell what the script set last for a model; without that every pass is the last of its step."""
        return self._gates.get(module) is not False

    def _gate_of(self, root: nn.Module) -> bool | None:
        """Return whether the script lets all parts of a model synchronize; None if it said nothing."""
        set_for = [gate for module, gate in self._gates.items() if are_related(module, root)]
        return all(set_for) if set_for else None

    def meet_for_norm(self, tensors: torch.Tensor | Iterable[torch.Tensor]) -> None:
        """Bring all ranks together where the script takes a norm of gradients, if those are sharded.

        Args:
            tensors: gradients, or parameters that have them.
        """
        given = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        if self._attendance is not None and any(
            isinstance(item, DTensor) or isinstance(item.grad, DTensor) for item in given
        ):
            self._attendance.meet_for_norm()

    def attend(self, passing: str = "") -> None:
        """Pass a point that all ranks pass together, as a rule a pass of some kind."""
        if self._attendance is not None:
            self._attendance.attend(passing)

    def finish_gradients(self) -> None:
        """Reduce the gradients of passes that were mistaken for inner ones."""
        for model in self.models:
            model.boundary.finish()

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is one of a sharded model's."""
        return any(model.boundary.is_of(optimizer) for model in self.models)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a job at its start that trains a model of the plan's size without any framework that a plan can be."""
        if self.is_reached:
            return
        count = _count(item for group in optimizer.param_groups for item in group["params"])
        if same_count(self.plan, count):
            self.refuse(
                TrainingError(
                    f"a plan needs a model that FSDP2, FSDP1, DDP or DeepSpeed wraps, got a step of "
                    f"{plain_name(optimizer)} without one",
                    hint=f"wrap the model with one of them, or {NO_PLAN}",
                )
            )

    def refuse_step_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """End a job that steps a sharded model's optimizer from a hook on a gradient: that one is not reduced yet."""
        if is_in_backward() and self.steps(optimizer):
            self.refuse(
                TrainingError(
                    "an optimizer under a plan must step after the backward pass, got a step inside it, such as from a "
                    "hook on a finished gradient",
                    hint=f"step after loss.backward(), or {NO_PLAN}",
                )
            )

    def refuse_local_step(self, optimizer: torch.optim.Optimizer) -> None:
        """End a job that steps after a pass whose gradients the script keeps from being reduced.

        DDP's optimizer takes those of each rank, and replicas part; FSDP's takes none, and the next step has them all.
        """
        for model in self.models:
            if not model.boundary.is_of(optimizer):
                continue
            if self.left_gathered and not self.left_gathered.isdisjoint(model.root.modules()):
                self.refuse(
                    TrainingError(
                        "a step under a plan must come when FSDP2's parameters are freed: what stays gathered behind a "
                        "backward pass is left out of the norm and not seen by the next pass",
                        hint="call reshard() of what set_reshard_after_backward(False) keeps before clipping, "
                        f"or {NO_PLAN}",
                    )
                )
            if model.boundary.is_local:
                self.refuse(
                    TrainingError(
                        "a step under a plan must follow a pass whose gradients are reduced, the last one was in "
                        "no_sync() or without gradient sync",
                        hint="let the last pass before each step be reduced, also at the end of an epoch, "
                        f"or {NO_PLAN}",
                    )
                )

    def refuse_new_parameters(self, module: nn.Module) -> None:
        """End a job that wraps a sharded model again, some of whose parameters the plan does not know."""
        model = next((model for model in self.models if model.root is module), None)
        if model is None:
            return
        known = {
            name: slot.parameter for unit in model.engine.units for slot in unit.spec.slots for name in slot.aliases
        }
        left_alone = set(model.engine.specs[-1].ignored.values())
        for name, parameter in nn.Module.named_parameters(module, remove_duplicate=False):
            if parameter not in left_alone and current(known.get(name)) is not current(parameter):
                self.refuse(
                    TrainingError(
                        f"a plan needs the parameters that a model had when it was sharded, got another {name}",
                        where=name,
                        hint="let it grow before its first training step, or resume with the larger one in a new job",
                    )
                )

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Learn from a step of an optimizer; look for a request to switch if it was the first sharded model's."""
        for place, model in enumerate(self.models):
            if model.boundary.after_step(optimizer) and place == 0 and self._switchboard is not None:
                self._switchboard.look()

    # ---- sharding -----------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, wrapping: Callable[[], Wrapping]) -> None:
        """Shard a model if this is its first pass that makes gradients; end the process if it cannot be.

        Args:
            module: about to be called, the outermost of those that the script wrapped.
            wrapping: what the script asked for it.
        """
        if not torch.is_grad_enabled():
            return
        for model in self.models:
            model.engine.shards.set_stepping(enabled=False)  # a script may have caught what ended a step
        if any(module is model.root for model in self.models):
            self._meet(module)
            if self._switchboard is not None and module is self.models[0].root:
                self.refuse_if_impossible(lambda: self._switch(module))
        elif not any(model.has_part(module) for model in self.models) and any(
            parameter.requires_grad for parameter in module.parameters()
        ):
            self.refuse_if_impossible(lambda: self._shard_unless_alone(module, wrapping()))
            self._meet(module)

    def _meet(self, module: nn.Module) -> None:
        """Pass a point with all ranks before a training pass, unless they may run different numbers of such."""
        model = next((model for model in self.models if module is model.root), None)
        if model is None:
            return
        # A switch is taken before any pass of a step.
        if not model.boundary.meets_nobody or self._switchboard is not None:
            self.attend(model.boundary.passing_of(module))
        model.engine.passes.meet()

    def accept_own_settings(self, framework: str, num_parameters: int) -> None:
        """Check the plan against a job that the framework itself runs by the plan's settings.

        Args:
            framework: that does.
            num_parameters: of the model, before it was sharded.
        """
        self.refuse_if_impossible(lambda: agree_on_plan(self.plan, may_switch=False))
        self.refuse_if_impossible(lambda: check_facts(self.plan, num_parameters))
        mark_applied()
        if dist.get_rank() == 0:
            name = grouped_triple(self.plan.chosen.triple, self.plan.chosen.group_size)
            tell(f"{framework} runs {name} by its own settings (plan {self.plan.plan_id})")

    def refuse_if_impossible(self, action: Callable[[], None]) -> None:
        """Do something, or end the job on this rank with the reason why it cannot be done."""
        try:
            action()
        except ParoAdviseError as error:
            self.refuse(error)

    def refuse(self, error: ParoAdviseError) -> NoReturn:
        """End the job on this rank with a reason and no traceback."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        write_lines(f"paro-advise: rank {rank}: the plan cannot be applied", *error.lines())
        mark_refused(error.exit_code)
        sys.exit(error.exit_code)

    def _shard_unless_alone(self, module: nn.Module, wrapping: Wrapping) -> None:
        """Shard a model, or leave it for now where this rank runs it by itself."""
        if not wrapping.evaluates_alone or self.collectives.all_begin(module):
            self._shard(module, wrapping)
            self.collectives.end()

    def _shard(self, module: nn.Module, wrapping: Wrapping) -> None:
        for model in self.models:
            if model.is_of(module) or any(parameter in self._replaced for parameter in module.parameters()):
                raise TrainingError(
                    f"a plan needs models that share nothing, {plain_name(module)} has parts of one that is sharded",
                    hint=NO_PLAN,
                )
        optimizers = self.optimizers_of(module)
        agree_on_plan(self.plan, may_switch=self._switchboard is not None)
        self._check_facts(module, wrapping)
        self._check_norm_limits(module, wrapping)
        if wrapping.init_from_rank_0:
            copy_from_rank_0(module)
        if (chosen := self.plan.chosen).offload.moves_parameters:
            raise TrainingError(
                "the runtime cannot keep parameters on the host, as this plan wants",
                hint="export the plan for DeepSpeed: paro-advise recommend ... --export deepspeed=FILE",
            )
        attributes = {name: attributes_of(parameter) for name, parameter in module.named_parameters()}
        if wrapping.let_go is not None:
            wrapping.let_go()
        # Not earlier: the framework may have kept gathered parameters in place.
        wrapping.check_optimizers(module, optimizers)
        wrapping.check_frozen(module)
        before = dict(module.named_parameters())
        with wrapping.as_wrapped(module, optimizers):
            shard(
                module,
                optimizers,
                chosen.triple,
                group_size=chosen.group_size or self.plan.preconditions.gpus_per_node,
                units=outermost_units(module, wrapping.units),
                param_dtype=wrapping.param_dtype,
                cast_modules=wrapping.cast_modules,
                output_dtypes=wrapping.output_dtypes,
                keep_types=wrapping.keeps_types,
                reduce_dtype=wrapping.reduce_dtype,
                offload_optimizer=chosen.offload == Offload.OPTIMIZER,
                native_collectives=chosen.collectives == CollectiveBackend.NATIVE,
                ignored_params=wrapping.ignored,
            )
        engine = engine_of(module)
        engine.stands_for_fsdp2 = engine.gradients.is_of_fsdp2 = wrapping.norms_are_dtensors
        engine.framework_shards = wrapping.shards_parameters
        engine.usage.missing = wrapping.missing_gradients
        engine.gradients.show_as(FrameworksShard if wrapping.shows_shards else WholeTensor)
        WholeReads.frameworks_meshes.update(wrapping.mesh_shapes)
        engine.gradients.reduces_once = wrapping.keeps_local_gradients
        slots = {name: slot for unit in engine.units for slot in unit.spec.slots for name in slot.aliases}
        for name in before.keys() & slots.keys():
            self._replaced[before[name]] = slots[name]
            carry_attributes(attributes.get(name, {}), slots[name].parameter)
        self.handed_out.lead_to(engine, self._replaced)
        if wrapping.compile is not None:
            # Unit by unit, as FSDP2's users do: what surrounds a unit's forward must run as it is.
            for unit in engine.units[:-1]:
                unit.spec.module.forward = wrapping.compile(unit.spec.module.forward)
        if wrapping.states_are_whole:
            self._let_attend(engine, wrapping)
        if (gate := self._gate_of(module)) is not None:
            engine.gradients.set_synchronizes(enabled=gate)
        boundary = Boundary(engine, optimizers, is_gated=gate is not None, keeps_unreduced=wrapping.norms_are_dtensors)
        self.models.append(PlannedModel(root=module, wrapping=wrapping, engine=engine, boundary=boundary))
        self._let_meet()
        if self._switchboard is not None and len(self.models) == 1:
            self._switchboard.open(self.plan)
        mark_applied()
        if dist.get_rank() == 0:
            parts = f"{plural(len(engine.units), 'unit')}, {' and '.join(map(plain_name, optimizers))}"
            self._announce(f"{_collectives_of(engine, chosen)}, {parts}", module, wrapping)

    def _let_attend(self, engine: Engine, wrapping: Wrapping) -> None:
        if self._attendance is None:
            self._attendance = Attendance(self.collectives.sum_unattended)
            self.collectives.attended = self._attendance.call
        AttendedReader(self._attendance, engine).attach(evaluates_alone=wrapping.evaluates_alone)

    def _check_facts(self, module: nn.Module, wrapping: Wrapping) -> None:
        """Check the plan against this model.

        A trace of several models holds the parameters of all, one of DDP those that have gradients, and none holds
        what a framework ignores.

        Raises:
            StalePlanError: it is for another job.
        """
        whole: list[torch.Tensor] = list(module.parameters())
        in_all = [*whole, *self._optimized_parameters()]
        moved = [[item for item in items if item not in wrapping.ignored] for items in (whole, in_all)]
        trained = [[item for item in items if item.requires_grad] for items in moved]
        check_facts(self.plan, *(_count(items) for items in (whole, in_all, *moved, *trained)))

    def _check_norm_limits(self, module: nn.Module, wrapping: Wrapping) -> None:
        """Refuse embeddings that shorten the rows they look up: each replica of DDP does so to its own rows only."""
        if not wrapping.keeps_local_gradients or self.plan.chosen.triple.endswith(Level.N):
            return
        for name, part in module.named_modules():
            is_limited = isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None
            if is_limited and part.weight.requires_grad:
                raise TrainingError(
                    "a plan that shards optimizer states needs weights that a forward pass leaves alone, got an "
                    "embedding with max_norm",
                    where=name,
                    hint="limit the norm of its weight after each step on all ranks, or choose NNN",
                )

    def _announce(self, parts: str, module: nn.Module, wrapping: Wrapping) -> None:
        """Print what runs now, and what it means for checkpoints."""
        chosen = self.plan.chosen
        tell(
            f"{wrapping.origin} of {plain_name(module)} "
            f"runs as {grouped_triple(chosen.triple, chosen.group_size)} with {parts} (plan {self.plan.plan_id})"
        )
        for note in filter(None, (untested_torch(), *wrapping.notes(engine_of(module)))):
            tell(note)

    def _switch(self, module: nn.Module) -> None:
        assert self._switchboard is not None
        changed = self._switchboard.take(module, self.plan, is_alone=len(self.models) == 1)
        if changed is not None:
            self.plan = changed
            self.models[0].boundary.restart()
            self.handed_out.lead_to(self.models[0].engine, self._replaced)
            self._let_meet()

    def _let_meet(self) -> None:
        """Let DTensors that an FSDP2 script has made before the plan meet its parameters, and what is made of both.

        Sharded over all ranks, parameters lie as those DTensors do.
        """
        lies_elsewhere = not self.plan.chosen.triple.startswith(Level.G)
        let_dtensors_meet_plain_tensors(enabled=lies_elsewhere and self.norms_are_dtensors)

    def _optimized_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all optimizers that the script has made, as they are today."""
        alive = [optimizer for reference in self.optimizers if (optimizer := reference()) is not None]
        return [item for optimizer in alive for group in optimizer.param_groups for item in group["params"]]

    def optimizers_of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the optimizers that the script has made over parameters of a module.

        Raises:
            TrainingError: it has made none.
        """
        owners = self.optimizers_over(module)
        if not owners:
            raise TrainingError(
                "a planned model must have an optimizer over its parameters, got none",
                hint="make the optimizer before the first training step, and after fully_shard",
            )
        return owners

    def optimizers_over(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        """Return the same, or none."""
        parameters = {id(parameter) for parameter in module.parameters()}
        owners = []
        for reference in self.optimizers:
            optimizer = reference()
            if optimizer is not None and any(
                id(item) in parameters for group in optimizer.param_groups for item in group["params"]
            ):
                owners.append(optimizer)
        # Torchtitan's container of optimizers is one itself, over all their parameters.
        return [owner for owner in owners if not any(_holds(owner, other) for other in owners)]


def _holds(container: object, item: object) -> bool:
    """Tell whether an object keeps another one among its attributes, alone or in a list, tuple or dictionary."""
    for value in vars(container).values():
        kept = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
        if any(other is item for other in kept):
            return True
    return False


def _count(tensors: Iterable[torch.Tensor]) -> int:
    """Return the elements of tensors, each taken once."""
    return sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _collectives_of(engine: Engine, chosen: Choice) -> str:
    """Return what moves the model's states, and why that differs from the plan."""
    if engine.uses_ho_ring:
        return "HO-Ring"
    if chosen.collectives == CollectiveBackend.NATIVE:
        return "native collectives"
    return f"native collectives, for HO-Ring was never measured on {engine.device.type} devices"
