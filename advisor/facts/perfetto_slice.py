"""Cuts a window out of a Kineto trace and marks what each collective is for."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from paro_advise.advisor.facts.constants import MARKER_PID
from paro_advise.advisor.facts.frames import read_table
from paro_advise.advisor.facts.rank_facts import rank_facts
from paro_advise.errors import InputError, UsageError
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.bytes.chunks import EventChunks
from paro_advise.trace_parsers.kineto.events import as_float, salvage_one
from paro_advise.trace_parsers.kineto.reader import read_kineto
from paro_advise.trace_parsers.kineto.rows import split_events
from paro_advise.trace_parsers.read import looks_like_kineto, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.advisor.facts.model import RankFacts

# Flows and counters say nothing about a span of time on their own.
_KEPT_PHASES = ("X", "M", "i", "s", "f")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A cut trace as a file's content."""

    data: bytes
    label: str
    num_events: int
    num_left_out: int


def cut_slice(path: str, *, step: int | None, max_bytes: int, compress: bool) -> Slice:
    """Cut one step.

    Args:
        path: a Kineto trace.
        step: index of the step, None for the slowest.
        max_bytes: bound of the uncompressed result.
        compress: write gzip.

    Raises:
        InputError: the file is not a Kineto trace.
        UsageError: there is no such step.
    """
    ref = SourceRef(path=Path(path))
    if not looks_like_kineto(read_head(ref)):
        raise InputError("slice takes a torch profiler trace", where=path)
    facts = rank_facts(read_kineto(ref))
    if not facts.steps:
        raise InputError("the trace holds no step to cut", where=path)
    index = step if step is not None else max(range(len(facts.steps)), key=lambda item: facts.steps[item].wall_us)
    if index >= len(facts.steps):
        raise UsageError(f"--step must be below {len(facts.steps)}, got {index}", where=path)
    begin_us, zero_us = _window_start(ref, facts, index)
    window = (begin_us, begin_us + facts.steps[index].wall_us)
    events: list[bytes] = [msgspec.json.encode(item) for item in _markers(facts, index, zero_us)]
    size = sum(map(len, events))
    left_out = 0
    for event, text in _events_within(ref, window):
        if size + len(text) > max_bytes and event.get("ph") != "M":
            left_out += 1
            continue
        events.append(text)
        size += len(text) + 2
    data = b'{"displayTimeUnit":"ms","traceEvents":[\n' + b",\n".join(events) + b"\n]}\n"
    if compress:
        data = gzip.compress(data, 6, mtime=0)
    return Slice(data=data, label=facts.steps[index].label, num_events=len(events), num_left_out=left_out)


def _window_start(ref: SourceRef, facts: RankFacts, index: int) -> tuple[float, float]:
    """Return the step's start and the facts' zero, both on the trace's own time axis (us)."""
    step = facts.steps[index]
    lowest = None
    for event, _ in _all_events(ref):
        start = as_float(event.get("ts"))
        if event.get("name") == step.label and event.get("ph") == "X" and start is not None:
            if event.get("cat") == "user_annotation":
                return start, start - step.start_us
        elif event.get("ph") == "X" and start is not None:
            lowest = start if lowest is None else min(lowest, start)
    zero = float(int(lowest or 0.0))
    return zero + step.start_us, zero


def _all_events(ref: SourceRef) -> Iterator[tuple[dict[str, Any], bytes]]:
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


def _events_within(ref: SourceRef, window: tuple[float, float]) -> Iterator[tuple[dict[str, Any], bytes]]:
    low, high = window
    for event, text in _all_events(ref):
        phase = event.get("ph")
        if phase not in _KEPT_PHASES:
            continue
        start = as_float(event.get("ts"))
        if phase == "M" or (start is not None and start < high and start + (as_float(event.get("dur")) or 0.0) > low):
            yield event, text


def _markers(facts: RankFacts, index: int, zero_us: float) -> list[dict[str, Any]]:
    """Return tracks of our own: one per model state."""
    import polars as pl

    table = read_table(facts.collectives_ipc).filter(
        (pl.col("step") == index) & pl.col("start_us").is_not_null() & pl.col("end_us").is_not_null()
    )
    states = sorted(set(table["state"].to_list()))
    out: list[dict[str, Any]] = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": MARKER_PID,
            "tid": 0,
            "args": {"name": "paro-advise: model states"},
        }
    ]
    for number, state in enumerate(states):
        out.append({"ph": "M", "name": "thread_name", "pid": MARKER_PID, "tid": number, "args": {"name": state}})
    out += [
        {
            "ph": "X",
            "cat": "paro_advise",
            "name": f"{row['state']} {row['detail']}".strip(),
            "pid": MARKER_PID,
            "tid": states.index(row["state"]),
            "ts": zero_us + row["start_us"],
            "dur": row["end_us"] - row["start_us"],
            "args": {key: row[key] for key in ("op", "bytes", "group_size", "exposed_us", "evidence")},
        }
        for row in table.iter_rows(named=True)
    ]
    return out
