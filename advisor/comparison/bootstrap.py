"""How much something changed between two runs, and how sure that is (pure).

The statistic is the ratio of means of the middle half (interquartile means), since slow steps have a long
tail; its range is the percentile bootstrap's (Efron and Tibshirani, 1993, chapter 13), widened for few
samples as a t-interval is. Slow steps may come in bursts; then blocks of steps in a row are drawn (Politis
and Romano, 1992), as long as their correlation asks for (Politis and White, 2004, with that of neighbours),
or a burst on one side would look like a change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.comparison.constants import (
    EXTREME_SIGMAS,
    MAX_STEP_CORRELATION,
    MIN_SAMPLES,
    MOST_BLOCK_CORRELATION,
    NORMAL_98,
    NUM_RESAMPLES,
    RANGE_TAIL_SHARE,
    SIGNIFICANT_SIGMAS,
    TRIM_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# Student's t over the normal distribution at 99 %, by degrees of freedom; between two of them that of the fewer.
_T_OVER_Z = {3: 1.95, 4: 1.61, 5: 1.45, 6: 1.35, 7: 1.29, 8: 1.25, 10: 1.19, 15: 1.12, 20: 1.09, 30: 1.06, 60: 1.03}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A relative change with its 98 % range; 0.1 means 10 % more afterwards."""

    value: float
    low: float
    high: float


def typical(samples: Sequence[float], trim: float = TRIM_SHARE) -> float:
    """Return the mean of samples without a share of the least and of the largest."""
    return float(_centre(_clip(samples), trim))


def change_between(
    before: Sequence[float], after: Sequence[float], *, paired: bool = False, trim: float = TRIM_SHARE
) -> Change | None:
    """Return how much larger the typical sample became.

    Args:
        before, after: samples, none below zero; of equal length and order where ``paired``.
        paired: what happened in one sample before happened in the same one after; only used if
            the samples do vary together.
        trim: as in typical().

    Returns:
        None with fewer than four samples on a side, or where zero is among what is typical.
    """
    if min(len(before), len(after)) < MIN_SAMPLES or min(*before, *after) < 0:
        return None
    first, second = _clip(before), _clip(after)
    generator = np.random.default_rng(0)
    if paired and len(first) == len(second) and _correlation(_logs(first), _logs(second)) > MAX_STEP_CORRELATION:
        picked, wider = _resample_indices(_logs(second) - _logs(first), generator)
        centres = [_centre(side[picked], trim) for side in (first, second)]
    else:
        (picked_after, wider_after), (picked, wider) = (
            _resample_indices(_logs(side), generator) for side in (second, first)
        )
        centres = [_centre(first[picked], trim), _centre(second[picked_after], trim)]
        wider = max(wider, wider_after)
    usual, usual_after = typical(before, trim), typical(after, trim)
    if min(usual, usual_after, *(side.min() for side in centres)) <= 0:
        return None
    value = math.log(usual_after / usual)
    low, high = (
        float(bound)
        for bound in np.quantile(_logs(centres[1]) - _logs(centres[0]), (RANGE_TAIL_SHARE, 1 - RANGE_TAIL_SHARE))
    )
    return Change(
        value=math.expm1(value),
        low=math.expm1(min(value, value - (value - low) * wider)),
        high=math.expm1(max(value, value + (high - value) * wider)),
    )


def widened(change: Change, before: Sequence[float], after: Sequence[float]) -> Change | None:
    """Return a change of means over steps, whose range so far tells of other samples, as wide as steps ask for.

    Args:
        change: of a part of the steps.
        before, after: times of the steps.

    Returns:
        None where one side has a single step, which tells of no others.
    """
    if min(len(before), len(after)) < 2:
        return None
    error = math.hypot(_error_of_mean(before), _error_of_mean(after))
    low, high = (1 + change.low) * math.exp(-error) - 1, (1 + change.high) * math.exp(error) - 1
    return Change(value=change.value, low=low, high=high)


def _error_of_mean(samples: Sequence[float]) -> float:
    """Return half of the 98 % range of a mean, as a share of it."""
    times = _clip(samples)
    mean = float(times.mean())
    error = float(times.std()) / math.sqrt(len(times)) / mean if mean > 0 else 0.0
    return NORMAL_98 * _widening(len(times), 1) * error


def _clip(samples: Sequence[float]) -> NDArray[np.float64]:
    # Beyond e^30 nothing is a step time any more; it would only overflow.
    found: NDArray[np.float64] = np.minimum(np.asarray(samples, float), math.exp(EXTREME_SIGMAS))
    return found


def _logs(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.log(np.maximum(samples, math.exp(-EXTREME_SIGMAS)))
    return found


def _centre(samples: NDArray[np.float64], trim: float) -> NDArray[np.float64]:
    """Return the trimmed means along the last axis."""
    count = samples.shape[-1]
    cut = int(trim * count)
    found: NDArray[np.float64] = np.sort(samples, axis=-1)[..., cut : count - cut].mean(axis=-1)
    return found


def _resample_indices(samples: NDArray[np.float64], generator: np.random.Generator) -> tuple[NDArray[np.int64], float]:
    """Return the places that draws pick, (draws, samples), and what their range must be widened by."""
    count, block = len(samples), _block(samples)
    starts = generator.integers(0, count, (NUM_RESAMPLES, -(-count // block), 1))
    return (starts + np.arange(block)).reshape(NUM_RESAMPLES, -1)[:, :count] % count, _widening(count, block)


def _block(samples: NDArray[np.float64]) -> int:
    """Return how many steps in a row are drawn together; one where neighbours do not vary together for sure."""
    count = len(samples)
    correlation = _correlation(samples[:-1], samples[1:])
    if correlation <= SIGNIFICANT_SIGMAS / math.sqrt(count):
        return 1
    correlation = min(correlation, MOST_BLOCK_CORRELATION)
    length: float = (1.5 * count) ** (1 / 3) * (2 * correlation / (1 - correlation**2)) ** (2 / 3)
    return max(1, min(round(length), count // 4))


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    if first.std() == 0 or second.std() == 0:
        return 0.0
    return float(np.corrcoef(first, second)[0, 1])


def _widening(count: int, block: int) -> float:
    freedom = max(count // block - 1, min(_T_OVER_Z))
    factor = min(factor for limit, factor in _T_OVER_Z.items() if limit <= freedom)
    # The bootstrap's variance is that of n, not n - 1; that of blocks lacks a block's share.
    return factor * math.sqrt(count / (count - block))
