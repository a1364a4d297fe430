"""A hang as a page of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.page import Cell, Row, make_table, render_page
from paro_advise.advisor.rendering.texts.hang_text import awaited_or_others, group_name
from paro_advise.advisor.wording.quantities import number_ranges
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from paro_advise.advisor.hangs.model import Hang
    from paro_advise.advisor.rendering.page import Provenance


def render_hang(hang: Hang, provenance: Provenance) -> str:
    """Return the page."""
    culprits = [_row(str(one.rank), one.cause, one.why, one.last) for one in hang.culprits]
    waits = [
        _row(group_name(wait), number_ranges(wait.waiting), wait.operation, awaited_or_others(wait))
        for wait in hang.waits
    ]
    mismatches = [
        _row(group_name(mismatch), str(mismatch.seq), number_ranges(ranks), kind)
        for mismatch in hang.mismatches
        for kind, ranks in mismatch.issued.items()
    ]
    places = [_row(number_ranges(ranks), place) for place, ranks in hang.places.items()]
    return render_page(
        "hang.html.j2",
        hang,
        provenance,
        title="hang",
        subtitle=f"hang, {plural(len(hang.ranks), 'rank')} seen",
        verdict=hang.text,
        missing=number_ranges(hang.ranks_missing) if hang.ranks_missing else "",
        culprits=make_table("table-culprits", "At fault", ("rank", "cause", "why", "last issued"), culprits),
        waits=make_table("table-waits", "Who waits for whom", ("group", "waiting", "in", "for"), waits),
        places=make_table("table-places", "Main threads by location", ("ranks", "innermost calls"), places),
        mismatches=make_table(
            "table-mismatches",
            "Different collectives under one number",
            ("group", "number", "ranks", "issued"),
            mismatches,
        ),
    )


def _row(*texts: str) -> Row:
    return Row(cells=tuple(Cell(text=text) for text in texts))
