"""Shows the parameters of a sharded model whole for a while, as FSDP1's ``summon_full_params`` does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.runtime.sharding.states.states import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot


@contextmanager
def whole_parameters(engine: Engine, *, writes_back: bool) -> Iterator[None]:
    """Register whole parameters, in the type the optimizer works in, until the end of the context.

    All ranks enter and leave at once; it takes the memory of the whole model.

    Args:
        engine: of the model.
        writes_back: what each rank has made of its own rows counts afterwards.
    """
    engine.show_parameters()
    engine.edits.before_step()
    held = {slot.name: slot.parameter for unit in engine.units for slot in unit.spec.slots}
    for unit in engine.units:
        for slot, value in zip(unit.spec.slots, _whole_values(engine, unit), strict=True):
            slot.fill(nn.Parameter(value, requires_grad=slot.trains))
    engine.is_summoned = True
    try:
        yield
    finally:
        engine.is_summoned = False
        for unit in engine.units:
            shown = {slot.name: slot.parameter.detach() for slot in unit.spec.slots}
            for slot in unit.spec.slots:
                slot.fill(held[slot.name])
            if writes_back:
                _write_back(engine, unit, shown)
        if writes_back:
            engine.updates.publish()
        engine.edits.note_all()


def _whole_values(engine: Engine, unit: UnitState) -> list[torch.Tensor]:
    trained = iter(whole(engine.arrangement, unit, [master.detach() for master in unit.masters]))
    return [next(trained) if slot.trains else _frozen(slot).clone() for slot in unit.spec.slots]


def _frozen(slot: Slot) -> torch.Tensor:
    value = slot.parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _write_back(engine: Engine, unit: UnitState, shown: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for place, slot in enumerate(unit.spec.training):
            unit.masters[place].copy_(engine.arrangement.own_rows(unit, place, shown[slot.name]))
        for slot in unit.spec.slots:
            if not slot.trains:
                slot.parameter.copy_(shown[slot.name])
