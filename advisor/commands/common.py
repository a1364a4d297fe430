"""What several verbs share."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis import Analysis
    from paro_advise.advisor.hta import HtaFigures
    from paro_advise.advisor.page import Provenance
    from paro_advise.advisor.rank_facts import RankFacts

_SECRETS = ("token", "secret", "password", "key")


def report_bytes(analysis: Analysis, facts: Sequence[RankFacts], hta: HtaFigures | None) -> bytes:
    """Return the HTML report."""
    from paro_advise.advisor.report import render_report

    shown = next((item for item in facts if item.timeline), None)
    rank = shown.header.rank if shown and shown.header.rank is not None else (0 if shown else None)
    table = None
    if hta is not None:
        from paro_advise.advisor.hta import hta_table

        table = hta_table(hta)
    page = render_report(analysis, shown.timeline if shown else (), rank, provenance(), table)
    return page.encode()


def provenance() -> Provenance:
    """Return when, by what and how a page is made."""
    from paro_advise.advisor.page import Provenance

    return Provenance(
        version=version("paro-advise"),
        created_utc=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        command=command_line(sys.argv),
    )


def command_line(argv: Sequence[str]) -> str:
    """Return the command as typed, with values that look secret masked."""
    masked = []
    for word in ["paro-advise", *argv[1:]]:
        name, sign, _ = word.partition("=")
        is_secret = sign and any(secret in name.lower() for secret in _SECRETS)
        masked.append(f"{name}=***" if is_secret else word)
    return shlex.join(masked)
