"""Recordings that a watch asks a running job for, by files in the folder that the job's capture writes into."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import RECORDED_STEPS
from paro_advise.core.capture_files import DECIDED_FILE, TRACE_PATTERN, WANTED_FILE, Decided, Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paro_advise.trace_parsers.logs.step_log import StepLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was asked for.

    Attributes:
        folder: of its traces.
        cause: why, for people.
        from_step: the newest step in the logs when it was asked for.
    """

    folder: Path
    cause: str
    from_step: int


def ask(capture: Path, cause: str, logs: Sequence[StepLog]) -> Recording:
    """Ask the job for three steps of a few ranks.

    Raises:
        OSError: the folder cannot be written.
    """
    import msgspec

    newest = newest_step(logs)
    name = f"steps-after-{newest}"
    partial = capture / f"{WANTED_FILE}.part"
    partial.write_bytes(msgspec.json.encode(Wanted(name=name, count=RECORDED_STEPS, ranks="auto")))
    os.replace(partial, capture / WANTED_FILE)  # noqa: PTH105 - both names are ours
    return Recording(folder=capture / name, cause=cause, from_step=newest)


def newest_step(logs: Sequence[StepLog]) -> int:
    """Return the newest step that every rank has logged, 0 without any."""
    return min((log.rows[-1].step for log in logs if log.rows), default=0)


def is_over(recording: Recording, logs: Sequence[StepLog]) -> bool:
    """Tell whether its steps have passed on every rank and no trace is being written."""
    decided = _decided(recording)
    if decided is None or newest_step(logs) <= decided.last:
        return False
    return any(recording.folder.glob(TRACE_PATTERN)) and not any(recording.folder.glob("*.part"))


def _decided(recording: Recording) -> Decided | None:
    import msgspec

    try:
        found = msgspec.json.decode((recording.folder.parent / DECIDED_FILE).read_bytes(), type=Decided)
    except (OSError, msgspec.DecodeError):
        return None
    return found if found.name == recording.folder.name else None
