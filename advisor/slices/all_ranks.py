"""Merges one step of all ranks on one clock, with arrows between the ranks of each collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from paro_advise.advisor.facts.capture_log import NO_LOGS, StepLogs
from paro_advise.advisor.ranks.clocks.clock_alignment import align_as_logged
from paro_advise.advisor.ranks.run import assemble_run
from paro_advise.advisor.ranks.source import decode
from paro_advise.advisor.slices.constants import EVENT_SEPARATOR_BYTES, MAX_MERGED_RANKS, PIDS_PER_RANK
from paro_advise.advisor.slices.trace_events import (
    Slice,
    as_file,
    events_within,
    metadata_event,
    state_tracks,
    timed_in_step,
    tracked_states,
)
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.core.plural import plural
from paro_advise.errors import InputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.facts.model import RankFacts, StepFacts
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.slices.trace_events import TraceEvent
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

# What a viewer needs first, by category; the rest follows as long as there is room.
_FIRST = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "gpu_user_annotation")
_LAST = ("python_function", "ac2g", "async_cpu_to_gpu", "fwdbwd")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankWindow:
    """A rank's part of the window.

    Attributes:
        index: of the step in the rank's own steps.
        shift_us: from the rank's times to those of the slice.
    """

    rank: int
    source: Source
    index: int
    shift_us: float

    @property
    def step(self) -> StepFacts:
        return self.source.steps[self.index]

    @property
    def marker_pid(self) -> int:
        """Return the process id of the rank's tracks of model states, its first."""
        return self.rank * PIDS_PER_RANK


def merge_ranks(
    facts: Sequence[RankFacts],
    refs: Mapping[str, SourceRef],
    *,
    step: int | None,
    max_bytes: int,
    compress: bool,
    step_logs: StepLogs = NO_LOGS,
) -> Slice:
    """Cut one step of all ranks, on the clock of the lowest rank, 0 where the first rank begins it.

    Args:
        facts: of all traces of a run.
        refs: where each trace lies, by the path in its facts.
        step: index of the step in the lowest rank's trace, None for the longest (mean over ranks).
        max_bytes: bound of the uncompressed result, shared evenly between ranks.
        compress: write gzip.
        step_logs: that lie beside the traces, and say such as which ranks are on one machine.

    Raises:
        InputError: no trace times a step.
        UsageError: there is no such step.
    """
    run = assemble_run([decode(item) for item in facts], keeps_all=True)
    captured, log_notices = step_logs.of_run(run.places, facts)
    aligned = align_as_logged(run, captured)
    if aligned is None or not run.steps:
        raise InputError("a merged slice must be cut from traces with steps, got none")
    label = _label(run, step)
    windows = _windows(run, aligned, label)
    shown = _shown_ranks(windows)
    notes = (*(notice.message for notice in log_notices), *_notes(run, aligned, windows, shown))
    tracks = [event for window in shown for event in _state_tracks(window)]
    tracks += _arrows(aligned, {window.rank: window for window in shown}, label)
    texts = [msgspec.json.encode(item) for item in tracks]
    room = max(0, max_bytes - sum(map(_length, texts))) // len(shown)
    left_out = 0
    low = min(window.step.start_us + window.shift_us for window in shown)
    high = max(window.step.start_us + window.step.wall_us + window.shift_us for window in shown)
    for window in shown:
        kept, lost = _own_events(window, refs[window.source.facts.source.path], (low, high), room)
        texts += kept
        left_out += lost
    return Slice(
        data=as_file(texts, compress=compress), label=label, num_events=len(texts), num_left_out=left_out, notes=notes
    )


def _length(text: bytes) -> int:
    return len(text) + EVENT_SEPARATOR_BYTES


def _label(run: Run, step: int | None) -> str:
    """Return the label of the step asked for, else of the longest that most ranks have."""
    known = [item.label for item in run.timed[0][1].steps]
    if step is not None:
        if step >= len(known):
            raise UsageError(f"--step must be below {len(known)}, got {step}")
        return known[step]
    walls: dict[str, list[float]] = {}
    for item in run.steps:
        walls.setdefault(item.label, []).append(item.wall_us)
    most = max(map(len, walls.values()))
    return max((name for name in walls if len(walls[name]) == most), key=lambda name: sum(walls[name]))


def _windows(run: Run, aligned: AlignedRun, label: str) -> list[_RankWindow]:
    """Return each rank's step on one clock, which begins where the first rank begins."""
    origin_ns = min(item.header.origin_ns for _, item in run.timed)
    out = []
    for rank, source in run.timed:
        index = next((place for place, item in enumerate(source.steps) if item.label == label), None)
        if index is not None:
            begin_us = source.steps[index].start_us
            origin_us = (source.header.origin_ns - origin_ns) / 1000.0
            shift = aligned.aligned_us(rank, begin_us + origin_us) - begin_us
            out.append(_RankWindow(rank=rank, source=source, index=index, shift_us=shift))
    begin = min(window.step.start_us + window.shift_us for window in out)
    return [replace(item, shift_us=item.shift_us - begin) for item in out]


def _shown_ranks(windows: Sequence[_RankWindow]) -> list[_RankWindow]:
    """Return all ranks, or those that compute longest and shortest where a viewer could not show all."""
    if len(windows) <= MAX_MERGED_RANKS:
        return list(windows)
    order = sorted(windows, key=lambda window: -window.step.compute_us)
    half = MAX_MERGED_RANKS // 2
    return sorted(order[:half] + order[-half:], key=lambda window: window.rank)


def _notes(
    run: Run, aligned: AlignedRun, windows: Sequence[_RankWindow], shown: Sequence[_RankWindow]
) -> tuple[str, ...]:
    notes = [notice.message for notice in run.notices]
    if len(windows) < len(run.timed):
        notes.append(f"{plural(len(run.timed) - len(windows), 'rank')} without this step left out")
    if len(shown) < len(windows):
        half = len(shown) // 2
        notes.append(
            f"{len(shown)} of {len(windows)} ranks are shown: the {half} that compute longest and the {half} that "
            f"compute shortest ({number_ranges([window.rank for window in shown])})"
        )
    if len(set(aligned.offset_us.values())) > 1 or aligned.clock_error_us:
        notes.append(f"host clocks are aligned to about {time_text(aligned.clock_error_us)} by the ends of collectives")
    elif aligned.clock_error_us is None:
        notes.append("host clocks could not be aligned: no collective was seen on two hosts")
    return tuple(notes)


def _state_tracks(window: _RankWindow) -> list[TraceEvent]:
    table = timed_in_step(window.source.collectives, window.index)
    tracks = state_tracks(table, window.marker_pid, f"rank {window.rank}: model states", window.shift_us)
    return [*tracks, metadata_event("process_sort_index", window.marker_pid, 0, sort_index=window.marker_pid)]


def _arrows(aligned: AlignedRun, windows: Mapping[int, _RankWindow], label: str) -> list[TraceEvent]:
    """Return an arrow for each collective: from its first rank to arrive through all others to the last."""
    import polars as pl

    rows = aligned.table.filter(
        (pl.col("step_label") == label) & pl.col("match").is_not_null() & pl.col("rank").is_in(list(windows))
    ).sort("match", "arrival_us", "rank")
    states = {
        rank: tracked_states(timed_in_step(window.source.collectives, window.index)) for rank, window in windows.items()
    }
    out: list[TraceEvent] = []
    for (number,), part in rows.group_by("match", maintain_order=True):
        # A step that is in the inputs twice has one picture.
        members = [row for row in part.iter_rows(named=True) if row["state"] in states[row["rank"]]]
        for place, row in enumerate(members if len(members) > 1 else []):
            window = windows[row["rank"]]
            out.append(
                {
                    "ph": "s" if place == 0 else "f" if place == len(members) - 1 else "t",
                    "cat": "paro_advise",
                    "name": f"{row['op']} arrives",
                    "id": int(number),
                    "pid": window.marker_pid,
                    "tid": states[row["rank"]].index(row["state"]),
                    "ts": row["start_us"] + window.shift_us,
                }
                | ({"bp": "e"} if place == len(members) - 1 else {})
            )
    return out


def _own_events(
    window: _RankWindow, ref: SourceRef, bounds_us: tuple[float, float], room: int
) -> tuple[list[bytes], int]:
    """Return a rank's own events within the window, on the slice's clock and under the rank's name.

    Returns:
        The events that fit, of each category the longest first, and the number of those that do not.
    """
    # The shift from the file's own axis to that of the slice.
    shift_us = window.shift_us - window.source.header.zero_us
    pids: dict[object, int] = {}
    named: list[TraceEvent] = []
    found: list[tuple[int, float, TraceEvent]] = []
    for event, _ in events_within(ref, (bounds_us[0] - shift_us, bounds_us[1] - shift_us)):
        pid = event.get("pid")
        number = pids.setdefault(
            pid if isinstance(pid, int | str) else str(pid), window.marker_pid + 1 + len(pids) % (PIDS_PER_RANK - 1)
        )
        event["pid"] = number
        if event.get("ph") == "M":
            named.append(event)
            continue
        event["ts"] = float(event["ts"]) + shift_us
        if "id" in event:
            event["id"] = f"{window.rank}/{event['id']}"
        found.append((_priority(event), -float(event.get("dur") or 0.0), event))
    found.sort(key=lambda item: item[:2])
    used = {event["pid"] for _, _, event in found}
    kept = [msgspec.json.encode(_name_rank(event, window.rank)) for event in named if event["pid"] in used]
    size = sum(map(_length, kept))
    for place, (_, _, event) in enumerate(found):
        text = msgspec.json.encode(event)
        size += _length(text)
        if size > room:
            return kept, len(found) - place
        kept.append(text)
    return kept, 0


def _priority(event: Mapping[str, Any]) -> int:
    category = str(event.get("cat", ""))
    return 0 if category in _FIRST else 2 if category in _LAST else 1


def _name_rank(event: TraceEvent, rank: int) -> TraceEvent:
    """Return metadata with the rank in the process's name, and the rank's processes side by side."""
    arguments = event.get("args")
    if not isinstance(arguments, dict):
        return event
    if event.get("name") == "process_name":
        return event | {"args": {"name": f"rank {rank}: {arguments.get('name', '')}"}}
    if event.get("name") == "process_sort_index":
        return event | {"args": {"sort_index": event["pid"]}}
    return event
