"""How much something changed between two runs, and how sure that is (pure).

The statistic is the ratio of trimmed means, its range the percentile bootstrap's (Efron and
Tibshirani, 1993, chapter 13), widened for few samples as a t-interval is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_DRAWS = 2_000
_TRIM = 0.1
_MIN_SAMPLES = 4
_CORRELATED = 0.5
_TAIL = 0.01
_EXTREME = 30.0
# Student's t over the normal distribution at 99 %, by degrees of freedom.
_T_OVER_Z = {3: 1.95, 4: 1.61, 5: 1.45, 6: 1.35, 7: 1.29, 8: 1.25, 10: 1.19, 15: 1.12, 20: 1.09, 30: 1.06, 60: 1.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A relative change with its 98 % range; 0.1 means 10 % more afterwards."""

    value: float
    low: float
    high: float


def change_between(before: Sequence[float], after: Sequence[float], *, paired: bool = False) -> Change | None:
    """Return how much larger a quantity became.

    Args:
        before, after: positive samples; of equal length and order where ``paired``.
        paired: what happened in one sample before happened in the same one after; only used if
            the samples do vary together.

    Returns:
        None with fewer than four samples on a side.
    """
    if min(len(before), len(after)) < _MIN_SAMPLES or min(*before, *after) <= 0:
        return None
    # Beyond e^30 nothing is a step time any more; it would only overflow.
    first, second = (np.clip(np.log(np.asarray(side)), -_EXTREME, _EXTREME) for side in (before, after))
    generator = np.random.default_rng(0)
    if paired and len(first) == len(second) and _correlation(first, second) > _CORRELATED:
        draws = _resampled(second - first, generator)
        value = _trimmed(second - first)
    else:
        draws = _resampled(second, generator) - _resampled(first, generator)
        value = _trimmed(second) - _trimmed(first)
    low, high = (float(bound) for bound in np.quantile(draws, (_TAIL, 1 - _TAIL)))
    wider = _widening(min(len(first), len(second)) - 1)
    return Change(
        value=math.expm1(value),
        low=math.expm1(value - (value - low) * wider),
        high=math.expm1(value + (high - value) * wider),
    )


def _resampled(samples: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    picked = samples[generator.integers(0, len(samples), (_DRAWS, len(samples)))]
    picked.sort(axis=1)
    cut = int(_TRIM * len(samples))
    found: NDArray[np.float64] = picked[:, cut : len(samples) - cut].mean(axis=1)
    return found


def _trimmed(samples: NDArray[np.float64]) -> float:
    cut = int(_TRIM * len(samples))
    return float(np.sort(samples)[cut : len(samples) - cut].mean())


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _widening(freedom: int) -> float:
    factor = next((factor for limit, factor in _T_OVER_Z.items() if freedom <= limit), 1.0)
    return factor * math.sqrt((freedom + 1) / freedom)  # the bootstrap's variance is that of n, not n - 1
