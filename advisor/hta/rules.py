"""A trace's time split by the rules of HolisticTraceAnalysis 0.5.0, to compare with its users' numbers.

These are not our own figures: they round times to whole microseconds (which loses much of short
kernels), count synchronisation as busy, know only kernels named ``nccl...Kernel...`` as
communication, and leave out what the last profiler step launched (whose start they take from a
device annotation when there is one, later than the host's). Ties and types follow pandas,
because negative durations that the rounding makes count differently in another order.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from paro_advise.trace_parsers.bytes.blocks import BlockReader
from paro_advise.trace_parsers.bytes.chunks import EventChunks
from paro_advise.trace_parsers.kineto.events import as_int, parse_head
from paro_advise.trace_parsers.kineto.header import rank_in_trace_name
from paro_advise.trace_parsers.kineto.rows import TimedRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.kineto.columns import TimedColumns

    Numbers: TypeAlias = NDArray[Any]  # whichever type the column has, as in pandas

# `match` looks at the start of a name only, and `.` stops at a line break: both are HTA's.
_COMMUNICATION = re.compile(r"nccl.*Kernel")
_NOT_COMPUTE = re.compile(r"nccl.*Kernel|Memset|dma|.*Memcpy|.*Sync")
_STEP = "ProfilerStep"
_DEVICE_WIDE_SYNCS = ("Event Sync", "Context Sync")
_MAX_ROWS = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaNumbers:
    """HTA's temporal breakdown and overlap; None where there is nothing to divide or to measure.

    Attributes:
        kernel_time_us: from the first kept device row to the end of the last.
        idle_time_us: the part of it in which no device row runs.
        compute_time_us: union of compute kernels.
        non_compute_time_us: the rest.
        idle_time_pctg, compute_time_pctg, non_compute_time_pctg: of kernel_time_us, two digits.
        comp_comm_overlap_pctg: share of communication behind compute, two digits (HTA: nan, inf for None).
    """

    idle_time_us: float | None
    compute_time_us: float | None
    non_compute_time_us: float | None
    kernel_time_us: float | None
    idle_time_pctg: float | None
    compute_time_pctg: float | None
    non_compute_time_pctg: float | None
    comp_comm_overlap_pctg: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaOwn(HtaNumbers):
    """What HTA itself said of a trace.

    Attributes:
        idle_us: idle time of all streams by cause (host_wait, kernel_wait, other), {} when unknown.
        critical_path_pctg: share of one step's critical path by what bounds it, {} when unknown.
    """

    idle_us: dict[str, float]
    critical_path_pctg: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HtaRow(HtaNumbers):
    """One trace by HTA's rules as we compute them.

    Attributes:
        label: the input as given.
        rank: None when neither content nor name tell.
        num_steps: distinct profiler steps; from two on the last is left out.
        own: HTA's own figures, None when it was not asked or could not read the trace.
    """

    label: str
    rank: int | None
    num_steps: int
    own: HtaOwn | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows in HTA's order and types; ``start`` counts from the first row of the trace."""

    start: Numbers
    duration: Numbers
    is_compute: NDArray[np.bool_]
    is_communication: NDArray[np.bool_]

    def take(self, index: Numbers) -> _Rows:
        return _Rows(self.start[index], self.duration[index], self.is_compute[index], self.is_communication[index])


def hta_rules(ref: SourceRef, include_last_step: bool = False) -> HtaRow:  # noqa: FBT001, FBT002 - HTA's option
    """Read a trace and split its time by HTA's rules.

    Args:
        ref: where it lies.
        include_last_step: HTA's ``include_last_profiler_step``.

    Raises:
        InputError: it cannot be opened, or expands without bound.
    """
    chunks = EventChunks(BlockReader(ref))
    rows = TimedRows()
    for chunk in chunks:
        rows.add(chunk, chunks.boundary)
    columns = rows.columns
    names = columns.names.values_in_order()
    steps = {code for code, name in enumerate(names) if _STEP in name}
    kept = _kept_rows(columns, names, steps, include_last_step=include_last_step)
    numbers = _numbers(kept)
    return HtaRow(label=ref.label, rank=_rank(chunks.head, ref), num_steps=len(steps), own=None, **numbers)


def _rank(head: bytes, ref: SourceRef) -> int | None:
    metadata = parse_head(head) if head.strip(b" \r\n\t{,") else None
    info = (metadata or {}).get("distributedInfo")
    rank = as_int(info.get("rank")) if isinstance(info, dict) else None
    return rank_in_trace_name(ref.label) if rank is None else rank


def _kept_rows(columns: TimedColumns, names: list[str], steps: set[int], *, include_last_step: bool) -> _Rows:
    """Return the device rows that HTA looks at."""
    start, duration = _round_times(columns)
    if not len(start):
        return _Rows(start, duration, np.empty(0, dtype=bool), np.empty(0, dtype=bool))
    code = np.frombuffer(columns.name, dtype=np.uint32)
    stream = np.frombuffer(columns.stream, dtype=np.int64)
    aligned = start - start.min()
    everything = _Rows(
        aligned,
        duration,
        _mask(code, (not _NOT_COMPUTE.match(name) for name in names)),
        _mask(code, (bool(_COMMUNICATION.match(name)) for name in names)),
    )
    if len(steps) < 2:
        return everything.take(np.flatnonzero(stream != -1))
    correlation = np.frombuffer(columns.correlation, dtype=np.int64)
    is_gpu = ((stream >= 0) & (correlation >= 0)) | _mask(code, (name in _DEVICE_WIDE_SYNCS for name in names))
    is_step = ~is_gpu & _mask(code, (index in steps for index in range(len(names))))
    if not is_step.any():
        return everything.take(np.empty(0, dtype=np.int64))
    # HTA compares with the end before it shifts times to 0, so this option keeps nearly all.
    in_time = aligned <= (start + duration)[is_step].max() if include_last_step else aligned < aligned[is_step].max()
    host = np.flatnonzero(~is_gpu & in_time)
    device = _find_launched(np.flatnonzero(is_gpu & (stream != -1)), host, correlation)
    return everything.take(np.concatenate((device, host[stream[host] != -1])))


def _mask(code: NDArray[np.uint32], wanted: Iterable[bool]) -> NDArray[np.bool_]:
    """Return a mask over rows from one truth value per distinct name."""
    mask: NDArray[np.bool_] = np.fromiter(wanted, dtype=bool)[code]
    return mask


def _round_times(columns: TimedColumns) -> tuple[Numbers, Numbers]:
    """Return starts and durations after HTA's rounding: up to whole starts, down to whole ends."""
    start = np.frombuffer(columns.start, dtype=np.float64)
    duration = np.frombuffer(columns.duration, dtype=np.float64)
    # A column that lacks a value holds floats in pandas, whatever is written in the file.
    has_gaps = columns.num_untimed > 0
    if columns.num_fractional or has_gaps:
        end = np.floor(start + duration)
        start = np.ceil(start)
        duration = end - start
    return (start if has_gaps else _narrowest(start)), duration


def _narrowest(whole: NDArray[np.float64]) -> Numbers:
    """Return whole numbers in the smallest integer type that holds them, as HTA stores them."""
    if not len(whole):
        return whole
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        limits = np.iinfo(dtype)
        if limits.min <= whole.min() and whole.max() <= limits.max:
            return whole.astype(dtype)
    return whole


def _find_launched(
    device: NDArray[np.int64], host: NDArray[np.int64], correlation: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the device rows that share a correlation with a host row, once per such host row."""
    ids = np.sort(correlation[host])
    wanted = correlation[device]
    counts = np.searchsorted(ids, wanted, side="right") - np.searchsorted(ids, wanted, side="left")
    # Repeats change little (the order of ties); a trace full of equal ids must not exhaust memory.
    if counts.sum() > _MAX_ROWS:
        counts = np.minimum(counts, 1)
    return np.repeat(device, counts)


def _numbers(rows: _Rows) -> dict[str, float | None]:
    """Return the fields of HtaNumbers."""
    if not len(rows.start):
        return dict.fromkeys(HtaNumbers.__dataclass_fields__)
    # HTA sorts all rows before it picks the compute kernels for the breakdown, not for the overlap.
    ordered = rows.take(np.argsort(rows.start, kind="quicksort"))
    start, end = _merge(rows.start, rows.duration)
    kernel = float(end[-1] - start[0])
    idle = kernel - float(end.sum() - start.sum())
    start, end = _merge(ordered.start[ordered.is_compute], ordered.duration[ordered.is_compute])
    compute = float(end.sum() - start.sum())
    rest = kernel - compute - idle
    return {
        "idle_time_us": idle,
        "compute_time_us": compute,
        "non_compute_time_us": rest,
        "kernel_time_us": kernel,
        "idle_time_pctg": _percentage(idle, kernel),
        "compute_time_pctg": _percentage(compute, kernel),
        "non_compute_time_pctg": _percentage(rest, kernel),
        "comp_comm_overlap_pctg": _overlap(rows),
    }


def _percentage(part: float, whole: float) -> float | None:
    return float(np.round(100 * (part / whole), 2)) if whole else None


def _merge(start: Numbers, duration: Numbers) -> tuple[Numbers, Numbers]:
    """Return the starts and ends of HTA's groups: a row opens one when it starts after all ends so far.

    Unlike Intervals.union_of this keeps rows that end before they start, with their negative length.
    """
    if not len(start):
        return start, duration
    order = np.argsort(start, kind="quicksort")
    end = (start + duration)[order]
    start = start[order]
    opens = np.append(True, start[1:] > np.maximum.accumulate(end[:-1]))
    first = np.flatnonzero(opens)
    start, end = start[first], np.maximum.reduceat(end, first)
    order = np.argsort(start, kind="quicksort")
    return start[order], end[order]


def _overlap(rows: _Rows) -> float | None:
    """Return the share (%) of the communication groups that runs beside compute groups."""
    talk_start, talk_end = _merge(rows.start[rows.is_communication], rows.duration[rows.is_communication])
    busy_start, busy_end = _merge(rows.start[rows.is_compute], rows.duration[rows.is_compute])
    total = float((talk_end - talk_start).sum())
    if not total:
        return None
    edges = np.concatenate((talk_start, talk_end, busy_start, busy_end))
    changes = np.repeat((1, -1, 2, -2), (len(talk_start), len(talk_end), len(busy_start), len(busy_end)))
    order = np.argsort(edges, kind="quicksort")
    edges = edges[order]
    both = np.cumsum(changes[order])[:-1] == 3
    return _percentage(float(np.diff(edges)[both].sum()), total)
