"""Tells from step times whether a job has become slower (pure).

The newest m steps are compared with ``BASELINE_STEPS`` before them. An alarm asks that each of them takes longer than
all but k - 1 of the baseline's, and that their median is 5 % above the baseline's, for one of the pairs of m and k in
``EXCEEDANCES``. This needs no distribution: if steps come in any order with equal chance, m of them all exceed the k-th
largest of n others with probability C(k + m - 1, m) / C(n + m, m) (exceedances: Gumbel and von Schelling, 1950). The
sum over the pairs bounds the chance of a false alarm at a step with a whole baseline. Steps that are slow in bursts
make it larger, by as much as bursts last longer than m.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.constants import (
    BASELINE_STEPS,
    EXCEEDANCES,
    LEAST_BASELINE,
    LEAST_SLOWDOWN,
    RUN_STEPS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_STEPS = BASELINE_STEPS + max(run for run, _ in EXCEEDANCES)  # that a judgement looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
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


def false_alarm_chance() -> float:
    """Return the most that a false alarm at one step is likely, if steps come in any order with equal chance."""
    return sum(math.comb(order + run - 1, run) / math.comb(BASELINE_STEPS + run, run) for run, order in EXCEEDANCES)


def find_changes(steps: Sequence[tuple[int, float]], *, since_step: int = 0, judged_step: int = -1) -> list[Slowdown]:
    """Return when a job became slower, in order; after each alarm the baseline begins anew.

    Args:
        steps: number and time (us) of each, in order, without warm-up and profiled ones.
        since_step: first step of a baseline, that of the last change where one was found before.
        judged_step: up to which all has been judged.
    """
    found: list[Slowdown] = []
    numbers = [step for step, _ in steps]
    begin = bisect_left(numbers, since_step)  # of the baseline: nothing before a change counts after it
    for end in range(max(begin + RUN_STEPS, bisect_right(numbers, judged_step) + 1), len(steps) + 1):
        latest = steps[max(begin, end - _MOST_STEPS) : end]
        for run, order in EXCEEDANCES:
            change = _change(latest, run, order)
            if change is not None:
                found.append(change)
                begin = bisect_left(numbers, change.since_step)
                break
    return found


def _change(steps: Sequence[tuple[int, float]], run: int, order: int) -> Slowdown | None:
    """Hold the newest steps against those before, by one pair; None where they are no slower, or too few are known."""
    newest, baseline = steps[-run:], [time for _, time in steps[-run - BASELINE_STEPS : -run]]
    if len(baseline) < (LEAST_BASELINE if run == RUN_STEPS else BASELINE_STEPS):
        return None
    if min(time for _, time in newest) <= sorted(baseline)[-order]:
        return None
    before, after = median(baseline), median(time for _, time in newest)
    if after <= LEAST_SLOWDOWN * before:
        return None
    first = len(steps) - run
    while first > 0 and steps[first - 1][1] > (before + after) / 2:  # counted to the baseline as it filled up
        first -= 1
    return Slowdown(step=newest[-1][0], since_step=steps[first][0], before_us=before, after_us=after)
