"""The index page: the history of all comparisons in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.rendering.charts import lines
from paro_advise.advisor.rendering.page import Cell, Row, make_table, number, render_page
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.documents import to_json
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.comparison.model import Comparison
    from paro_advise.advisor.rendering.page import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A comparison in a file.

    Attributes:
        path: from the folder whose comparisons are listed, as people read it.
        link: from the index page's folder, quoted.
        modified_s: when the file was written, seconds since the epoch.
        comparison: what it holds.
    """

    path: str
    link: str
    modified_s: float
    comparison: Comparison

    @property
    def data(self) -> bytes:
        """Return the comparison as bytes; equal comparisons give equal bytes."""
        return to_json(self.comparison)


def render_index(entries: Sequence[Entry], provenance: Provenance) -> str:
    """Return the page; entries come in the order to show."""
    rows = []
    for entry in entries:
        comparison = entry.comparison
        one, other = comparison.step.before, comparison.step.after
        written = _written(entry)
        strategies = (
            f"{side.run.strategy.triple_at_rest or 'unknown'}" for side in (comparison.before, comparison.after)
        )
        ratio = one / other if one and other else None
        rows.append(
            Row(
                cells=(
                    Cell(text=written),
                    # A name that looks like an address stays a file's.
                    Cell(text=entry.path, css="path", href="./" + entry.link),
                    Cell(text=" -> ".join(strategies)),
                    number(one, time_text(one)),
                    number(other, time_text(other)),
                    number(ratio, "" if ratio is None else f"{ratio:.2f}x"),
                    Cell(text=comparison.verdict, css=f"v-{comparison.verdict}"),
                    Cell(text=comparison.plan.plan_id if comparison.plan else ""),
                )
            )
        )
    names = ("written", "file", "strategy", "step before #", "step after #", "speed-up #", "verdict", "plan")
    better = sum(entry.comparison.verdict == ChangeVerdict.BETTER for entry in entries)
    return render_page(
        "index.html.j2",
        {
            "format": "paro-advise/index",
            "format_version": "1.0",
            "entries": [
                {
                    "path": entry.path,
                    "before_step_us": entry.comparison.step.before,
                    "after_step_us": entry.comparison.step.after,
                    "verdict": entry.comparison.verdict,
                }
                for entry in entries
            ],
        },
        provenance,
        title="history",
        subtitle=plural(len(entries), "comparison"),
        trend=_trend(entries),
        verdict=f"{better} of {plural(len(entries), 'run')} became faster.",
        table_view=make_table("table-history", "The newest first", names, rows),
    )


def _written(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.modified_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _trend(entries: Sequence[Entry]) -> Markup:
    """Draw step times before and after, the oldest comparison first; "" for fewer than two."""
    timed = sorted(
        (entry for entry in entries if entry.comparison.step.before and entry.comparison.step.after),
        key=lambda entry: (entry.modified_s, entry.path),
    )
    if len(timed) < 2:
        return Markup("")
    steps = [entry.comparison.step for entry in timed]
    before, after = (
        [(value or 0.0) / 1e3 for value in side] for side in zip(*((s.before, s.after) for s in steps), strict=True)
    )
    return lines(
        "chart-trend",
        f"The last comparison went from {time_text(steps[-1].before)} to {time_text(steps[-1].after)} a step",
        "Step times in milliseconds before (wide) and after (narrow), comparison by comparison",
        list(range(len(timed))),
        (("line-before", before), ("line-after", after)),
        (_written(timed[0]), _written(timed[-1])),
    )
