"""The values behind a timeline that can be explored: what ``timeline.js`` draws from.

Times are whole numbers of a unit for each step, chosen so that none exceeds 50,000: finer than a screen shows at any
zoom that tells boxes apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.constants import LEAST_DRAWN, TIME_UNITS
from paro_advise.advisor.rendering.timelines.lanes_chart import lanes_of

if TYPE_CHECKING:
    from paro_advise.advisor.rendering.page import View
    from paro_advise.advisor.timelines.model import RankStep, Timeline


def explorer(timeline: Timeline | None) -> View | None:
    """Return what the page's script needs, as JSON takes it; None where there is nothing to choose or to zoom into.

    Args:
        timeline: of a run.
    """
    if timeline is None or not any(item.boxes for item in timeline.shown):
        return None
    ends = {step: max(i.shift_us + i.wall_us for i in timeline.shown if i.step == step) for step in timeline.steps}
    units = {step: max(end_us, LEAST_DRAWN) / TIME_UNITS for step, end_us in ends.items()}
    lanes = lanes_of(timeline.shown)
    labels: dict[str, int] = {}
    return {
        "unit_us": list(units.values()),
        "lanes": lanes,
        "ranks": timeline.ranks,
        "steps": timeline.steps,
        "step": timeline.steps.index(timeline.step),
        "first": timeline.first,
        "beside": timeline.beside,
        "shown": [_pack_step(item, timeline.steps, lanes, labels, units[item.step]) for item in timeline.shown],
        "labels": list(labels),
    }


def _pack_step(
    item: RankStep, steps: tuple[str, ...], lanes: list[str], labels: dict[str, int], unit_us: float
) -> View:
    """Return a step with its boxes as one flat list: lane, start, length, label of each."""
    flat: list[int] = []
    for box in item.boxes:
        start = round(box.start_us / unit_us)
        length = max(1, round(box.end_us / unit_us) - start)
        flat += [lanes.index(box.lane), start, length, labels.setdefault(box.label, len(labels))]
    return {
        "rank": item.rank,
        "step": steps.index(item.step),
        "shift": round(item.shift_us / unit_us),
        "wall": round(item.wall_us / unit_us),
        "boxes": flat,
    }
