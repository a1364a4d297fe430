"""The step logs of a job that runs, read again as they grow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import LOGGED_AT_ONCE, LOOK_S
from paro_advise.advisor.watching.job import job_steps
from paro_advise.advisor.watching.recording import newest_step
from paro_advise.core.capture_files import STEP_LOG_PATTERN
from paro_advise.errors import InputError
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_log

if TYPE_CHECKING:
    from pathlib import Path

    from paro_advise.trace_parsers.logs.step_log import StepLog


class FollowedJob:
    """The logs in a folder.

    Args:
        folder: that `capture` writes into.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, tuple[int, StepLog]] = {}

    def logs(self) -> list[StepLog]:
        """Return all step logs, reading those that have grown; a line that is being written is left out."""
        for path in sorted(self._folder.glob(STEP_LOG_PATTERN)):
            size = path.stat().st_size
            if path in self._known and self._known[path][0] == size:
                continue
            try:
                self._known[path] = size, read_step_log(SourceRef(path=path))
            except InputError:
                continue  # its first line is being written
        return [log for _, log in self._known.values()]

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
            time.sleep(LOOK_S)
