"""What is said on stderr while work goes on."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.wording.escaping import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import QualityEntry

_SHOWN_NOTICES = 12


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

    def notices(self, quality: Sequence[QualityEntry]) -> None:
        """Print what was skipped, guessed or cannot be known."""
        if self._quiet:
            return
        for item in quality[:_SHOWN_NOTICES]:
            tip = f" ({item.help})" if item.help else ""
            click.echo(f"{item.severity}[{item.code}]: {plain(item.message)}{plain(tip)}", err=True)
        if len(quality) > _SHOWN_NOTICES:
            click.echo(f"... and {len(quality) - _SHOWN_NOTICES} more notes in the JSON and the report", err=True)
