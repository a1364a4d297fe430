"""Shows the parameters of a sharded model whole for a while, as FSDP1's ``summon_full_params`` does."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.states.states import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot


@contextmanager
def whole_parameters(engine: Engine, *, writes_back: bool) -> Iterator[None]:
    """Register whole parameters, in the type the optimizer works in, until the end of the context.

    All ranks enter and leave at once; it takes the memory of the whole model. Passes without gradients, such as those
    of a text generation, run on what is shown; how many may differ from rank to rank.

    Args:
        engine: of the model.
        writes_back: what each rank has made of its own rows counts afterwards.
    """
    engine.show_parameters()
    engine.edits.before_step()
    held = {slot.name: slot.parameter for unit in engine.units for slot in unit.spec.slots}
    for unit in engine.units:
        for slot, value in zip(unit.spec.slots, whole_values(engine, unit), strict=True):
            slot.fill(nn.Parameter(value, requires_grad=slot.trains))
    engine.is_summoned = True
    try:
        with without_sharding(engine):
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


@contextmanager
def without_sharding(engine: Engine) -> Iterator[None]:
    """Let the model's modules run on the parameters that they hold: nothing gathers, frees or counts passes."""
    handles = [*engine.hook_handles, *fsdp2.hook_handles(engine.model)]
    tables = [(table, handle.id) for handle in handles if (table := handle.hooks_dict_ref()) is not None]
    left = [(table, dict(table)) for table in {id(table): table for table, _ in tables}.values()]
    gone = {key for table, key in tables if table.pop(key, None) is not None}
    try:
        with passes_checked(engine, _refuse_training):
            yield
    finally:
        for table, before in left:
            now = dict(table)
            table.clear()
            # In their old order; what the script has removed or added meanwhile stays so.
            table.update({key: hook for key, hook in before.items() if key in now or key in gone})
            table.update({key: hook for key, hook in now.items() if key not in before})


@contextmanager
def passes_checked(engine: Engine, check: Callable[..., None]) -> Iterator[None]:
    """Call a function before each pass through a unit."""
    handles = [unit.spec.module.register_forward_pre_hook(check, prepend=True) for unit in engine.units]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_training(*_: object) -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "no pass of training may begin while whole parameters are shown, got one",
            hint="run it outside of summon_full_params, or without gradients (torch.no_grad)",
        )


def whole_values(engine: Engine, unit: UnitState) -> list[torch.Tensor]:
    """Gather the parameters of a unit on all ranks, those that train in the type the optimizer works in."""
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
