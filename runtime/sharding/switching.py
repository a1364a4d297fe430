"""Changes the strategy of a model while it trains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paro_advise.errors import ParoAdviseError, SwitchError, UsageError
from paro_advise.policies.strategy import Level
from paro_advise.policies.strategy_name import grouped_triple
from paro_advise.runtime.measure.process_memory import forget_peak, peak_bytes
from paro_advise.runtime.sharding.agreement import agree
from paro_advise.runtime.sharding.module import engine_of, mark, unmark
from paro_advise.runtime.sharding.parameters.owned import attributes_of, carry_attributes
from paro_advise.runtime.sharding.phases.lost_gradients import refuse_late
from paro_advise.runtime.sharding.shard import checked_strategy, grid_of
from paro_advise.runtime.sharding.states import states

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from paro_advise.policies.strategy import Strategy
    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.channels import GroupGrid


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """What a switch cost on this rank.

    Attributes:
        before, after: strategies and group sizes, such as "IIG in groups of 8".
        seconds: wall time.
        peak_bytes: the most memory in use during the switch: of the process on CPU (None where the
            system does not tell), allocated by PyTorch on a GPU.
    """

    before: str
    after: str
    seconds: float
    peak_bytes: int | None


def switch(
    model: nn.Module,
    strategy: str | Strategy,
    *,
    group_size: int | None = None,
    device_mesh: DeviceMesh | None = None,
) -> SwitchReport:
    """Let a sharded model go on under another strategy, exactly where it is.

    Every rank calls it at the same point, between ``optimizer.zero_grad()`` and the next forward.
    The unit that is moved takes its whole size in memory once more, for one kind of state at a time.
    The model's parameters are new objects afterwards; the optimizer and schedulers stay.

    Args:
        model: sharded.
        strategy: one of the 14 kept triples.
        group_size, device_mesh: see shard; None for the groups as they are.

    Raises:
        UsageError: it cannot be, or there are gradients; the model is as it was.
        DivergedError: the ranks want different things; the model is as it was.
        SwitchError: it broke off half way; the model cannot be used any more.
    """
    engine = engine_of(model)
    wanted = checked_strategy(strategy)
    if group_size is None and device_mesh is None:
        group_size = engine.grid.group_size
    grid = grid_of(group_size, device_mesh, engine.grid.ranks_per_node)
    engine.gradients.hide()
    if engine.gradients.are_waiting or any(unit.left for unit in engine.units):
        raise UsageError(
            "a switch must come between two steps, got gradients that wait for optimizer.step()",
            hint="call optimizer.step() and optimizer.zero_grad() first",
        )
    agree({"strategy to switch to": [str(wanted), grid.group_size]})
    before = _describe(engine)
    started = time.perf_counter()
    _reset_peak(engine.device)
    try:
        _move(engine, wanted, grid)
    except (ParoAdviseError, RuntimeError, OSError, AssertionError) as error:
        raise SwitchError(
            f"all units must reach the new strategy, broke off with: {error}",
            hint="restart the job from its last checkpoint",
        ) from error
    return SwitchReport(
        before=before,
        after=_describe(engine),
        seconds=time.perf_counter() - started,
        peak_bytes=_peak(engine.device),
    )


def _move(engine: Engine, strategy: Strategy, grid: GroupGrid) -> None:
    synchronizes = engine.synchronizes
    engine.homes.rest(engine.arrangement)
    engine.edits.before_step()
    frozen = [slot for unit in engine.units for slot in unit.spec.training if not slot.parameter.requires_grad]
    if engine.levels.parameter == Level.N:
        for unit in engine.units:
            for slot in unit.spec.training:
                slot.parameter.requires_grad_().register_hook(refuse_late)  # type: ignore[no-untyped-call]  # as torch declares it
    slots = [slot for unit in engine.units for slot in unit.spec.slots]
    attributes = [attributes_of(slot.parameter) for slot in slots]
    unmark(engine.model)
    engine.stop()
    before = engine.arrangement
    engine.set_strategy(strategy, grid)
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for old, unit in zip(before.units, engine.units, strict=True):
        unit.divide_factor = old.divide_factor
        states.move_unit(engine, old, unit, before, moments)
    engine.place_shards()
    for unit in engine.units:
        for place, slot in enumerate(unit.spec.training):
            if slot.name in moments:
                new = {
                    key: engine.arrangement.as_sharded(unit, place, rows) for key, rows in moments[slot.name].items()
                }
                engine.shards.optimizer.state[engine.shards.shards[slot.name]].update(new)
    engine.start()
    for slot in frozen:
        slot.parameter.requires_grad = False
    for slot, known in zip(slots, attributes, strict=True):
        carry_attributes(known, slot.parameter)
    mark(engine.model)
    engine.gradients.set_synchronizes(enabled=synchronizes)


def _describe(engine: Engine) -> str:
    return grouped_triple(str(engine.strategy), engine.grid.group_size if engine.strategy.uses_groups else None)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        forget_peak()


def _peak(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else peak_bytes()
