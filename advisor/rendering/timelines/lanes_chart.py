"""One step of one or two ranks as lanes of boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.rendering.charts import chart, time_axis
from paro_advise.advisor.rendering.constants import CHART_WIDTH, LABEL_WIDTH, LANE_HEIGHT, LEAST_DRAWN, MAX_MARKS
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.model_state import STATES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paro_advise.advisor.timelines.model import RankStep, TimelineBox

LANES = ("compute", *(state.value for state in STATES))


def lanes_of(shown: Iterable[RankStep]) -> list[str]:
    """Return the lanes that any of these steps needs, top to bottom."""
    present = {box.lane for item in shown for box in item.boxes}
    return [lane for lane in LANES if lane in present]


def lanes_legend(shown: Iterable[RankStep]) -> list[tuple[str, str]]:
    """Return CSS class and text of each lane."""
    return [(f"s-{lane}", lane) for lane in lanes_of(shown)]


def lanes_chart(
    chart_id: str, title: str, description: str, shown: Sequence[RankStep], high_us: float | None = None
) -> Markup:
    """Draw a step of each rank, one below the other on one clock.

    Args:
        chart_id: unique id in the page.
        title: states the finding.
        description: what is drawn.
        shown: one step of each rank; with several, each has its name above its lanes.
        high_us: where the time axis ends, None for the end of the last step.
    """
    high = high_us or max((item.shift_us + item.wall_us for item in shown), default=0.0)
    lanes = lanes_of(shown)
    if high < LEAST_DRAWN or not lanes:
        return Markup("")
    blocks = [LANE_HEIGHT * len(lanes) + (LANE_HEIGHT if len(shown) > 1 else 0.0) for _ in shown]
    bottom = 8 + sum(blocks)
    scale = (CHART_WIDTH - LABEL_WIDTH - 10) / high
    parts = time_axis(high, 6, bottom)
    top = 8.0
    for item, block in zip(shown, blocks, strict=True):
        lanes_top = top + block - LANE_HEIGHT * len(lanes)
        if len(shown) > 1:
            parts.append(Markup('<text class="rank" x="0" y="{:.1f}">rank {}</text>').format(top + 20, item.rank))
        for place, lane in enumerate(lanes):
            y = lanes_top + place * LANE_HEIGHT
            parts.append(
                Markup('<text class="label" x="{:.0f}" y="{:.1f}" text-anchor="end">{}</text>').format(
                    LABEL_WIDTH - 6, y + LANE_HEIGHT / 2 + 4, lane
                )
            )
            parts += _boxes([box for box in item.boxes if box.lane == lane], y, scale, item.shift_us)
        top += block
    return chart(chart_id, title, description, bottom + 24, parts)


def _boxes(boxes: Sequence[TimelineBox], y: float, scale: float, shift_us: float) -> list[Markup]:
    """Return the boxes of a lane; one that ends within half a pixel of what is drawn already is left out."""
    parts, end_px = [], -1.0
    for box in sorted(boxes, key=lambda box: box.start_us)[:MAX_MARKS]:
        x = LABEL_WIDTH + (box.start_us + shift_us) * scale
        width = max((box.end_us - box.start_us) * scale, 0.6)
        if x + width <= end_px + 0.5 and width < 1:
            continue
        end_px = max(end_px, x + width)
        parts.append(
            Markup(
                '<rect class="s-{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"><title>{} {}</title></rect>'
            ).format(box.lane, x, y + 3, width, LANE_HEIGHT - 6, box.label, time_text(box.end_us - box.start_us))
        )
    return parts
