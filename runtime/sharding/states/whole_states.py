"""States of a sharded model and its optimizer in the layout of plain PyTorch: whole tensors, or those of FSDP2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.states import states

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import StateDict


def whole_parameters(engine: Engine) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Gather the parameters, unit by unit, in the type the optimizer works in; frozen ones where they are sharded.

    All ranks iterate at once; those that want no values drop them. Where every rank holds all, each may iterate alone:
    what one has changed by itself is then in its values.
    """
    engine.show_parameters()
    engine.edits.before_step()
    if engine.holds_all:
        for unit in engine.units:
            yield from ((slot, slot.parameter.detach()) for slot in unit.spec.training)
        return
    for unit in engine.units:
        values = states.whole(engine.arrangement, unit, [states.local(master) for master in unit.masters])
        yield from zip(unit.spec.training, values, strict=True)
        for slot in unit.spec.slots:
            frozen = slot.parameter.detach()
            if not slot.trains and isinstance(frozen, DTensor):
                whole = frozen.full_tensor()
                # Behind rows that ranks do not divide lies padding: files would hold it, safetensors refuses it.
                yield slot, whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


def whole_moments(engine: Engine) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Gather the optimizer's states that are sharded like their parameters: name, key, value.

    All ranks iterate at once.
    """
    engine.updates.finish()
    for unit in engine.units:
        names = [slot.name for slot in unit.spec.training]
        for key in sorted({key for name in names for key, _ in engine.shards.tensors(name)}):
            for name, value in states.whole_of(engine.arrangement, unit, engine.shards, key):
                yield name, key, value


def plain_optimizer_state(engine: Engine) -> StateDict:
    """Return the optimizer's state in torch's own layout: whole tensors, by the parameters' places in the groups."""
    whole: dict[str, StateDict] = {}
    for name, key, value in whole_moments(engine):
        whole.setdefault(name, {})[key] = value
    # Gathered values stay as they are; numbers of steps would go on with the training beside them.
    for name, shard in engine.shards.held.items():
        known = whole.setdefault(name, {})
        for key, value in engine.shards.optimizer.state.get(shard, {}).items():
            if isinstance(value, torch.Tensor) and key not in known:
                known[key] = value.detach().clone()
    return _by_places(engine, whole)


def fsdp2_optimizer_state(engine: Engine) -> StateDict:
    """Return the optimizer's state as FSDP2 has it: DTensors, by the parameters' places in the groups."""
    shards = engine.shards
    replicated = {
        name: {key: engine.arrangement.replicated(value) for key, value in shards.tensors(name)}
        for name in shards.shards
    }
    return _by_places(engine, replicated)


def _by_places(engine: Engine, tensors: dict[str, StateDict]) -> StateDict:
    """Return the optimizer's state by places, some of its tensors in another form."""
    shards = engine.shards
    places = {name: place for place, name in enumerate(name for names in shards.all_names for name in names)}
    found = {
        places[name]: {**shards.optimizer.state[shard], **tensors.get(name, {})}
        for name, shard in shards.held.items()
        if shard in shards.optimizer.state
    }
    groups = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [places[name] for name in names]}
        for group, names in zip(shards.optimizer.param_groups, shards.all_names, strict=True)
    ]
    return {"state": dict(sorted(found.items())), "param_groups": groups}


def part_of(engine: Engine, state: StateDict, optimizer: torch.optim.Optimizer) -> StateDict:
    """Return one optimizer's part of the state of all, by its own places where it is by places."""
    groups = state["param_groups"][engine.shards.groups_of(optimizer)]
    keys = [key for group in groups for key in group["params"]]
    own = {key: place if isinstance(key, int) else key for place, key in enumerate(keys)}
    return {
        "state": {own[key]: state["state"][key] for key in keys if key in state["state"]},
        "param_groups": [{**group, "params": [own[key] for key in group["params"]]} for group in groups],
    }


def named(engine: Engine, state: StateDict, optimizer: torch.optim.Optimizer) -> StateDict:
    """Return an optimizer's state by our names, where it came by places or by the names in a model around ours.

    Raises:
        UsageError: it is of another model.
    """
    shards = engine.shards
    names = [name for group in shards.all_names[shards.groups_of(optimizer)] for name in group]
    order = [place for group in state["param_groups"] for place in group["params"]]
    # One without states has our names in its groups alone, of what trains.
    if any(name in names for name in state["state"]) or (order and set(order) <= set(names)):
        return state
    if len(order) != len(names):
        raise UsageError(f"an optimizer's state must be of its {len(names)} parameters, got one of {len(order)}")
    by_place = dict(zip(order, names, strict=True))
    return {**state, "state": {by_place[place]: values for place, values in state["state"].items()}}


def own_rows_of(engine: Engine, unit: UnitState, place: int, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, at the optimizer's level, of a whole or sharded tensor; a copy.

    All ranks call it at once where the tensor is sharded in another way.
    """
    value = value.detach()
    if isinstance(value, DTensor):
        target = engine.arrangement.as_sharded(unit, place, unit.masters[place])
        if isinstance(target, DTensor) and (value.device_mesh, value.placements) == (
            target.device_mesh,
            target.placements,
        ):
            return states.local(value).clone()
        value = value.full_tensor()
    return engine.arrangement.copy_of_own_rows(unit, place, value)
