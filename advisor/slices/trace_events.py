"""A trace's events as a viewer takes them, and the tracks that we add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from paro_advise.trace_parsers.bytes.blocks import BlockReader
from paro_advise.trace_parsers.bytes.chunks import EventChunks
from paro_advise.trace_parsers.constants import OWN_TRACE
from paro_advise.trace_parsers.kineto.events import as_float, salvage_one
from paro_advise.trace_parsers.kineto.rows import split_events

if TYPE_CHECKING:
    from collections.abc import Iterator

    import polars as pl

    from paro_advise.trace_parsers.bytes.blocks import SourceRef

TraceEvent: TypeAlias = dict[str, Any]  # Any: what JSON decodes to

# Counters say nothing about a span of time on their own.
_KEPT_PHASES = ("X", "M", "i", "s", "f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A cut trace as a file's content.

    Attributes:
        label: of the step.
        num_events: in it.
        num_left_out: beyond the size asked for.
        notes: what else people should know of it.
    """

    data: bytes
    label: str
    num_events: int
    num_left_out: int
    notes: tuple[str, ...] = ()


def events_within(ref: SourceRef, window: tuple[float, float]) -> Iterator[tuple[TraceEvent, bytes]]:
    """Yield each event of a window (us, on the trace's own axis), and all metadata, with its text.

    Of the window is what lies in it for the most part, or fills most of it: neighbouring steps touch it by some us.
    """
    low, high = window
    for event, text in _all_events(ref):
        phase = event.get("ph")
        if phase not in _KEPT_PHASES:
            continue
        start = as_float(event.get("ts"))
        if phase == "M":
            yield event, text
        elif start is not None:
            duration = max(0.0, as_float(event.get("dur")) or 0.0)
            inside = min(high, start + duration) - max(low, start)
            if inside >= 0 and 2 * inside >= min(duration, high - low):
                yield event, text


def _all_events(ref: SourceRef) -> Iterator[tuple[TraceEvent, bytes]]:
    chunks = EventChunks(BlockReader(ref))
    for chunk in chunks:
        for part in split_events(chunk, chunks.boundary):
            text = b"{" + part + b"}"
            try:
                event = msgspec.json.decode(text)
            except (msgspec.DecodeError, RecursionError):
                mended, _ = salvage_one(part)
                if mended is None:
                    continue
                event = {name: getattr(mended, name) for name in mended.__struct_fields__}
                text = msgspec.json.encode(event)
            if isinstance(event, dict):
                yield event, text


def metadata_event(what: str, pid: int, tid: int, **arguments: object) -> TraceEvent:
    """Return an event that names or orders a process or thread."""
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": arguments}


def state_tracks(table: pl.DataFrame, pid: int, title: str, shift_us: float) -> list[TraceEvent]:
    """Return one track for each model state, with its collectives.

    Args:
        table: of collectives, each with its times; the columns of RankFacts' table.
        pid: of the process that they are shown under.
        title: of that process.
        shift_us: from the table's times to those of the slice.
    """
    states = tracked_states(table)
    out = [metadata_event("process_name", pid, 0, name=title)]
    out += [metadata_event("thread_name", pid, number, name=state) for number, state in enumerate(states)]
    out += [
        {
            "ph": "X",
            "cat": "paro_advise",
            "name": f"{row['state']} {row['detail']}".strip(),
            "pid": pid,
            "tid": states.index(row["state"]),
            "ts": shift_us + row["start_us"],
            "dur": row["end_us"] - row["start_us"],
            "args": {key: row[key] for key in ("op", "bytes", "group_size", "exposed_us", "evidence")},
        }
        for row in table.iter_rows(named=True)
    ]
    return out


def tracked_states(table: pl.DataFrame) -> list[str]:
    """Return the states of some collectives in the order of their tracks; the index is the thread id."""
    return sorted(set(table["state"].to_list()))


def timed_in_step(table: pl.DataFrame, index: int) -> pl.DataFrame:
    """Return the collectives of a step whose times are known."""
    import polars as pl

    return table.filter((pl.col("step") == index) & pl.col("start_us").is_not_null() & pl.col("end_us").is_not_null())


def as_file(texts: list[bytes], *, compress: bool) -> bytes:
    """Return events as the content of a trace file."""
    import gzip

    data = OWN_TRACE + b'"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(texts) + b"\n]}\n"
    return gzip.compress(data, 6, mtime=0) if compress else data
