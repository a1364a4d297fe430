"""Counts what one rank of a sharded model holds and sends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.policies.memory import StateBytes
from paro_advise.policies.strategy import Level
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.states.states import local

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from paro_advise.runtime.sharding.engine import Engine


def held_bytes(engine: Engine) -> StateBytes:
    """Return the bytes of each model state that this rank holds now, counted from storages.

    Gradients are there from the first backward pass to ``zero_grad``, optimizer states from the
    first step. Scalars such as the optimizer's step counters do not count.
    """
    whole = engine.levels.parameter == Level.N
    slots = [slot for unit in engine.units for slot in unit.spec.slots]
    parameters = _storage_bytes(slot.parameter for slot in slots) if whole else fsdp2.parameter_bytes(engine.model)
    gradients = [tensor for unit in engine.units for tensor in (unit.accumulated, unit.reduced) if tensor is not None]
    shown = {id(unit.reduced) for unit in engine.units if unit.reduced is not None}
    total = _storage_bytes(gradients)
    if whole and not shown:
        total += _storage_bytes(slot.parameter.grad for slot in slots if slot.parameter.grad is not None)
    if not whole:
        total += fsdp2.accumulated_bytes(engine.model)
    optimizer = [local(tensor) for name in engine.shards.shards for _, tensor in engine.shards.tensors(name)]
    if engine.settings.has_own_masters(engine.levels):
        optimizer += [master for unit in engine.units for master in unit.masters]
    return StateBytes(parameter=parameters, gradient=total, optimizer=_storage_bytes(optimizer))


def sent_bytes(engine: Engine) -> dict[str, tuple[int, int]]:
    """Return the (messages, bytes) this rank has sent ``inside`` and ``across`` groups so far."""
    first, second = engine.reducing.sent(), engine.gathering.sent()
    return {name: (first[name][0] + second[name][0], first[name][1] + second[name][1]) for name in first}


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind tensors."""
    storages = {}
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
