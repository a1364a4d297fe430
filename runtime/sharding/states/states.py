"""The state of a sharded model and its optimizer by qualified names, whole or as shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from paro_advise.policies.strategy import Level
from paro_advise.runtime.sharding.optimizers.param_states import lay_out
from paro_advise.runtime.sharding.parameters.whole import stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.optimizers.optimizer import OptimizerShards
    from paro_advise.runtime.torch_types import StateDict

    OwnRows = Callable[[Engine, UnitState, int, torch.Tensor], torch.Tensor]


_ALL = slice(None)


def own_rows(engine: Engine, unit: UnitState) -> list[torch.Tensor]:
    """Copy this rank's rows at the optimizer's level out of whole parameters, in their own type."""
    copy, device = engine.arrangement.copy_of_own_rows, engine.optimizer_device
    return [copy(unit, place, slot.parameter, device, slot.dtype) for place, slot in enumerate(unit.spec.training)]


def optimizer_state(engine: Engine) -> StateDict:
    """Return the optimizer's state in the layout of torch's distributed checkpoints."""
    shards = engine.shards
    groups = []
    for group, names in zip(shards.optimizer.param_groups, shards.group_names, strict=True):
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": list(names)})
    state = {
        name: dict(lay_out(shard, shards.optimizer.state[shard]))
        for name, shard in shards.held.items()
        if shard in shards.optimizer.state
    }
    return {"state": state, "param_groups": groups}


def load_optimizer_state(
    engine: Engine, state: StateDict, own_rows: OwnRows | None = None, groups: slice = _ALL
) -> None:
    """Take a state by names.

    Args:
        engine: of the model.
        state: such as ``optimizer_state`` returned.
        own_rows: cuts this rank's rows out of tensors that are laid out in another way; None if none is.
        groups: those of the optimizer that it is of.
    """
    shards = engine.shards
    for group, theirs in zip(shards.optimizer.param_groups[groups], state["param_groups"], strict=True):
        group.update({key: value for key, value in theirs.items() if key != "params"})
    places = {slot.name: (unit, place) for unit in engine.units for place, slot in enumerate(unit.spec.training)}
    held = shards.held
    for name in (name for names in shards.group_names[groups] for name in names):
        shards.optimizer.state.pop(held[name], None)  # as torch does: what is not given has none
    for name, values in state["state"].items():
        if name in shards.ignored:
            device = held[name].device
            shards.optimizer.state[held[name]] = {
                key: value.to(device, copy=True) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in values.items()
            }
            continue
        if name not in places:
            continue  # frozen
        unit, place = places[name]
        shape = unit.spec.training[place].shape
        shards.optimizer.state[shards.shards[name]] = {
            key: engine.arrangement.as_sharded(
                unit, place, own_rows(engine, unit, place, value).to(engine.optimizer_device)
            )
            if own_rows is not None and isinstance(value, torch.Tensor) and value.shape == shape
            else _of_own_shape(value, shards.shards[name])
            for key, value in values.items()
        }


def _of_own_shape(value: object, shard: torch.Tensor) -> object:
    """Return a part of a state that has another shape than its parameter so that it meets the sharded one.

    An optimizer made it of a sharded gradient, as projections, means of rows and flat copies are; every rank keeps it
    whole. What shares no dimension with the parameter is the optimizer's own, as a table of codes is.
    """
    if not isinstance(shard, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    is_flat = value.dim() == 1 and value.numel() == shard.numel()
    if value.numel() < 2 or not (is_flat or set(value.shape) & set(shard.shape)):
        return value
    mesh = shard.device_mesh
    return DTensor.from_local(value.to(shard.device), mesh, [Replicate()] * mesh.ndim, run_check=False)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor, without autograd."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()  # noqa: SLF001 - to_local() makes a view


def whole(source: Arrangement, unit: UnitState, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gather a unit's tensors whole, on the model's device, from each rank's rows at the optimizer's level.

    All ranks call it at once; the result takes the memory of the unit.
    """
    if not rows:
        return []
    layout, channels, level = unit.layout, source.gathering, source.levels.optimizer
    if level == Level.N:
        return [row.to(source.device, copy=True) for row in rows]
    dtype, device = rows[0].dtype, source.device
    band = level == Level.I
    part = torch.zeros(layout.slab_elements if band else layout.slice_elements, dtype=dtype, device=device)
    places = layout.views_of_band(part) if band else layout.views_of_slice(part)
    for place, row in zip(places, rows, strict=True):
        place[: row.numel()].copy_(row.reshape(-1))
    grid = channels.grid
    buffer = torch.empty(grid.group_size * layout.slab_elements, dtype=dtype, device=device)
    if band:
        channels.gather_inside(buffer, part)
    else:
        channels.gather_all(buffer, part)
    found = [torch.empty(slot.shape, dtype=dtype, device=device) for slot in unit.spec.training]
    layout.spread(buffer, found)
    return found


def whole_of(
    source: Arrangement, unit: UnitState, shards: OptimizerShards, key: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather one kind of the optimizer's states for those parameters of a unit that have it, by name.

    A parameter has none that never had a gradient, or whose optimizer keeps other kinds. All ranks call it at once.
    """
    names = [slot.name for slot in unit.spec.training]
    found = [dict(shards.tensors(name)).get(key) for name in names]
    dtype = next(value.dtype for value in found if value is not None)
    rows = [
        torch.zeros_like(local(master), dtype=dtype) if value is None else local(value)
        for value, master in zip(found, unit.masters, strict=True)
    ]
    for name, value, gathered in zip(names, found, whole(source, unit, rows), strict=True):
        if value is not None:
            yield name, gathered


def model_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by qualified names: what trains as the optimizer's rows.

    Every rank so writes its own part only, in the type the optimizer works in.
    """
    engine.show_parameters()
    engine.edits.before_step()
    found: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        trained = {slot.name: place for place, slot in enumerate(unit.spec.training)}
        for slot in unit.spec.slots:
            place = trained.get(slot.name)
            value = (
                slot.parameter.detach()
                if place is None
                else engine.arrangement.as_sharded(unit, place, unit.masters[place])
            )
            found.update(dict.fromkeys(slot.aliases, value))
    singles = set(engine.gradients.singles.parameters)
    engine.show_parameters()
    every = nn.Module.named_parameters(engine.model, remove_duplicate=False)  # the model's own may take no arguments
    found.update({name: parameter.detach() for name, parameter in every if parameter in singles})
    persistent = nn.Module.state_dict(engine.model, keep_vars=True)
    found.update({name: value for name, value in engine.model.named_buffers() if name in persistent})
    return found


def move_unit(
    engine: Engine, old: UnitState, unit: UnitState, before: Arrangement, moments: dict[str, dict[str, torch.Tensor]]
) -> None:
    """Bring one unit from an old arrangement to the engine's present one.

    Args:
        engine: has its new strategy already; FSDP2 is off.
        old: the unit as it was; loses its memory.
        unit: the unit as it shall be.
        before: where the old rows lie.
        moments: the new rows of the optimizer's states, by name and key; filled.
    """
    names = [slot.name for slot in unit.spec.training]
    keys = sorted({key for name in names for key, _ in engine.shards.tensors(name)})
    for key in keys:
        for name, value in whole_of(before, old, engine.shards, key):
            rows_now = engine.arrangement.copy_of_own_rows(unit, names.index(name), value, engine.optimizer_device)
            moments.setdefault(name, {})[key] = rows_now
        for name in names:  # frees the old rows before the next kind of state is gathered
            engine.shards.map_states(name, lambda which, value, key=key: value if which != key else torch.empty(0))  # type: ignore[misc]
    values = dict(zip(names, whole(before, old, old.masters), strict=True))
    old.masters = []
    for slot in unit.spec.slots:
        frozen = slot.parameter.detach()
        if slot.name in values:
            value = values[slot.name]
        else:
            value = frozen.full_tensor() if isinstance(frozen, DTensor) else frozen
        replaced = slot.parameter
        slot.fill(nn.Parameter(value, requires_grad=slot.trains))
        stand_in(replaced, slot)
    engine.settle(unit, own_rows(engine, unit) if engine.settings.has_own_masters(engine.levels) else None)
