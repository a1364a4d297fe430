"""Cuts a step out of a rank's trace and marks what each collective is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from paro_advise.advisor.facts.frames import read_table
from paro_advise.advisor.facts.rank_facts import rank_facts
from paro_advise.advisor.slices.constants import EVENT_SEPARATOR_BYTES, MARKER_PID
from paro_advise.advisor.slices.trace_events import Slice, as_file, events_within, state_tracks, timed_in_step
from paro_advise.errors import InputError, UsageError
from paro_advise.trace_parsers.kineto.reader import read_kineto
from paro_advise.trace_parsers.read import looks_like_kineto, read_head

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.blocks import SourceRef


def cut_slice(ref: SourceRef, *, step: int | None, max_bytes: int, compress: bool) -> Slice:
    """Cut one step.

    Args:
        ref: a Kineto trace.
        step: index of the step, None for the slowest.
        max_bytes: bound of the uncompressed result.
        compress: write gzip.

    Raises:
        InputError: the file is not a Kineto trace.
        UsageError: there is no such step.
    """
    if not looks_like_kineto(read_head(ref)):
        raise InputError("slice takes a torch profiler trace", where=ref.label)
    facts = rank_facts(read_kineto(ref))
    if not facts.steps:
        raise InputError("the trace holds no step to cut", where=ref.label)
    index = step if step is not None else max(range(len(facts.steps)), key=lambda item: facts.steps[item].wall_us)
    if index >= len(facts.steps):
        raise UsageError(f"--step must be below {len(facts.steps)}, got {index}", where=ref.label)
    zero_us = facts.header.zero_us
    begin_us = zero_us + facts.steps[index].start_us
    table = timed_in_step(read_table(facts.collectives_ipc), index)
    tracks = state_tracks(table, MARKER_PID, "paro-advise: model states", zero_us)
    texts: list[bytes] = [msgspec.json.encode(item) for item in tracks]
    size = sum(map(len, texts))
    left_out = 0
    for event, text in events_within(ref, (begin_us, begin_us + facts.steps[index].wall_us)):
        if size + len(text) > max_bytes and event.get("ph") != "M":
            left_out += 1
            continue
        texts.append(text)
        size += len(text) + EVENT_SEPARATOR_BYTES
    return Slice(
        data=as_file(texts, compress=compress),
        label=facts.steps[index].label,
        num_events=len(texts),
        num_left_out=left_out,
    )
