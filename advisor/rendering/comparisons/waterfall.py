"""Where the time between two runs went: a bar for the step before, one for each change, one for the step after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.rendering.charts import chart, time_axis
from paro_advise.advisor.rendering.constants import CHART_WIDTH, LEAST_DRAWN
from paro_advise.advisor.wording.quantities import time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

# Height of a bar, and widths for names, which narrow pages draw larger, and for figures, px.
_ROW, _LABELS, _FIGURES = 28.0, 240.0, 90.0


def waterfall(chart_id: str, before: Sequence[tuple[str, float]], after: Sequence[tuple[str, float]]) -> Markup:
    """Draw how the parts of a step changed.

    Args:
        chart_id: unique id in the page.
        before, after: name and mean time (us) of each part, the same names in the same order.
    """
    start, end = sum(value for _, value in before), sum(value for _, value in after)
    if min(start, end) < LEAST_DRAWN:
        return Markup("")
    pairs = zip(before, after, strict=True)
    changes = [(name, other - one) for (name, one), (_, other) in pairs if one or other]
    high = _highest(start, changes)
    scale = (CHART_WIDTH - _LABELS - _FIGURES) / high
    rows = len(changes) + 2
    bottom = 8 + _ROW * rows
    parts = time_axis(high, 6, bottom, left=_LABELS, right=_FIGURES)
    reached = start
    bars = [("before", "compute", 0.0, start, time_text(start))]
    for name, change in changes:
        low, top = sorted((reached, reached + change))
        sign = "+" if change > 0 else "-" if change < 0 else ""
        bars.append((name, "more" if change > 0 else "less", low, top, f"{sign}{time_text(abs(change))}"))
        reached += change
    bars.append(("after", "compute", 0.0, end, time_text(end)))
    for place, (name, kind, low, top, text) in enumerate(bars):
        y = 8 + place * _ROW
        parts.append(
            Markup(
                '<text class="label" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>'
                '<rect class="{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.0f}"><title>{} {}</title></rect>'
                '<text class="tick" x="{:.1f}" y="{:.1f}">{}</text>'
            ).format(
                _LABELS - 6,
                y + 18,
                name,
                kind,
                _LABELS + low * scale,
                y + 3,
                max((top - low) * scale, 0.8),
                _ROW - 6,
                name,
                text,
                _LABELS + top * scale + 6,
                y + 18,
                text,
            )
        )
    name, change = max(changes, key=lambda item: abs(item[1]), default=("", 0.0))
    sign = "-" if change < 0 else "+"
    title = f"{name} changed most: {sign}{time_text(abs(change))}" if change else "No part changed"
    return chart(chart_id, title, "From the mean profiled step before to that after, part by part", bottom + 22, parts)


def _highest(start: float, changes: Sequence[tuple[str, float]]) -> float:
    reached = highest = start
    for _, change in changes:
        reached += change
        highest = max(highest, reached)
    return highest
