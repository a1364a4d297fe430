"""A quantity of two runs, and whether it changed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import LEAST_US, NARROW_RANGE_PCT, REAL_CHANGE_PCT
from paro_advise.advisor.comparison.model import ChangeVerdict, Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.comparison.bootstrap import Change


def is_real(change: float) -> bool:
    """Tell whether a relative change is large enough to count: as much there as back, as of a time and of its rate."""
    ratio = max(1 + change, 0.0)
    return ratio <= 1 / (1 + REAL_CHANGE_PCT / 100) or ratio >= 1 + REAL_CHANGE_PCT / 100


def verdict_of(change: Change | None, *, lower_is_better: bool = True) -> ChangeVerdict:
    """Judge a change: real if its range leaves out zero and it is large enough, the same if its range is near zero."""
    if change is None:
        return ChangeVerdict.UNCLEAR
    low, high, value = 100 * change.low, 100 * change.high, 100 * change.value
    if (low > 0 or high < 0) and is_real(change.value):
        return ChangeVerdict.BETTER if (value < 0) == lower_is_better else ChangeVerdict.WORSE
    return ChangeVerdict.SAME if low >= -NARROW_RANGE_PCT and high <= NARROW_RANGE_PCT else ChangeVerdict.UNCLEAR


def metric_of(
    name: str,
    unit: str,
    before: float | None,
    after: float | None,
    change: Change | None = None,
    *,
    lower_is_better: bool | None = True,
    samples: str = "",
) -> Metric:
    """Return a quantity with its change and verdict.

    Args:
        name: see Metric.
        unit: see Metric.
        before: its value, None where it is not known.
        after: likewise.
        change: with its range, None without one.
        lower_is_better: None for what is neither better nor worse.
        samples: what the range rests on, "" where nothing could give one.
    """
    # A share of nearly nothing that becomes something has no relative change worth a number.
    plain = 100 * (after / before - 1) if before and after is not None and unit != "share" else None
    if lower_is_better is None or not samples:
        is_neutral = lower_is_better is None or plain is None
        verdict = ChangeVerdict.NEUTRAL if is_neutral else ChangeVerdict.UNCLEAR
    else:
        verdict = verdict_of(change, lower_is_better=lower_is_better)
    return Metric(
        name=name,
        unit=unit,
        before=before,
        after=after,
        change_pct=100 * change.value if change else plain,
        low_pct=100 * change.low if change else None,
        high_pct=100 * change.high if change else None,
        verdict=verdict,
        samples=samples if change else "",
    )


def mean_us(values: Sequence[float]) -> float | None:
    """Return the mean of times, 0 where it is what sums of differences leave over, None without any."""
    found_us = math.fsum(values) / len(values) if values else None
    return 0.0 if found_us is not None and found_us < LEAST_US else found_us
