"""Where the parameters of a model rest: whole, or with FSDP2, and the optimizer's rows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import (
    attributes_of,
    carry_attributes,
    free_replaced,
    is_in_backward,
    take_ownership,
)
from paro_advise.runtime.sharding.parameters.whole import current, stand_in
from paro_advise.runtime.sharding.phases.lost_gradients import refuse_late

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec
    from paro_advise.runtime.sharding.phases.gradients import GradientReducer
    from paro_advise.runtime.sharding.settings import Settings


class ParameterHomes:
    """Brings parameters to rest at their level, and the optimizer's rows to them.

    Args:
        model: whole.
        settings: types and places.
        keeper: takes the whole gradients of a unit from FSDP2, and adds gradients up.

    Attributes:
        before_gather: called before each gather of a unit's parameters; None for nothing to call.
        before_backward: called by sharded units before anything is done for backward.
        before_copy: called before this rank's rows of a unit are copied for a gather, on the stream that copies.
    """

    def __init__(self, model: nn.Module, settings: Settings, keeper: GradientReducer) -> None:
        self._model = model
        self._settings = settings
        self._keeper = keeper
        self._deliver = keeper.deliver
        self.before_gather: Callable[[UnitState], None] | None = None
        self.before_copy: Callable[[UnitState], None] = lambda _: None
        self.before_backward: Callable[[], None] = lambda: None

    def home(self, arrangement: Arrangement, unit: UnitState) -> None:
        """Bring the whole parameters that a unit's slots hold to rest at their level, each as one piece of memory."""
        spec, dtype = unit.spec, self._settings.resting_dtype(arrangement.levels)
        before = [slot.parameter for slot in spec.slots]
        for slot in spec.slots:
            whole = slot.parameter
            wanted = dtype if dtype is not None and whole.is_floating_point() else whole.dtype
            if wanted != whole.dtype or not whole.is_contiguous():
                resting = whole.detach().to(wanted).contiguous()
                slot.fill(nn.Parameter(resting, requires_grad=slot.trains))
        if arrangement.levels.parameter == Level.N:
            self._own(spec, before)
            return

        def gather(output: torch.Tensor, block: torch.Tensor) -> None:
            if self.before_gather is not None:
                self.before_gather(unit)
            if arrangement.levels.parameter == Level.G:  # groups may evaluate unequal numbers of batches
                self._keeper.note_gather(unit)
            with reaching_all_ranks("a gather of parameters"):
                if arrangement.levels.parameter == Level.I:
                    arrangement.gathering.gather_inside(output, block)
                else:
                    arrangement.gathering.gather_by_rank(output, block)

        fsdp2.wrap(
            spec,
            arrangement.parameter_mesh(),
            num_ranks=arrangement.grid.world_size,
            reshard_after_forward=self.frees_after_forward(unit),
            param_dtype=self._settings.param_dtype,
            reduce_dtype=self._settings.reduce_dtype,
            before_copy=lambda: self.before_copy(unit),
            before_backward=lambda: self.before_backward(),
            gather=gather,
            deliver=lambda gradients: self._deliver(unit, gradients),
        )
        self._own(spec, before)

    def _own(self, spec: UnitSpec, before: list[nn.Parameter]) -> None:
        for slot, old in zip(spec.slots, before, strict=True):
            if old is not slot.parameter:
                carry_attributes(attributes_of(old), slot.parameter)
                free_replaced(old)
                stand_in(old, slot)
            take_ownership(slot.parameter, self._keeper)

    def frees_after_forward(self, unit: UnitState) -> bool:
        """Tell whether a unit's sharded parameters are gathered again for backward."""
        return self._settings.reshard_root or unit.spec.module is not self._model

    def held(self, arrangement: Arrangement, unit: UnitState) -> list[torch.Tensor]:
        """Return what this rank holds of each trained parameter, flat; versions tell nothing of writing there."""
        if arrangement.levels.parameter == Level.N:
            return [slot.parameter.detach().data.view(-1) for slot in unit.spec.training]
        return [fsdp2.held(slot).view(-1) for slot in unit.spec.training]

    def bind_masters(
        self, arrangement: Arrangement, unit: UnitState, separate: list[torch.Tensor] | None = None
    ) -> None:
        """Let the optimizer's rows of a unit be views of the parameters, or memory of their own.

        Args:
            arrangement: that the unit is of.
            unit: at rest.
            separate: the optimizer's rows where types differ; None to make views where a view is one piece of memory.
        """
        if arrangement.levels.parameter == Level.N:
            unit.homes = [slot.parameter.detach() for slot in unit.spec.slots]
        unit.parameters = [slot.parameter for slot in unit.spec.slots]
        if separate is not None:
            unit.masters, unit.separate = separate, True
            return
        views = [self.rows_of_optimizer(arrangement, unit, place) for place in range(len(unit.spec.training))]
        # Fused optimizers take a tensor to be one piece of memory, as many other kernels do, and do not look.
        unit.masters = [view.contiguous() for view in views]
        unit.separate = any(view is not master for view, master in zip(views, unit.masters, strict=True))

    def rows_of_optimizer(self, arrangement: Arrangement, unit: UnitState, place: int) -> torch.Tensor:
        """Return the view of a model's trained parameter that the optimizer of this rank updates."""
        slot, levels = unit.spec.training[place], arrangement.levels
        first, _ = arrangement.rows_at(levels.parameter, unit, place)
        start, stop = arrangement.rows_at(levels.optimizer, unit, place)
        held = slot.parameter.detach() if levels.parameter == Level.N else fsdp2.held(slot)
        return unit.layout.rows[place].cut(held, start - first, stop - first)

    def refuse_others(self, arrangement: Arrangement, unit: UnitState) -> None:
        """Refuse other objects in the places of parameters, where their values or gradients would be lost.

        Raises:
            UsageError: one has been replaced; the optimizer would not train what the model computes with.
        """
        for slot in self._others(arrangement, unit):
            if torch.compiler.is_exporting():
                raise UsageError(
                    "torch.export must be given a model of its own, got one that a plan trains",
                    hint="make the model anew, load this one's state_dict() into it, and export that",
                )
            raise UsageError(
                f"{slot.name} must stay the parameter that it was when the model was sharded, got another one or none",
                where=slot.name,
                hint="tie or replace parameters before that; later copy values: parameter.data.copy_(values)",
            )

    def holds_others(self, arrangement: Arrangement, unit: UnitState) -> bool:
        """Tell whether other tensors stand in the places of a unit's parameters."""
        return any(True for _ in self._others(arrangement, unit))

    def _others(self, arrangement: Arrangement, unit: UnitState) -> Iterator[Slot]:
        is_sharded = arrangement.levels.parameter != Level.N
        for slot, parameter in zip(unit.spec.slots, unit.parameters, strict=True):
            for now in slot.registered:
                if now is parameter or (is_sharded and fsdp2.is_gathered(unit.spec.module, now)):
                    continue
                if now is None or is_sharded or current(now) is not parameter:
                    yield slot
                    break

    def bring_home(self, unit: UnitState) -> None:
        """Undo that a script has put other memory, or other objects, into the place of whole parameters.

        Their values are kept; hooks, the optimizer's views and what is sent are bound to the memory of before.

        Raises:
            UsageError: a parameter has another shape now.
        """
        for slot, home, parameter in zip(unit.spec.slots, unit.homes, unit.parameters, strict=True):
            now = slot.parameter
            if now is parameter and now.data_ptr() == home.data_ptr():
                continue
            if now.shape != home.shape:
                raise UsageError(
                    f"a parameter under a strategy must keep its shape, {tuple(home.shape)}, got {tuple(now.shape)}",
                    where=slot.name,
                    hint="change the model before it is sharded",
                )
            with torch.no_grad():
                home.copy_(now)
            parameter.data = home
            slot.fill(parameter)

    def give_up(self, arrangement: Arrangement) -> None:
        """Take parameters out of FSDP2; slots keep what they hold at rest."""
        if arrangement.levels.parameter != Level.N:
            fsdp2.reshard(self._model)
            for unit in reversed(arrangement.units):
                fsdp2.unwrap(unit.spec.module, refuse_late)

    def are_at_rest(self, arrangement: Arrangement, unit: UnitState) -> bool:
        """Tell whether the model shows the parameters of a unit that are kept, not gathered ones."""
        if arrangement.levels.parameter == Level.N:
            return True
        return all(isinstance(slot.parameter, DTensor) for slot in unit.spec.slots)

    def gather_once(self, unit: UnitState) -> None:
        """Take part in a gather of a unit's sharded parameters that another rank needs, outside of forward passes."""
        if not is_in_backward() and not fsdp2.is_resting(self._model):
            fsdp2.recover(self._model)  # an exception has left a forward pass
        fsdp2.reshard(self._model)
        fsdp2.gather_once(unit.spec.module)

    def rest(self, arrangement: Arrangement) -> None:
        """Free what is gathered between passes, so that the model shows the parameters that are kept."""
        if arrangement.levels.parameter != Level.N:
            fsdp2.reshard(self._model)
