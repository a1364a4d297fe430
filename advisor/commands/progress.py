"""What is said on stderr while work goes on."""

from __future__ import annotations

import os
import sys
import time
from itertools import groupby
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.wording.escaping import plain
from paro_advise.trace_parsers.notice import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import QualityEntry

_SHOWN_NOTICES = 12
_SHOWN_OF_A_KIND = 2


class Progress:
    """Commentary on stderr: one line a phase, and a counter on a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty() and not quiet and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """Print one line with the time since the start."""
        if not self._quiet:
            seconds = time.monotonic() - self._begin
            click.secho(f". {plain(text):<70} {seconds:5.1f} s", err=True, dim=True)

    def step(self, done: int, total: int, label: str) -> None:
        """Show a counter on a terminal."""
        if self._live:
            end = "\n" if done == total else ""
            click.echo(f"\r\x1b[K. read {done} of {total}: {plain(label)[-60:]}{end}", err=True, nl=False)

    def notices(self, quality: Sequence[QualityEntry], of: str = "") -> None:
        """Print what was skipped, guessed or cannot be known; quietly what makes figures doubtful alone.

        Args:
            quality: of an analysis.
            of: which of several runs it is of, in front of each message.
        """
        if self._quiet:
            quality = [item for item in quality if item.severity != Severity.INFO]
        shown = 0
        for _, items in groupby(quality, key=lambda item: (item.severity, item.code)):
            like = list(items)
            if shown < _SHOWN_NOTICES:
                shown += self._like_notices(like, of)
        if shown < len(quality):
            click.echo(f"... and {len(quality) - shown} more notes in the JSON and the report", err=True)

    def _like_notices(self, items: Sequence[QualityEntry], of: str) -> int:
        """Print notices of one kind: the first ones, and how many more; return how many that tells."""
        for item in items[:_SHOWN_OF_A_KIND]:
            tip = f" ({item.help})" if item.help else ""
            click.echo(f"{item.severity}[{item.code}]: {of}{plain(item.message)}{plain(tip)}", err=True)
        if len(items) > _SHOWN_OF_A_KIND:
            click.echo(
                f"{items[0].severity}[{items[0].code}]: {of}and {len(items) - _SHOWN_OF_A_KIND} more like it", err=True
            )
        return len(items)
