"""What to capture, as the environment carries it from the command line to every rank."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import UsageError
from paro_advise.runtime.capture.constants import DEFAULT_MAX_MB, DEFAULT_STEPS, EARLIEST_STEP, MAX_RECORDED_STEPS
from paro_advise.runtime.capture.rank_choice import ALL, RankChoice

if TYPE_CHECKING:
    from collections.abc import Mapping

CAPTURE_VARIABLE = "PARO_CAPTURE"
STEPS_VARIABLE = "PARO_CAPTURE_STEPS"
SIZE_VARIABLE = "PARO_CAPTURE_MAX_MB"
RANKS_VARIABLE = "PARO_CAPTURE_RANKS"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRequest:
    """What to capture.

    Attributes:
        folder: for traces and step logs.
        first: the first step that is recorded; steps count from 0 and end with the optimizer's.
        last: the step after the last recorded one.
        max_trace_mb: of the trace of one rank before compression, 1e6 bytes.
        ranks: that record; all log their steps.
    """

    folder: Path
    first: int
    last: int
    max_trace_mb: int = DEFAULT_MAX_MB
    ranks: RankChoice = field(default_factory=RankChoice)

    @classmethod
    def of(
        cls, folder: str | Path, steps: str = DEFAULT_STEPS, max_trace_mb: int = DEFAULT_MAX_MB, ranks: str = ALL
    ) -> CaptureRequest:
        """Read steps such as "10:13", and ranks such as "auto" or "0-7,64".

        Raises:
            UsageError: they are no such range, or the folder has no name.
        """
        refuse_empty(str(folder), "the folder of a capture")
        begin, _, end = steps.partition(":")
        if not (
            begin.isdecimal()
            and end.isdecimal()
            and EARLIEST_STEP <= int(begin) < int(end) <= int(begin) + MAX_RECORDED_STEPS
        ):
            raise UsageError(
                f"steps must be FIRST:END with {EARLIEST_STEP} <= FIRST < END and at most {MAX_RECORDED_STEPS} steps, "
                f"got {steps!r}",
                hint="10:13 records the steps 10, 11 and 12, counted from 0",
            )
        return cls(
            folder=Path(folder),
            first=int(begin),
            last=int(end),
            max_trace_mb=max_trace_mb,
            ranks=RankChoice.of(ranks),
        )

    @classmethod
    def chosen(cls, folder: str | Path | None, steps: str | None) -> CaptureRequest | None:
        """Return what a script asks for; where it leaves the folder open, what the environment asks for.

        Args:
            folder: None for the environment's, with its steps and ranks, or nothing.
            steps: None for those of the environment, or DEFAULT_STEPS.

        Raises:
            UsageError: the request is not valid.
        """
        if folder is not None:
            return cls.of(folder, steps or DEFAULT_STEPS)
        environment = dict(os.environ)
        if steps is not None:
            environment.setdefault(STEPS_VARIABLE, steps)
        return cls.from_environment(environment)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CaptureRequest | None:
        """Return what the environment asks for, None if nothing.

        Raises:
            UsageError: the request is not valid.
        """
        folder = environment.get(CAPTURE_VARIABLE)
        if not folder:
            return None
        size = environment.get(SIZE_VARIABLE, str(DEFAULT_MAX_MB))
        if not size.isdecimal() or not int(size):
            raise UsageError(f"{SIZE_VARIABLE} must be a number of megabytes, got {size!r}")
        ranks = environment.get(RANKS_VARIABLE, ALL)
        return cls.of(folder, environment.get(STEPS_VARIABLE, DEFAULT_STEPS), int(size), ranks)

    def to_environment(self) -> dict[str, str]:
        """Return the variables that carry this request."""
        return {
            CAPTURE_VARIABLE: str(self.folder.absolute()),
            STEPS_VARIABLE: f"{self.first}:{self.last}",
            SIZE_VARIABLE: str(self.max_trace_mb),
            RANKS_VARIABLE: self.ranks.text,
        }
