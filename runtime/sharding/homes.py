"""Where the parameters of a model rest: whole, or with FSDP2, and the optimizer's rows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from paro_advise.policies.strategy import Level
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.sharding.parameters import fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.settings import Settings


class ParameterHomes:
    """Brings parameters to rest at their level, and the optimizer's rows to them.

    Args:
        model: whole.
        settings: types and places.
        deliver: takes the whole gradients of a unit from FSDP2.
    """

    def __init__(
        self, model: nn.Module, settings: Settings, deliver: Callable[[UnitState, torch.Tensor], None]
    ) -> None:
        self._model = model
        self._settings = settings
        self._deliver = deliver

    def home(self, arrangement: Arrangement, unit: UnitState) -> None:
        """Bring the whole parameters that a unit's slots hold to rest at their level."""
        spec, dtype = unit.spec, self._settings.param_dtype
        if dtype is not None:
            for slot in spec.slots:
                whole = slot.parameter
                if whole.is_floating_point() and whole.dtype != dtype:
                    slot.fill(nn.Parameter(whole.detach().to(dtype), requires_grad=slot.trains))
        if arrangement.levels.parameter == Level.N:
            return

        def gather(output: torch.Tensor, block: torch.Tensor) -> None:
            with reaching_all_ranks("a gather of parameters"):
                if arrangement.levels.parameter == Level.I:
                    arrangement.gathering.gather_inside(output, block)
                else:
                    arrangement.gathering.gather_by_rank(output, block)

        fsdp2.wrap(
            spec,
            arrangement.parameter_mesh(),
            reshard_after_forward=self._settings.reshard_root or spec.module is not self._model,
            param_dtype=dtype,
            reduce_dtype=self._settings.reduce_dtype,
            gather=gather,
            deliver=lambda whole: self._deliver(unit, whole),
        )

    def held(self, arrangement: Arrangement, unit: UnitState) -> list[torch.Tensor]:
        """Return what this rank holds of each trained parameter, flat."""
        if arrangement.levels.parameter == Level.N:
            return [slot.parameter.detach().view(-1) for slot in unit.spec.training]
        return [fsdp2.held(slot) for slot in unit.spec.training]

    def bind_masters(
        self, arrangement: Arrangement, unit: UnitState, separate: list[torch.Tensor] | None = None
    ) -> None:
        """Let the optimizer's rows of a unit be views of the parameters, or memory of their own.

        Args:
            arrangement: that the unit is of.
            unit: at rest.
            separate: the optimizer's rows where types differ; None to make views.
        """
        if separate is not None:
            unit.masters, unit.separate = separate, True
            return
        unit.masters, unit.separate = [], False
        levels = arrangement.levels
        for place, (slot, held) in enumerate(zip(unit.spec.training, self.held(arrangement, unit), strict=True)):
            first, _ = arrangement.rows_at(levels.parameter, unit, place)
            start, stop = arrangement.rows_at(levels.optimizer, unit, place)
            width = unit.layout.rows[place].row_elements
            part = held[(start - first) * width : (stop - first) * width]
            unit.masters.append(part.view(stop - start, *slot.shape[1:]))

    def give_up(self, arrangement: Arrangement) -> None:
        """Take parameters out of FSDP2; slots keep what they hold at rest."""
        if arrangement.levels.parameter != Level.N:
            fsdp2.reshard(self._model)
            for unit in reversed(arrangement.units):
                fsdp2.unwrap(unit.spec.module)
