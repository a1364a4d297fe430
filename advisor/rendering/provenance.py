"""What a page says of how it was made."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from paro_advise.core.release import release
from paro_advise.core.secrets import masked_command
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.facts.model import RankFacts, StepFacts
    from paro_advise.advisor.hta.library import HtaFigures
    from paro_advise.advisor.rendering.page import Provenance


def report_page(analysis: Analysis, facts: Sequence[RankFacts], hta: HtaFigures | None = None) -> str:
    """Return the HTML report of an analysis.

    Args:
        analysis: the run.
        facts: of its files, for the timeline; () draws none.
        hta: HolisticTraceAnalysis' figures, None without.
    """
    from paro_advise.advisor.rendering.analyses.analysis_page import render_report
    from paro_advise.advisor.rendering.analyses.log_page import render_log_page
    from paro_advise.advisor.timelines.of_run import timeline_of

    if not analysis.ranks and all(item.kind != SourceKind.KINETO for item in analysis.run.inputs):
        return render_log_page(analysis, provenance())
    table = None
    if hta is not None:
        from paro_advise.advisor.rendering.analyses.hta_figures import hta_table

        table = hta_table(hta)
    return render_report(analysis, timeline_of(analysis, facts), provenance(), table, steps_by_rank(analysis, facts))


def steps_by_rank(analysis: Analysis, facts: Sequence[RankFacts]) -> dict[int, tuple[StepFacts, ...]]:
    """Return the steps of each rank whose file was used."""
    used = {item.path for item in analysis.run.inputs}
    return {item.header.rank: item.steps for item in facts if item.header.rank is not None and item.source.path in used}


def provenance() -> Provenance:
    """Return when, by what and how a page is made."""
    from paro_advise.advisor.rendering.page import Provenance
    from paro_advise.advisor.wording.escaping import plain

    return Provenance(
        version=release(),
        created_utc=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        command=plain(masked_command(["paro-advise", *sys.argv[1:]])),
    )
