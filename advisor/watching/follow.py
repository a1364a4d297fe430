"""The step logs of a job that runs, read again as they grow."""

from __future__ import annotations

import time
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import GROWTH_LOOK_S, LOGGED_AT_ONCE
from paro_advise.advisor.watching.job import job_steps
from paro_advise.advisor.watching.recording import newest_step
from paro_advise.core.capture_files import STEP_LOG_PATTERN
from paro_advise.errors import InputError
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.constants import LOG_HEAD_BYTES, MAX_STEP_LOG_BYTES
from paro_advise.trace_parsers.logs.step_log import read_step_log, step_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What was read of a log: all of it at first, then what has been added.

    Attributes:
        read_bytes: up to the end of a line.
        identity: of the file, other in one that has taken its place.
    """

    log: LoggedSteps
    read_bytes: int
    identity: tuple[int, bytes]


class FollowedJob:
    """The logs in a folder.

    Args:
        folder: that `capture` writes into.
        keep_steps: steps that are kept once all ranks have logged newer ones, None for all.

    Attributes:
        num_replaced: logs whose place another one has taken, so that steps count from the start again.
        standing: logs that have stopped growing while others have not; nothing is judged by them.
    """

    def __init__(self, folder: Path, keep_steps: int | None = None) -> None:
        self._folder = folder
        self._keep_steps = keep_steps
        self._known: dict[Path, _Known] = {}
        self._vanished: dict[Path, _Known] = {}
        self.num_replaced = 0
        self.standing: tuple[LoggedSteps, ...] = ()

    def logs(self) -> list[LoggedSteps]:
        """Return the step logs that grow: of those known before, what was added and the newest steps before that.

        A line that is being written is left out.
        """
        paths = sorted(self._folder.glob(STEP_LOG_PATTERN))
        # A new job removes the logs of the old one some seconds before its own are there.
        self._vanished |= {path: known for path, known in self._known.items() if path not in paths}
        self._known = {path: known for path, known in self._known.items() if path in paths}
        common = newest_step(_growing([known.log for known in self._known.values()]))
        for path in paths:
            known = self._known.get(path) or self._vanished.get(path)
            try:
                identity, size = _identity(path), path.stat().st_size
                if known is not None and (known.identity != identity or size < known.read_bytes):
                    self.num_replaced += 1
                    self._known.pop(path, None)
                    known = None
                self._vanished.pop(path, None)
                if known is None:
                    self._known[path] = _whole(path, identity)
                elif size > known.read_bytes:
                    self._known[path] = _longer(path, known, self._keep_steps, common)
                else:
                    self._known[path] = known
            except (InputError, OSError):
                continue  # its first line is being written, or it is being replaced
        every = [known.log for known in self._known.values()]
        found = _growing(every)
        self.standing = tuple(log for log in every if not any(log is other for other in found))
        return found

    def steps(self) -> list[tuple[int, float]]:
        """Return number and mean time over ranks (us) of the steps that count."""
        return job_steps(self.logs())

    def newest(self) -> int:
        """Return the newest step that every rank has logged, 0 without any."""
        return newest_step(self.logs())

    def wait_for_growth(self, timeout_s: float) -> None:
        """Wait until every rank has logged another step.

        Args:
            timeout_s: to wait at most, or as long as 60 steps take: devices log 50 at once.

        Raises:
            InputError: none came.
        """
        newest, steps = self.newest(), self.steps()
        most_s = max(timeout_s, LOGGED_AT_ONCE * steps[-1][1] / 1e6 if steps else 0.0)
        end = time.monotonic() + most_s
        while self.newest() <= newest:
            if time.monotonic() > end:
                raise InputError(
                    f"a job must take steps, its logs have gained none in {most_s:.0f} s",
                    where=str(self._folder),
                    hint="has it ended, or does it log into another folder?",
                )
            time.sleep(GROWTH_LOOK_S)


def _growing(logs: Sequence[LoggedSteps]) -> list[LoggedSteps]:
    """Leave out logs that end further behind another one than steps are logged at once."""
    newest = max((log.rows[-1].step for log in logs if log.rows), default=0)
    return [log for log in logs if newest - (log.rows[-1].step if log.rows else 0) <= LOGGED_AT_ONCE]


def _identity(path: Path) -> tuple[int, bytes]:
    with path.open("rb") as file:
        return path.stat().st_ino, file.readline(LOG_HEAD_BYTES)


def _whole(path: Path, identity: tuple[int, bytes]) -> _Known:
    # Before the log itself: what is written in between is read again, and known by its steps.
    read_bytes = _whole_lines(path, 0)[1]
    return _Known(log=read_step_log(SourceRef(path=path)), read_bytes=read_bytes, identity=identity)


def _longer(path: Path, known: _Known, keep_steps: int | None, common: int) -> _Known:
    """Read what was added, and forget what lies far before the newest step that all ranks have logged."""
    lines, read_bytes = _whole_lines(path, known.read_bytes)
    added = step_rows(lines)[0]
    behind = bisect_right(known.log.rows, common, key=lambda row: row.step)
    begin = max(0, behind - keep_steps) if keep_steps else 0
    rows = {row.step: row for row in (*known.log.rows[begin:], *added)}
    kept = tuple(rows[number] for number in sorted(rows))
    return replace(known, log=replace(known.log, rows=kept), read_bytes=read_bytes)


def _whole_lines(path: Path, begin: int) -> tuple[list[bytes], int]:
    """Return the lines of a file from a byte on that are written to their end, and the byte behind them."""
    with path.open("rb") as file:
        file.seek(begin)
        data = file.read(MAX_STEP_LOG_BYTES)
    end = data.rfind(b"\n") + 1
    return data[:end].splitlines(), begin + end
