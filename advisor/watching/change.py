"""Tells from step times whether a job has become slower (pure).

The newest ``RUN_STEPS`` steps are held against ``BASELINE_STEPS`` before them. An alarm asks that each of them takes
longer than all but ``ORDER - 1`` of the baseline's, and that their median is 5 % above the baseline's. This needs no
distribution: if steps come in any order with equal chance, m of them all exceed the k-th largest of n others with
probability C(k + m - 1, m) / C(n + m, m) (exceedances: Gumbel and von Schelling, 1950), which is the chance of a false
alarm at a step. Steps that are slow in bursts make it larger, by as much as bursts last longer than ``RUN_STEPS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import (
    BASELINE_STEPS,
    LEAST_BASELINE,
    LEAST_SLOWDOWN,
    ORDER,
    RUN_STEPS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A job has become slower.

    Attributes:
        step: at which it was noticed.
        since_step: first of the slower ones.
        before_us, after_us: median step before and since.
    """

    step: int
    since_step: int
    before_us: float
    after_us: float

    @property
    def factor(self) -> float:
        """Return how many times as long a step takes."""
        return self.after_us / self.before_us


def false_alarm_chance(num_baseline: int = BASELINE_STEPS) -> float:
    """Return the chance of a false alarm at one step, if steps come in any order with equal chance."""
    return math.comb(ORDER + RUN_STEPS - 1, RUN_STEPS) / math.comb(num_baseline + RUN_STEPS, RUN_STEPS)


def find_changes(steps: Sequence[tuple[int, float]]) -> list[Change]:
    """Return when a job became slower, in order; after each alarm the baseline begins anew.

    Args:
        steps: number and time (us) of each, in order, without warm-up and profiled ones.
    """
    found = []
    begin = 0  # of the baseline: nothing before a change counts after it
    for end in range(RUN_STEPS, len(steps) + 1):
        newest = steps[end - RUN_STEPS : end]
        baseline = [time for _, time in steps[max(begin, end - RUN_STEPS - BASELINE_STEPS) : end - RUN_STEPS]]
        if len(baseline) < LEAST_BASELINE:
            continue
        before, after = median(baseline), median(time for _, time in newest)
        threshold = sorted(baseline)[-ORDER]
        if min(time for _, time in newest) > threshold and after > LEAST_SLOWDOWN * before:
            found.append(Change(step=newest[-1][0], since_step=newest[0][0], before_us=before, after_us=after))
            begin = end - RUN_STEPS
    return found
