"""The critical path of a step across ranks: which rank's work and which transfers the step's length consists of.

The path is walked backwards from the rank that ends the step last. While a rank does not wait, its own work is on the
path. Where a collective is exposed on it, the part after the last rank's arrival is a transfer; before it the path goes
on along the rank that arrived last. What a rank overlaps with its own work is not on the path. Which kernel waits for
which collective traces do not say, so work is taken to wait for the exposed collective that ended before it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import PATH_EXPOSED_SHARE
from paro_advise.advisor.analysis.model import CriticalPath
from paro_advise.advisor.ranks.clocks.clock_alignment import unpaired_transfers

if TYPE_CHECKING:
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stop:
    """An exposed collective on one rank (us, on one clock).

    Attributes:
        exposed_from_us: where the rank began to do nothing else.
        last_rank, last_us: which rank arrived last, and when.
    """

    exposed_from_us: float
    finish_us: float
    state: str
    last_rank: int
    last_us: float


def critical_path(aligned: AlignedRun | None, run: Run) -> CriticalPath | None:
    """Return the path's parts, means over the steps that all ranks have; None without two ranks on one clock."""
    if aligned is None or len(run.timed) < 2 or _has_unpaired(aligned, run):
        return None
    windows = _windows(aligned, run)
    steps = [label for label, ranks in windows.items() if len(ranks) == len(run.timed)]
    stops = _stops(aligned)
    local: dict[int, float] = {}
    transfer: dict[str, float] = {}
    for label in steps:
        _walk(windows[label], stops.get(label, {}), local, transfer)
    if not any(label in stops for label in steps):
        return None
    return CriticalPath(
        work_us={str(rank): time / len(steps) for rank, time in sorted(local.items())},
        transfer_us={state: time / len(steps) for state, time in sorted(transfer.items())},
        num_steps=len(steps),
    )


def _has_unpaired(aligned: AlignedRun, run: Run) -> bool:
    """Tell whether the steps hold transfers whose other ends are not recorded: the path may run over any of them.

    Such as the all-reduces between nodes of which one alone is recorded.
    """
    import polars as pl

    sent = aligned.table.filter((unpaired_transfers() | pl.col("match").is_null()) & (pl.col("step") >= 0))
    exposed = float(sent["exposed_us"].sum() or 0.0)
    return exposed > PATH_EXPOSED_SHARE * sum(step.wall_us for step in run.steps)


def _windows(aligned: AlignedRun, run: Run) -> dict[str, dict[int, tuple[float, float]]]:
    """Return begin and end of each step on each rank, on the clock of the aligned table."""
    origin_ns = min(item.header.origin_ns for _, item in run.timed)
    out: dict[str, dict[int, tuple[float, float]]] = {}
    for rank, item in run.timed:
        origin_us = (item.header.origin_ns - origin_ns) / 1000.0
        for step in item.steps:
            begin = aligned.aligned_us(rank, step.start_us + origin_us)
            out.setdefault(step.label, {})[rank] = (begin, begin + step.wall_us)
    return out


def _stops(aligned: AlignedRun) -> dict[str, dict[int, list[_Stop]]]:
    """Return the exposed collectives of each step and rank, by their end."""
    import polars as pl

    last = pl.col("arrival_us").arg_max()
    rows = (
        aligned.table.filter(pl.col("match").is_not_null())
        .with_columns(
            pl.col("rank").get(last).over("match").alias("last_rank"),
            pl.col("arrival_us").max().over("match").alias("last_us"),
        )
        .filter(pl.col("exposed_us") > PATH_EXPOSED_SHARE * (pl.col("end_us") - pl.col("start_us")))
        .sort("finish_us")
    )
    out: dict[str, dict[int, list[_Stop]]] = {}
    columns = ("step_label", "rank", "finish_us", "exposed_us", "state", "last_rank", "last_us")
    for label, rank, finish, exposed, state, last_rank, last_us in rows.select(columns).iter_rows():
        out.setdefault(label, {}).setdefault(rank, []).append(
            _Stop(exposed_from_us=finish - exposed, finish_us=finish, state=state, last_rank=last_rank, last_us=last_us)
        )
    return out


def _walk(
    windows: dict[int, tuple[float, float]],
    stops: dict[int, list[_Stop]],
    local: dict[int, float],
    transfer: dict[str, float],
) -> None:
    """Add one step's path to the sums, from its last end back to the begin of the rank that it is then on."""
    rank = max(windows, key=lambda item: (windows[item][1], -item))
    now = windows[rank][1]
    ends = {item: [stop.finish_us for stop in found] for item, found in stops.items()}
    while True:
        begin = windows[rank][0]
        place = bisect_right(ends.get(rank, []), now) - 1
        if place < 0 or stops[rank][place].finish_us <= begin:
            local[rank] = local.get(rank, 0.0) + max(0.0, now - begin)
            return
        stop = stops[rank][place]
        local[rank] = local.get(rank, 0.0) + now - stop.finish_us
        waits = stop.last_rank != rank and stop.last_us > stop.exposed_from_us
        from_us = max(begin, min(stop.finish_us, stop.last_us if waits else stop.exposed_from_us))
        transfer[stop.state] = transfer.get(stop.state, 0.0) + stop.finish_us - from_us
        if waits:
            rank = stop.last_rank
        # Times only fall: a stop that takes no time is passed by all the same.
        now = min(from_us, stop.finish_us - 1e-6)
