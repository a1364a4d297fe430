"""Notices: what a reader skipped, repaired, guessed or could not know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """How much a notice weighs on the result."""

    INFO = "info"  # the result stands, the reader should know how it came about
    WARNING = "warning"  # part of the input was lost or guessed
    ERROR = "error"  # a whole input gave nothing


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Notice:
    """One entry of ``data_quality``.

    Attributes:
        code: stable identifier (``Q...``), the argument of ``paro-advise explain``.
        severity: see Severity.
        message: what happened, with counts.
        help: the next step, or "" when there is none.
    """

    code: str
    severity: Severity
    message: str
    help: str = ""
