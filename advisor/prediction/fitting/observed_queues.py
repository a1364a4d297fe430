"""How a run's collectives queue: what ran beside compute, what behind what, and how many gradients go at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.constants import BEHIND_SHARE, BLOCKING_SHARE, DEEPSPEED_BUCKET_ELEMENTS
from paro_advise.advisor.prediction.fitting.model_units import kinds_of, passes_of
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry
    from paro_advise.advisor.prediction.fitting.model_units import Pieces


def overlaps(analysis: Analysis, state: State) -> bool:
    """Tell whether any of a state's communication ran beside compute."""
    entry = analysis.states.get(state.value)
    if entry is None or not entry.total_us or entry.exposed_us is None:
        return True
    return entry.exposed_us < BLOCKING_SHARE * entry.total_us


def prefetches_of(analysis: Analysis, reduced: Sequence[CollectiveEntry], micro: int) -> bool:
    """Tell whether gathers in backward are issued before reductions that end in compute's way, True without any.

    Behind a reduction on one communicator a gather is exposed, and so is the reduction, for compute waits for the
    gather. But the first gather of a backward pass has nothing before it.
    """
    again = kinds_of(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("backward"))
    passes = micro * len({entry.bytes for entry in again})
    first_us = max((entry.p50_us or 0.0 for entry in again), default=0.0) * micro
    if sum(entry.count for entry in again) <= passes:
        return True
    return _exposed_share(again, first_us) < BEHIND_SHARE or _exposed_share(reduced, 0.0) < BLOCKING_SHARE


def _exposed_share(entries: Sequence[CollectiveEntry], without_us: float) -> float:
    """Return the exposed share of collectives beside some of their time, 0 where it is not known."""
    taken_us = sum(entry.count * (entry.p50_us or 0.0) for entry in entries) - without_us
    if taken_us <= 0 or any(entry.exposed_us is None for entry in entries):
        return 0.0
    return sum(entry.exposed_us or 0.0 for entry in entries) / taken_us


def is_hidden_state(analysis: Analysis, state: State) -> bool:
    """Tell whether a state has communication, most of which ran beside compute."""
    entry = analysis.states.get(state.value)
    if entry is None or not entry.count or not entry.total_us or entry.exposed_us is None:
        return False
    return entry.exposed_us < entry.total_us / 2


def bucket_bytes_of(analysis: Analysis, model: Pieces, reduced: Sequence[CollectiveEntry], micro: int) -> float | None:
    """Return how many bytes of units DeepSpeed reduces at once, under any of its stages; None for other frameworks.

    Its stages share ``reduce_bucket_size``, which shows where a pass fills more than one bucket.
    """
    if analysis.run.framework != Framework.DEEPSPEED:
        return None
    passes = passes_of(analysis, reduced, micro)
    sizes = [float(entry.bytes or 0) / dtype_bytes(entry.dtype) for entry in reduced if dtype_bytes(entry.dtype)]
    is_cut = sum(entry.count for entry in reduced) > passes and (analysis.run.strategy.triple or "N")[2] != "N"
    return model.element_bytes * (max(sizes) if is_cut and sizes else float(DEEPSPEED_BUCKET_ELEMENTS))


def queue_notes(analysis: Analysis, bucket_bytes: float | None) -> list[str]:
    """Return what is assumed of how a run's collectives queue."""
    found = []
    has_gathers = any(kinds_of(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("backward")))
    if analysis.run.framework == Framework.FSDP1 and not has_gathers:
        found.append(
            "where parameters are gathered again for backward, FSDP1 is taken to do so ahead (backward_prefetch=BACKWARD_PRE, "
            "its default; accelerate's is none): without that such ways take longer"
        )
    if bucket_bytes is not None:
        found.append(
            "under other stages too, DeepSpeed reduces gradients in buckets as large as the run's, or of 5e8 elements"
        )
    return found
