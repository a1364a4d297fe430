"""A run's timeline as a section of a page: picture, values to explore it by, table and notes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.constants import SHOWN_BOXES
from paro_advise.advisor.rendering.page import Cell, Row, Table, View, make_table, number
from paro_advise.advisor.rendering.timelines.explorer import explorer
from paro_advise.advisor.rendering.timelines.lanes_chart import lanes_chart, lanes_legend
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.timelines.model import RankStep, Timeline


def timeline_view(timeline: Timeline | None, overlap_share: str) -> View:
    """Return what the page's template needs; a picture that is "" where there is no step to draw.

    Args:
        timeline: of a run.
        overlap_share: of its communication, as text.
    """
    drawn = _first_view(timeline)
    title = f"{overlap_share} of the communication runs behind compute"
    return {
        "timeline_chart": lanes_chart("chart-timeline", title, f"{timeline.step} by lanes", drawn) if timeline else "",
        "timeline_heading": _timeline_heading(timeline, drawn),
        "timeline_note": _timeline_note(timeline, drawn),
        "timeline_table": _timeline_table(drawn),
        "timeline_legend": lanes_legend(drawn),
        "timeline": explorer(timeline),
        "scripts": ("timeline.js",) if timeline else (),
    }


def _first_view(timeline: Timeline | None) -> list[RankStep]:
    """Return what the picture shows before a reader chooses: a step of one rank, and of the one that it waits for."""
    if timeline is None:
        return []
    ranks = [timeline.first] if timeline.beside is None else [timeline.first, timeline.beside]
    found = [timeline.of(rank, timeline.step) for rank in ranks]
    return [item for item in found if item is not None]


def _timeline_heading(timeline: Timeline | None, drawn: Sequence[RankStep]) -> str:
    if timeline is not None and len(drawn) > 1:
        return f"One step of rank {timeline.first}, and of rank {timeline.beside}, which it waits for"
    return f"One step of rank {drawn[0].rank}" if drawn else ""


def _timeline_note(timeline: Timeline | None, drawn: Sequence[RankStep]) -> str:
    """Return what the picture leaves out, and how far its ranks can be compared."""
    if timeline is None or not drawn:
        return ""
    notes = []
    if timeline.num_ranks > len(timeline.ranks):
        notes.append(f"{len(timeline.ranks)} of {timeline.num_ranks} ranks can be chosen, those that stand out.")
    if len(timeline.ranks) > 1 and not timeline.is_aligned:
        notes.append("The clocks of the ranks could not be compared: each rank's step begins at 0.")
    if left_out := sum(item.num_left_out for item in timeline.shown):
        notes.append(f"{plural(left_out, 'collective')} of all steps, the shortest, have no box.")
    return " ".join(notes)


def _timeline_table(drawn: Sequence[RankStep]) -> Table:
    boxes = [(item.rank, box) for item in drawn for box in item.boxes if box.lane != "compute"]
    shown = boxes[:SHOWN_BOXES]
    rows = [
        Row(
            cells=(
                number(rank, str(rank)),
                Cell(text=box.lane),
                Cell(text=box.label),
                number(box.start_us, time_text(box.start_us)),
                number(box.end_us - box.start_us, time_text(box.end_us - box.start_us)),
            )
        )
        for rank, box in shown
    ]
    of = f"The first {len(rows)} of {len(boxes)}" if len(boxes) > len(rows) else "All"
    names = ("rank #", "state", "collective", "start #", "duration #")
    return make_table("table-timeline", f"{of} collectives, times from the start of the rank's step", names, rows)
