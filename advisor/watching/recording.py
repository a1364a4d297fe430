"""Recordings that a watch asks a running job for, by files in the folder that the job's capture writes into."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import MOST_WAITED_STEPS, RECORDED_STEPS
from paro_advise.core.capture_files import (
    REQUEST_FILE,
    STEPS_FILE,
    TRACE_PATTERN,
    RecordingRequest,
    RecordingSteps,
    recordings_folder,
    write_whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRecording:
    """What was asked for.

    Attributes:
        capture: folder that the job's capture writes into.
        folder: of its traces.
        from_step: the newest step in the logs when it was asked for.
    """

    capture: Path
    folder: Path
    from_step: int


def ask(capture: Path, logs: Sequence[LoggedSteps]) -> PendingRecording:
    """Ask the job for three steps of a few ranks.

    Raises:
        OSError: the folder cannot be written.
    """
    import msgspec

    newest = newest_step(logs)
    name = f"steps-after-{newest}-{time.strftime('%Y%m%d-%H%M%S')}"
    data = msgspec.json.encode(RecordingRequest(name=name, count=RECORDED_STEPS, ranks="auto"))
    write_whole(capture / REQUEST_FILE, data)
    return PendingRecording(capture=capture, folder=recordings_folder(capture) / name, from_step=newest)


def newest_step(logs: Sequence[LoggedSteps]) -> int:
    """Return the newest step that every rank has logged, 0 without any."""
    return min((log.rows[-1].step if log.rows else 0 for log in logs), default=0)


def last_step(recording: PendingRecording) -> int | None:
    """Return the step after its last one, None until the job has chosen."""
    import msgspec

    try:
        found = msgspec.json.decode((recording.capture / STEPS_FILE).read_bytes(), type=RecordingSteps)
    except (OSError, msgspec.DecodeError):
        return None
    return found.last if found.name == recording.folder.name else None


def is_over(recording: PendingRecording, logs: Sequence[LoggedSteps]) -> bool:
    """Tell whether its steps have passed on every rank and no trace is being written."""
    last = last_step(recording)
    if last is None or newest_step(logs) <= last:
        return False
    return any(recording.folder.glob(TRACE_PATTERN)) and not any(recording.folder.glob("*.part"))


def is_in_vain(recording: PendingRecording, logs: Sequence[LoggedSteps]) -> bool:
    """Tell whether so many steps have passed that nothing more is to come of it."""
    last = last_step(recording)
    return newest_step(logs) > MOST_WAITED_STEPS + (recording.from_step if last is None else last)
