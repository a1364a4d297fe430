"""Notices: what a reader skipped, repaired, guessed or could not know."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.core.plural import plural


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


class NoticeList:
    """Collects notices; those about nothing are left out.

    Args:
        prefix: what every message begins with.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._notices: list[Notice] = []

    def info(self, code: str, message: str, help_text: str = "") -> None:
        """Add how a result came about."""
        self._add(code, Severity.INFO, message, help_text)

    def warn(self, code: str, message: str, help_text: str = "") -> None:
        """Add a loss or a guess."""
        self._add(code, Severity.WARNING, message, help_text)

    def warn_of_skipped(self, count: int, what: str) -> None:
        """Add the number of broken records, unless it is 0."""
        if count:
            self.warn("Q201", f"{what} broken or out of range, left out: {count:,}")

    def warn_of_sizes(self, count: int, unknown: str) -> None:
        """Add the number of collectives whose sizes cannot be told, unless it is 0, and what is unknown of them."""
        if count:
            have = plural(count, "collective has", "collectives have")
            self.warn("Q212", f"{have} no size: unknown {unknown}")

    def _add(self, code: str, severity: Severity, message: str, help_text: str) -> None:
        self._notices.append(Notice(code=code, severity=severity, message=self._prefix + message, help=help_text))

    def in_order(self) -> tuple[Notice, ...]:
        """Return all notices in order of arrival."""
        return tuple(self._notices)

    def by_code(self) -> tuple[Notice, ...]:
        """Return all notices by code."""
        return tuple(sorted(self._notices))
