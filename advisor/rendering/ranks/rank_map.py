"""A map of all ranks and steps of a large run: who computed longer than the others, and when.

Ranks wait for the slowest one, so steps are of one length on all of them; what tells them apart is how long they
compute.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from paro_advise.advisor.rendering.charts import chart
from paro_advise.advisor.rendering.constants import (
    CHART_WIDTH,
    LABEL_WIDTH,
    LEAST_DRAWN,
    LEAST_MAPPED_RANKS,
    MAP_COLUMNS,
    MAP_LEVELS,
    MAP_ROW,
    MAX_MAP_STEPS,
    NARROW_LABEL,
)
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paro_advise.advisor.facts.model import StepFacts

MAP_LEGEND = [
    ("late-0", f"within {100 * MAP_LEVELS[0]:.0f}% of the median rank"),
    *(
        (f"late-{level}", f"{100 * low:.0f}% of the step longer" + (" or more" if level == len(MAP_LEVELS) else ""))
        for level, low in enumerate(MAP_LEVELS, start=1)
    ),
]


def rank_map(steps_of: Mapping[int, Sequence[StepFacts]]) -> Markup | None:
    """Draw how much longer than the median rank each rank computed, step by step; None for a small run.

    Args:
        steps_of: each rank's steps.
    """
    ranks = sorted(rank for rank, steps in steps_of.items() if steps)
    if len(ranks) < LEAST_MAPPED_RANKS:
        return None
    num_steps = min(MAX_MAP_STEPS, max(len(steps_of[rank]) for rank in ranks))
    columns = np.array_split(np.arange(len(ranks)), min(MAP_COLUMNS, len(ranks)))
    by_rank = np.array([_levels([_step(steps_of[rank], number) for rank in ranks]) for number in range(num_steps)])
    levels = np.array([[row[column].max() for column in columns] for row in by_rank])
    left, width = LABEL_WIDTH, (CHART_WIDTH - LABEL_WIDTH) / len(columns)
    parts = [
        Markup('<rect class="late-0" x="{}" y="0" width="{}" height="{}"/>').format(
            left, CHART_WIDTH - left, MAP_ROW * num_steps
        )
    ]
    parts += [
        Markup('<g transform="translate({} 0) scale({:.5f} {})"><path class="late-{}" d="{}"/></g>').format(
            left, width, MAP_ROW, level, drawn
        )
        for level in range(1, len(MAP_LEVELS) + 1)
        if (drawn := _cells(levels == level))
    ]
    every = max(1, round(NARROW_LABEL / MAP_ROW))
    parts += [
        Markup('<text class="tick" x="{}" y="{}" text-anchor="end">{}</text>').format(
            left - 8, MAP_ROW * (number + 0.5) + 4, _short(steps_of[ranks[0]], number)
        )
        for number in range(0, num_steps, every)
    ]
    bottom = MAP_ROW * num_steps
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = min(len(columns) - 1, int(share * len(columns)))
        anchor = "start" if share == 0 else "end" if share == 1 else "middle"
        parts.append(
            Markup('<text class="tick" x="{:.1f}" y="{}" text-anchor="{}">rank {}</text>').format(
                left + share * (CHART_WIDTH - left),
                bottom + 16,
                anchor,
                ranks[int(columns[place][0 if share < 1 else -1])],
            )
        )
    late = int((by_rank > 0).any(axis=0).sum())
    title = (
        f"{plural(late, 'rank')} computed longer than the others" if late else "No rank computed longer than the others"
    )
    each = f"; a column shows the slowest of {len(columns[0])} ranks" if len(columns) < len(ranks) else ""
    return chart("chart-map", title, f"Ranks from left to right, steps from top to bottom{each}", bottom + 24, parts)


def _step(steps: Sequence[StepFacts], number: int) -> tuple[float, float]:
    """Return how long a step computed and took (us), NaN where the rank has none."""
    return (steps[number].compute_us, steps[number].wall_us) if number < len(steps) else (np.nan, np.nan)


def _short(steps: Sequence[StepFacts], number: int) -> str:
    """Return a step's name in a few characters, by the number that it ends with."""
    found = re.search(r"\d+$", steps[number].label) if number < len(steps) else None
    return f"step {found[0][-5:]}" if found else f"{number + 1}."


def _levels(step: Sequence[tuple[float, float]]) -> NDArray[np.int64]:
    """Return the level of each rank in one step."""
    compute, wall = np.array(step).T
    known = ~np.isnan(compute)
    beyond = np.where(known, compute - np.median(compute[known]), 0.0)
    return np.searchsorted(MAP_LEVELS, beyond / max(float(np.median(wall[known])), LEAST_DRAWN), side="right")


def _cells(chosen: NDArray[np.bool_]) -> str:
    """Return a path over the chosen cells, neighbours of a row as one."""
    parts = []
    for y, row in enumerate(chosen):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], row, [False])).astype(np.int8)))
        parts += [
            f"M{begin} {y}h{end - begin}v1h-{end - begin}z" for begin, end in zip(edges[::2], edges[1::2], strict=True)
        ]
    return "".join(parts)
