"""Ties a model, its optimizer and the procedure of a strategy together.

Four objects do the work: an Arrangement says what lies where under the present strategy, ParameterHomes keeps
parameters, GradientReducer takes gradients to the optimizer, UpdatePublisher brings updates back.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level, Strategy
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.sharding.arrangement import Arrangement, Communicators
from paro_advise.runtime.sharding.checks import watch_chosen_inputs, watch_kept_parameters
from paro_advise.runtime.sharding.exchange.executor import executor_for
from paro_advise.runtime.sharding.exchange.usage import Usage
from paro_advise.runtime.sharding.exports import watch_exports
from paro_advise.runtime.sharding.optimizers.param_states import lead_to_shard
from paro_advise.runtime.sharding.optimizers.parameters import owned_by_optimizer
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import is_in_backward, set_gradient
from paro_advise.runtime.sharding.parameters.replicated import ReplicatedUnits, cast_passes
from paro_advise.runtime.sharding.phases.edits import Edits, weights_are_given
from paro_advise.runtime.sharding.phases.gradients import GradientReducer
from paro_advise.runtime.sharding.phases.homes import ParameterHomes
from paro_advise.runtime.sharding.phases.lost_edits import GatheredCopies, WholeInForward
from paro_advise.runtime.sharding.phases.lost_gradients import check_output
from paro_advise.runtime.sharding.phases.passes import RankPasses
from paro_advise.runtime.sharding.phases.returned_views import ReturnedViews
from paro_advise.runtime.sharding.phases.updates import UpdatePublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.exchange.channels import Channels, GroupGrid
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.optimizers.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.reading import WholeReader
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec
    from paro_advise.runtime.sharding.settings import Settings


FACTOR_SETTER = "set_gradient_divide_factor"


class Engine:
    """A sharded model at work.

    Attributes:
        whole_reader: for scripts that take state dicts to be whole; None where they hold shards.
        passes: which ones all ranks make together.
        is_summoned: the model shows whole parameters for a while, and no pass of training may begin.
        place_state: what state dicts keep of a parameter.
        framework_shards: the script's own framework shards parameters, and forgets what a forward pass changes on them.
        stands_for_fsdp2: state dicts are those of FSDP2: DTensors all, the optimizer's by places in its groups.
        model, specs, shards, settings, device: as given.
        uses_ho_ring: collectives are ours, not the backend's own.
        arrangement: what lies where under the present strategy.
        usage: which parameters got gradients.
        homes, gradients, updates: see this module.
    """

    # A model's hooks keep its engine; a strong reference from here would keep both for ever.
    _of_model: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]] = weakref.WeakKeyDictionary()
    _of_part: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]] = weakref.WeakKeyDictionary()

    def __init__(
        self,
        model: nn.Module,
        specs: list[UnitSpec],
        shards: OptimizerShards,
        *,
        strategy: Strategy,
        grid: GroupGrid,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.model = model
        self.whole_reader: WholeReader | None = None
        self.passes = RankPasses(model)
        self.is_summoned = False
        self.framework_shards = False
        self.stands_for_fsdp2 = False
        self.place_state: Callable[[torch.Tensor], torch.Tensor] = lambda value: value
        self.specs = specs
        self.shards = shards
        self.settings = settings
        self.device = device
        self._handles: list[RemovableHandle] = []
        self._copies: list[GatheredCopies] = []
        self._gathered_by_hand: dict[str, WholeInForward] = {}
        self._returned = ReturnedViews()
        reductions = executor_for(device, "a reduction of gradients")
        updates = executor_for(device, "an update of parameters", depth=len(specs) + 1)
        self.usage = Usage(specs, device)
        self.gradients = GradientReducer(model, settings, shards, self.usage, reductions, updates)
        self.homes = ParameterHomes(model, settings, self.gradients)
        self.homes.before_backward = self.passes.begin_backward
        self.updates = UpdatePublisher(self.homes, updates)
        self.homes.before_copy = self.updates.before_copy
        self.edits = Edits(self.homes, shards, self.updates, self.gradients.replicas)
        threads = [*reductions.threads, *updates.threads]
        # HO-Ring was never measured on a device, whose own collectives know its links.
        self.uses_ho_ring = not settings.native_collectives and device.type == "cpu"
        self._communicators = Communicators.lent_to(self, threads, native=not self.uses_ho_ring)
        for executor in (reductions, updates):  # threads outlive whoever started them
            weakref.finalize(self, executor.ending()).atexit = False
        self.set_strategy(strategy, grid)

    @classmethod
    def find(cls, model: nn.Module) -> Engine | None:
        """Return the engine of a sharded model, None for any other one."""
        known = cls._of_model.get(model)
        return known() if known else None

    @classmethod
    def of_part(cls, part: nn.Module) -> Engine | None:
        """Return the engine of the sharded model that a module is a part of, None for any other one and for copies."""
        known = cls._of_part.get(part)
        return known() if known else None

    def register(self) -> None:
        """Let ``find`` and ``of_part`` know the engine of this model."""
        self._of_model[self.model] = weakref.ref(self)
        for part in self.model.modules():
            self._of_part[part] = weakref.ref(self)

    def set_strategy(self, strategy: Strategy, grid: GroupGrid) -> None:
        """Choose levels and groups; parameters are placed afterwards."""
        self.arrangement = Arrangement(self.specs, strategy, grid, self.device, self._communicators)
        self.gradients.arrange(self.arrangement)
        self.updates.arrange(self.arrangement)
        self.edits.arrange(self.arrangement)

    # ---- the present arrangement --------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return the strategy as asked for."""
        return self.arrangement.strategy

    @property
    def levels(self) -> Strategy:
        """Return the strategy with level I only where it differs from N and G."""
        return self.arrangement.levels

    @property
    def grid(self) -> GroupGrid:
        """Return the groups."""
        return self.arrangement.grid

    @property
    def units(self) -> list[UnitState]:
        """Return the units; the root last."""
        return self.arrangement.units

    @property
    def holds_all(self) -> bool:
        """Tell whether the model holds its parameters whole, and in the type that the optimizer works in."""
        whole = self.levels.parameter == Level.N
        return whole and all(slot.parameter.dtype == slot.dtype for unit in self.units for slot in unit.spec.training)

    @property
    def reducing(self) -> Channels:
        """Return the channels of gradients."""
        return self.arrangement.reducing

    @property
    def gathering(self) -> Channels:
        """Return the channels of parameters."""
        return self.arrangement.gathering

    @property
    def optimizer_device(self) -> torch.device:
        """Return where the optimizer's parameters and states are."""
        return torch.device("cpu") if self.settings.offload_optimizer else self.device

    @staticmethod
    def _set_factor_of(owner: weakref.ref[Engine], module: weakref.ref[nn.Module], factor: float) -> None:
        engine, unit = owner(), module()
        if engine is not None and unit is not None:
            engine.set_divide_factor(unit, factor)

    @property
    def synchronizes(self) -> bool:
        """Tell whether the next backward pass is an accumulation boundary."""
        return self.gradients.synchronizes

    # ---- beginning and ending -----------------------------------------------------------------

    def settle(self, unit: UnitState, masters: list[torch.Tensor] | None) -> None:
        """Bring a unit to rest, and the optimizer's rows to it: its own ones, or views where None."""
        self.homes.home(self.arrangement, unit)
        # FSDP2's own would act on what our procedure reduces.
        setter = partial(Engine._set_factor_of, weakref.ref(self), weakref.ref(unit.spec.module))
        unit.spec.module.__dict__[FACTOR_SETTER] = setter
        self.homes.bind_masters(self.arrangement, unit, masters)

    def place_shards(self) -> None:
        """Give the optimizer its rows of all units as parameters."""
        shards = {}
        for unit in self.units:
            for place, (slot, master) in enumerate(zip(unit.spec.training, unit.masters, strict=True)):
                shards[slot.name] = owned_by_optimizer(
                    nn.Parameter(self.arrangement.as_sharded(unit, place, master)), *slot.places[0]
                )
        self.shards.place(shards)
        for unit in self.units:
            for slot in unit.spec.training:
                lead_to_shard(slot.parameter, shards[slot.name])
        for unit in self.units:
            for place, slot in enumerate(unit.spec.training):
                self.shards.take_given(slot.name, partial(self._own_rows, unit, place))

    def _own_rows(self, unit: UnitState, place: int, whole: torch.Tensor) -> torch.Tensor:
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        rows = self.arrangement.copy_of_own_rows(unit, place, whole, self.optimizer_device)
        return self.arrangement.as_sharded(unit, place, rows)

    def start(self) -> None:
        """Begin to take gradients, once all units are at rest."""
        if self.levels.parameter == Level.N:
            self._start_replicated()
        else:
            watch_kept_parameters()
        watch_chosen_inputs()
        watch_exports()
        # Registered last and put first: nothing may read parameters or add gradients before.
        for unit in self.units:
            hook = self._before_forward(unit)
            self._handles.append(unit.spec.module.register_forward_pre_hook(hook, prepend=True))
            self._watch_changes(unit)
            if self.levels.parameter != Level.N and unit.spec.training and self.homes.frees_after_forward(unit):
                self._handles.append(unit.spec.module.register_forward_hook(check_output(unit)))
        names, units = self.settings.cast_modules, [unit.spec.module for unit in self.units]
        casts = units if names is None else map(self.model.get_submodule, names)
        outputs = {self.model.get_submodule(name): dtype for name, dtype in self.settings.output_dtypes}
        self._handles += cast_passes(casts, self.settings.param_dtype, outputs)
        self._handles.append(self.model.register_forward_hook(self._after_forward))
        self._handles.append(self.model.register_forward_hook(self._end_pass, always_call=True))
        self.edits.note_all()
        for unit in self.units:
            for slot in unit.spec.training:
                # Whole gradients are added up in the type they are reduced in, if it is wider, and shown in the
                # optimizer's; FSDP2 adds them up itself and puts its own on the parameter for a moment.
                reduced = self.settings.gradient_dtype(slot)
                if self.levels.parameter == Level.N and reduced.itemsize > slot.parameter.dtype.itemsize:
                    slot.parameter.grad_dtype = reduced
                elif slot.parameter.dtype != slot.dtype:
                    slot.parameter.grad_dtype = None

    def _watch_changes(self, unit: UnitState) -> None:
        """Refuse changes in the unit's forward pass of which another result would come than of the plain script."""
        slots, is_root, is_sharded = unit.spec.slots, unit.spec.module is self.model, self.levels.parameter != Level.N
        watched = GatheredCopies(unit) if is_sharded else WholeInForward(slots, stays=is_root)

        def differs() -> bool:
            # FSDP2 forgets them alike in both. FSDP1 may keep other units gathered than the plan does.
            return not self.stands_for_fsdp2 if is_sharded else self.framework_shards

        @uncompiled
        def begin(*_: object) -> None:
            if differs():
                watched.begin()

        @uncompiled
        def end(*_: object) -> None:
            if differs():
                watched.end()

        if is_sharded:
            self._handles.append(
                unit.spec.module.register_forward_hook(uncompiled(self._returned.hook_of(unit)), prepend=True)
            )
        # After FSDP2 has gathered, and before it frees.
        self._handles.append(unit.spec.module.register_forward_pre_hook(begin))
        self._handles.append(unit.spec.module.register_forward_hook(end, prepend=True))
        if isinstance(watched, GatheredCopies):
            self._copies.append(watched)
        elif is_root:
            self.gradients.before_backward = watched.begin_backward

    def _start_replicated(self) -> None:
        order = self.arrangement.forward_order
        self.gradients.replicated = ReplicatedUnits(
            [unit.spec for unit in order],
            lambda place: self.gradients.deliver_whole(order[place]),
            started=self.gradients.queue_callback,
            arrived=self.gradients.executor.arrive,
        )

    def stop(self) -> None:
        """Undo ``start`` and take parameters out of FSDP2; slots keep what they hold at rest."""
        self.gradients.executor.drain()
        self.updates.finish()
        for handle in self._handles:
            handle.remove()
        self._handles, self._copies = [], []
        self.gradients.before_backward = lambda: None
        if self.gradients.replicated:
            self.gradients.replicated.detach()
            self.gradients.replicated = None
        self.homes.give_up(self.arrangement)

    def set_divide_factor(self, module: nn.Module, factor: float) -> None:
        """Divide the sums of a unit's gradients by something else than the number of ranks, as FSDP2's users may.

        Raises:
            UsageError: the module is no unit of the model.
        """
        found = [unit for unit in self.units if unit.spec.module is module]
        if not found:
            raise UsageError(
                f"gradients are divided unit by unit, got {type(module).__name__}, which is none",
                hint="call set_gradient_divide_factor on the modules that fully_shard was called on",
            )
        found[0].divide_factor = float(factor)

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return what each rank has for itself, by name: what no strategy moves and no other rank shares."""
        shared = set(self.gradients.singles.parameters)
        return {name: item for name, item in self.specs[-1].ignored.items() if item not in shared}

    @property
    def hook_handles(self) -> tuple[RemovableHandle, ...]:
        """Return what removes these functions."""
        return tuple(self._handles)

    @property
    def hooks(self) -> list[object]:
        """Return the functions that the model's modules call for us."""
        tables = [(handle.hooks_dict_ref(), handle.id) for handle in self._handles]
        return [table[key] for table, key in tables if table is not None and key in table]

    # ---- forward and backward -----------------------------------------------------------------

    def _before_forward(self, unit: UnitState) -> Callable[..., None]:
        is_root = unit.spec.module is self.model

        @uncompiled
        def prepare(*_: object) -> None:
            if is_root:
                self._begin_pass()
            self.passes.begin_unit()
            given = weights_are_given()
            for needed in (unit, *self._find_gathered_ahead(unit)):
                self.updates.wait_for(needed)
                if not (given and self.edits.leave_given_weights(needed)):
                    self.edits.before_forward(needed)

        return prepare

    def _find_gathered_ahead(self, unit: UnitState) -> list[UnitState]:
        modules = fsdp2.gathered_ahead(unit.spec.module) if self.levels.parameter != Level.N else []
        return [other for other in self.units if any(other.spec.module is module for module in modules)]

    def _begin_pass(self) -> None:
        """Clear up after a pass that an exception has left.

        Raises:
            UsageError: it was a backward pass, whose gradients are incomplete and still there.
        """
        if self.gradients.is_broken_off:
            raise UsageError(
                "a backward pass that an exception has left must be forgotten before the next one",
                hint="call optimizer.zero_grad() where the exception is caught",
            )
        if self.levels.parameter != Level.N and not is_in_backward() and not fsdp2.is_resting(self.model):
            fsdp2.recover(self.model)
        if not is_in_backward():
            self.gradients.begin_forward()
        self.shards.set_stepping(enabled=False)  # an exception may have left a step
        self.passes.begin()
        self.gradients.set_aside()

    @uncompiled
    def _end_pass(self, *_: object) -> None:
        self.passes.leave()
        self.gradients.put_back()

    @uncompiled
    def _after_forward(self, _module: object, _inputs: object, output: object) -> None:
        if torch.is_grad_enabled():
            outputs = fsdp2.tensors_with_gradient(output)
            self.gradients.arm(outputs)
            if self.levels.parameter != Level.N:
                self.gradients.watch(outputs)
            self.passes.end(outputs)
        if self.levels.parameter != Level.N and (not torch.is_grad_enabled() or self.passes.ends_alone):
            # No backward may follow that would free the root's; whole, it would miss the clipping, the step and
            # the next update.
            fsdp2.reshard(self.model)

    def begin_gathered_by_hand(self, module: nn.Module) -> None:
        """Watch a unit that a script gathers until it frees it, in a framework that forgets what is changed between."""
        if self.levels.parameter == Level.N:
            self.show_parameters()
            for unit in (item for item in self.units if item.spec.module is module and not self._is_watched(item)):
                self._gathered_by_hand[unit.spec.name] = watched = WholeInForward(unit.spec.slots, stays=True)
                watched.begin()

    def _is_watched(self, unit: UnitState) -> bool:
        return unit.spec.name in self._gathered_by_hand

    def end_gathered_by_hand(self, module: nn.Module | None = None) -> None:
        """Look whether a script has changed a unit that it has gathered; None for all such units.

        Raises:
            UsageError: it has.
        """
        for unit in self.units:
            if module is None or unit.spec.module is module:
                watched = self._gathered_by_hand.pop(unit.spec.name, None)
                if watched is not None:
                    watched.check()

    @property
    def is_remade(self) -> bool:
        """Tell whether a script has put other objects in the places of parameters that each rank holds whole."""
        is_whole = self.levels.parameter == Level.N and not torch.compiler.is_exporting()
        return is_whole and any(self.homes.holds_others(self.arrangement, unit) for unit in self.units)

    def show_parameters(self) -> None:
        """Let the model's parameters be what the optimizer has made of them, before a script reads them."""
        if self.is_summoned:
            return
        self.updates.finish()
        if not is_in_backward() and fsdp2.is_resting(self.model):
            self.homes.rest(self.arrangement)
            self.edits.publish()

    def saved_forms(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Return each parameter as a state dict of FSDP2 holds it, over the memory that training changes."""
        for unit in self.units:
            for place, slot in enumerate(unit.spec.training):
                yield slot, self.arrangement.as_dtensor(unit, place, self.edits.to_save(unit, place))
            for slot in unit.spec.slots:
                if not slot.trains:
                    yield slot, self.arrangement.replicated(slot.parameter.detach())

    @contextmanager
    def placing_states(self, place: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Let state dicts keep what a function makes of each parameter, as soon as its unit is gathered."""
        before, self.place_state = self.place_state, place
        try:
            yield
        finally:
            self.place_state = before

    @contextmanager
    def shown_as_shards(self) -> Iterator[None]:
        """Let state dicts be those of FSDP2 inside this context."""
        before = self.whole_reader, self.stands_for_fsdp2
        self.whole_reader, self.stands_for_fsdp2 = None, True
        try:
            yield
        finally:
            self.whole_reader, self.stands_for_fsdp2 = before

    # ---- what the optimizer calls -------------------------------------------------------------

    def before_step(self) -> None:
        """Bring the gradients to the optimizer's parameters."""
        for copies in self._copies:
            copies.end()
        self._returned.check()
        self.end_gathered_by_hand()
        self.homes.rest(self.arrangement)
        self.edits.before_step()
        self.gradients.collect()

    def after_step(self) -> None:
        """Bring the updated parameters to the model."""
        if self.settings.offload_optimizer:
            for shard in self.shards.shards.values():
                set_gradient(shard, None)
        self._returned.retire()
        self.gradients.after_step()
        self.updates.publish(wait=not self.settings.overlap_updates)
        self.edits.note_all()
