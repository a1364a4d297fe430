"""How a run's collectives queue: what ran beside compute, what behind what, and how many gradients go at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paro_advise.advisor.prediction.constants import (
    BEHIND_SHARE,
    BESIDE_UPDATES_SHARE,
    BLOCKING_SHARE,
    DEEPSPEED_BUCKET_ELEMENTS,
)
from paro_advise.advisor.prediction.fitting.model_units import kinds_of, reductions_per_step
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry
    from paro_advise.advisor.prediction.fitting.model_units import Pieces


class ObservedQueues(NamedTuple):
    """What the replay knows of a run's queues: see the attributes of Calibration of these names."""

    overlaps_gathers: bool
    overlaps_reductions: bool
    prefetches: bool
    reduce_bucket_bytes: float | None
    publishes_ahead: bool


def observed_queues(
    analysis: Analysis, model: Pieces, reduced: Sequence[CollectiveEntry], micro: int, *, own_way: bool
) -> ObservedQueues:
    """Return how a run's collectives queue.

    Args:
        analysis: the run.
        model: its units.
        reduced: its reductions of gradients.
        micro: micro-batches of a step.
        own_way: updated parameters come back in the framework's own way.
    """
    is_gpu = not analysis.run.collectives_use_cores
    prefetches = not is_gpu or _prefetches(analysis, reduced, micro)
    return ObservedQueues(
        overlaps_gathers=_overlaps(analysis, State.PARAMETER),
        # Behind gathers that wait for them they are exposed, whether compute waits for them or not.
        overlaps_reductions=not prefetches or _overlaps(analysis, State.GRADIENT),
        prefetches=prefetches,
        reduce_bucket_bytes=_bucket_bytes(analysis, model, reduced, micro) if is_gpu else None,
        publishes_ahead=is_gpu and not own_way and _runs_beside_forward(analysis),
    )


def _overlaps(analysis: Analysis, state: State) -> bool:
    """Tell whether any of a state's communication ran beside compute."""
    entry = analysis.states.get(state.value)
    if entry is None or not entry.total_us or entry.exposed_us is None:
        return True
    return entry.exposed_us < BLOCKING_SHARE * entry.total_us


def _prefetches(analysis: Analysis, reduced: Sequence[CollectiveEntry], micro: int) -> bool:
    """Tell whether gathers in backward are issued before reductions that end in compute's way, True without any.

    Behind a reduction on one communicator a gather is exposed, and so is the reduction, for compute waits for the
    gather. But the first gather of a backward pass has nothing before it. FSDP2 gathers ahead by itself.
    """
    if analysis.run.framework == Framework.FSDP2:
        return True
    again = kinds_of(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("backward"))
    first_us = max((entry.p50_us or 0.0 for entry in again), default=0.0) * micro
    if sum(entry.count for entry in again) <= micro:
        return True
    return _exposed_share(again, first_us) < BEHIND_SHARE or _exposed_share(reduced, 0.0) < BLOCKING_SHARE


def _exposed_share(entries: Sequence[CollectiveEntry], without_us: float) -> float:
    """Return the exposed share of collectives beside some of their time, 0 where it is not known."""
    taken_us = sum(entry.count * (entry.p50_us or 0.0) for entry in entries) - without_us
    if taken_us <= 0 or any(entry.exposed_us is None for entry in entries):
        return 0.0
    return sum(entry.exposed_us or 0.0 for entry in entries) / taken_us


def _runs_beside_forward(analysis: Analysis) -> bool:
    """Tell whether updated parameters came back beside the next forward pass, which may be shorter than that takes.

    Some of it may run beside the update of others in any case.
    """
    entry = analysis.states.get(State.OPTIMIZER.value)
    if entry is None or not entry.count or not entry.total_us or entry.exposed_us is None:
        return False
    return entry.exposed_us < BESIDE_UPDATES_SHARE * entry.total_us


def _bucket_bytes(analysis: Analysis, model: Pieces, reduced: Sequence[CollectiveEntry], micro: int) -> float | None:
    """Return how many bytes of units DeepSpeed reduces at once, under any of its stages; None for other frameworks.

    Its stages share ``reduce_bucket_size``, which shows where a pass fills more than one bucket.
    """
    if analysis.run.framework != Framework.DEEPSPEED:
        return None
    passes = reductions_per_step(analysis, reduced, micro)
    sizes = [float(entry.bytes or 0) / width for entry in reduced if (width := dtype_bytes(entry.dtype))]
    computing = analysis.run.strategy.computing
    shards_optimizer = computing is not None and computing.optimizer != Level.N
    is_cut = sum(entry.count for entry in reduced) > passes and shards_optimizer
    least = 0.0 if is_cut and sizes else float(DEEPSPEED_BUCKET_ELEMENTS)
    return model.element_bytes * max([least, *sizes])


def queue_notes(analysis: Analysis, queues: ObservedQueues) -> list[str]:
    """Return what is assumed of how a run's collectives queue."""
    found = []
    has_gathers = any(kinds_of(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("backward")))
    if analysis.run.framework == Framework.FSDP1 and not has_gathers and not analysis.run.collectives_use_cores:
        found.append(
            "where parameters are gathered again for backward, FSDP1 is taken to do so ahead, as by its default "
            "(backward_prefetch=BACKWARD_PRE; accelerate's default is none): without that such ways take longer"
        )
    if queues.reduce_bucket_bytes is not None:
        found.append(
            "under other stages too, DeepSpeed reduces gradients in buckets as large as the run's, or of 5e8 elements"
        )
    return found
