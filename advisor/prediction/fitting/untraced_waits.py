"""Whether what ranks without a trace may have done is taken for what links do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.constants import (
    LEAST_MOVING_SHARE,
    UNLIKE_RATIO,
    UNTRACED_RATIO,
    UNTRACED_SHARE,
    WHOLE_MESSAGE_BYTES,
)
from paro_advise.advisor.ranks.links.link import LatencySource
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.collective import bus_factor
from paro_advise.core.model_state import MODEL_STATES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry
    from paro_advise.advisor.ranks.links.link import Link


def waits_for_untraced(analysis: Analysis) -> str:
    """Return that much of a step may be waiting for ranks without a trace, "" where it is not.

    Waiting for such a rank counts as transfer. It shows where some collectives of a group move their bytes several
    times as slowly as others of the group, or where few of one kind take far longer than most. Beyond what was told to
    be waiting for ranks that have traces.
    """
    run, step_us = analysis.run, analysis.breakdown_us.step_us
    if not _lacks_ranks(analysis):
        return ""
    moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATES]
    states = [state for name, state in analysis.states.items() if name in MODEL_STATES]
    known_us = _known_waits_us(analysis)
    slow_us, ratio = _slower_than_their_group(moved, analysis.links)
    transfers_us = sum(state.transfer_us or 0.0 for state in states)
    rare_us = transfers_us - sum(entry.count * (entry.p50_us or 0.0) for entry in moved)
    least_us = UNTRACED_SHARE * step_us
    told = f"ranks without a trace may be late: {len(run.ranks)} of {run.world_size} have one. Record more of them"
    if slow_us - known_us >= least_us:
        return (
            f"{time_text(slow_us)} of a step is in collectives that move up to {ratio:.0f} times as slowly as others "
            f"of their group, and {told}"
        )
    if rare_us >= least_us:
        return (
            f"{time_text(rare_us)} of a step is in collectives that take far longer than most of their kind, and {told}"
        )
    return ""


def may_wait_us(analysis: Analysis) -> tuple[float, float]:
    """Return how long transfers of a step may wait for untraced ranks (us), and how many times as long they take.

    Such waits show where collectives of one kind and group move their bytes at rates that differ by more than links do.
    What runs beside some of them on the same links does that as well: all of it may be waiting, or nothing.
    """
    if not _lacks_ranks(analysis):
        return 0.0, 1.0
    of_kind: dict[str, list[CollectiveEntry]] = {}
    for entry in analysis.collectives:
        if entry.state in MODEL_STATES:
            of_kind.setdefault(entry.op, []).append(entry)
    slower = [_slower_than_their_group(moved, analysis.links, UNLIKE_RATIO) for moved in of_kind.values()]
    found_us = sum(us for us, _ in slower) - _known_waits_us(analysis)
    if found_us < UNTRACED_SHARE * analysis.breakdown_us.step_us:
        return 0.0, 1.0
    return found_us, max(ratio for _, ratio in slower)


def _lacks_ranks(analysis: Analysis) -> bool:
    """Tell whether devices were timed, and some ranks have no trace."""
    run = analysis.run
    is_timed = analysis.breakdown_us.step_us > 0 and not run.collectives_use_cores
    return is_timed and bool(run.world_size) and len(run.ranks) < (run.world_size or 0)


def _known_waits_us(analysis: Analysis) -> float:
    """Return how long a step waits for ranks that have traces."""
    return sum(state.wait_us or 0.0 for name, state in analysis.states.items() if name in MODEL_STATES)


def _slower_than_their_group(
    moved: list[CollectiveEntry], links: Sequence[Link], least_ratio: float = UNTRACED_RATIO
) -> tuple[float, float]:
    """Return what those that are much slower take longer than at their group's best rate (us), and how many times.

    The latency that sizes have told counts for none of it.
    """
    latency_us = {
        (link.op, link.span, link.group_size): link.alpha_us or 0.0
        for link in links
        if link.latency_source == LatencySource.MEASURED
    }
    rates: dict[tuple[str, int], list[tuple[float, float, CollectiveEntry]]] = {}
    for entry in moved:
        if entry.bytes and entry.bytes >= WHOLE_MESSAGE_BYTES and entry.p50_us and entry.group_size:
            known_us = latency_us.get((entry.op, entry.span, entry.group_size), 0.0)
            moving_us = max(entry.p50_us - known_us, LEAST_MOVING_SHARE * entry.p50_us)
            rate = entry.bytes * bus_factor(entry.op, entry.group_size) / moving_us
            rates.setdefault((entry.span, entry.group_size), []).append((rate, moving_us, entry))
    total_us, most = 0.0, 1.0
    for found in rates.values():
        best = max(rate for rate, _, _ in found)
        slow = [(rate, us, entry) for rate, us, entry in found if rate > 0 and best >= least_ratio * rate]
        total_us += sum(entry.count * us * (1 - rate / best) for rate, us, entry in slow)
        most = max([most, *(best / rate for rate, _, _ in slow)])
    return total_us, most
