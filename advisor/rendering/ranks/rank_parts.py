"""The ranks of a run as bars and rows: where each one's step goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.charts import Bar, Segment, stacked_bars
from paro_advise.advisor.rendering.constants import BEST_RANKS, MAX_DRAWN_RANKS, WORST_RANKS
from paro_advise.advisor.rendering.page import Row, Table, make_table, number
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from paro_advise.advisor.analysis.model import Analysis, RankEntry

STEP_PARTS = (
    ("compute", "compute"),
    ("exposed", "exposed communication"),
    ("rest", "memory copies and sync"),
    ("idle", "idle"),
)


def shown_ranks(ranks: Sequence[RankEntry]) -> list[RankEntry]:
    """Return the ranks that are drawn: all, or beyond MAX_DRAWN_RANKS some of the slowest and the fastest."""
    if len(ranks) <= MAX_DRAWN_RANKS:
        return list(ranks)
    order = sorted(ranks, key=lambda entry: (-entry.compute_us, entry.rank))
    chosen = {entry.rank for entry in (*order[:WORST_RANKS], *order[-BEST_RANKS:])}
    return [entry for entry in ranks if entry.rank in chosen]


def rank_note(analysis: Analysis) -> str:
    """Say which ranks are drawn, "" where all are."""
    count = len(analysis.ranks)
    if count <= MAX_DRAWN_RANKS:
        return ""
    return (
        f"Of {count:,} ranks the {WORST_RANKS} that compute longest and the {BEST_RANKS} that compute shortest are "
        "shown."
    )


def rank_chart(analysis: Analysis) -> Markup:
    """Draw the parts of each rank's mean step."""
    bars = []
    for entry in shown_ranks(analysis.ranks):
        values = (entry.compute_us, entry.exposed_communication_us, entry.other_us, entry.idle_us)
        bars.append(
            Bar(
                label=f"rank {entry.rank}",
                segments=tuple(
                    Segment(kind=kind, value_us=value, name=name)
                    for (kind, name), value in zip(STEP_PARTS, values, strict=True)
                ),
            )
        )
    late = analysis.stragglers[0] if analysis.stragglers else None
    title = "No rank stands out as late"
    if late is not None:
        title = f"{late.text.capitalize()} {'make' if late.alike else 'makes'} the others wait"
    return stacked_bars("chart-ranks", title, "Parts of the mean step per rank", bars)


def rank_table(analysis: Analysis) -> Table:
    """Return the ranks that are drawn."""
    return ranks_as_table("table-ranks", shown_ranks(analysis.ranks), "rank")


def ranks_as_table(table_id: str, ranks: Sequence[RankEntry], row_id: str = "") -> Table:
    """Return ranks as rows.

    Args:
        table_id: of the table.
        ranks: in the order of rows.
        row_id: what the rows' own ids begin with, "" for none.
    """
    rows = [
        Row(
            id=f"{row_id}-{entry.rank}" if row_id else "",
            cells=(
                number(float(entry.rank), str(entry.rank)),
                number(
                    None if entry.node is None else float(entry.node),
                    "unknown" if entry.node is None else str(entry.node),
                ),
                *(
                    number(value, time_text(value))
                    for value in (
                        entry.step_time_us,
                        entry.compute_us,
                        entry.exposed_communication_us,
                        entry.other_us,
                        entry.idle_us,
                        entry.wait_us,
                    )
                ),
            ),
        )
        for entry in ranks
    ]
    names = (
        "rank #",
        "node #",
        "step #",
        "compute #",
        "exposed #",
        "copies and sync #",
        "idle #",
        "waiting #",
    )
    return make_table(table_id, "Means over steps; waiting counts overlapped and exposed", names, rows)
