"""Draws of what is uncertain, spread evenly over their distributions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.constants import REPLAY_SIGMA

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paro_advise.policies.plan import EstimateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its uncertainty.

    Attributes:
        value: the median.
        sigma: standard deviation of its logarithm.
        sigma_above: the same above the median, where the range is skewed; None for ``sigma``.
        source: where it is from.
    """

    value: float
    sigma: float
    source: EstimateSource
    sigma_above: float | None = None


class Sampler:
    """Draws whose quantiles are those of their distribution, in random order.

    Each quantity takes the middle of every one of ``number`` equally likely ranges once (Latin hypercube sampling,
    McKay, Beckman and Conover 1979): medians then depend on the seed by less than those of independent draws.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def normal(self, number: int) -> NDArray[np.float64]:
        """Return deviations of a standard normal distribution."""
        return self._generator.permutation(_normal_quantiles(number))

    def factors(self, sigma: float, number: int) -> NDArray[np.float64]:
        """Return factors around 1 whose logarithms have a standard deviation."""
        return np.exp(sigma * self.normal(number))

    def uniform(self, low: float, high: float, number: int) -> NDArray[np.float64]:
        """Return numbers between two bounds."""
        return low + (high - low) * self._generator.permutation((np.arange(number) + 0.5) / number)

    def pick(self, weights: NDArray[np.float64], number: int) -> NDArray[np.intp]:
        """Return the indexes, in order, of so many of the items, each as often as its weight tells, to within one."""
        sums = np.cumsum(weights)
        steps = (self._generator.random() + np.arange(number)) / number
        return np.minimum(np.searchsorted(sums / sums[-1], steps), len(weights) - 1)

    def pick_likely(self, errors: NDArray[np.float64], number: int) -> NDArray[np.intp]:
        """Return the indexes of draws, taken by how well each replays the measured step (importance resampling).

        Args:
            errors: by draw, logarithm of the replayed step to the measured one. Where all miss it, those that miss it
                least count.
            number: of the indexes.
        """
        beyond = np.abs(errors) - np.min(np.abs(errors))
        return self.pick(np.exp(-0.5 * (beyond / REPLAY_SIGMA) ** 2), number)


def with_waits(
    times_us: NDArray[np.float64], now_us: float, waits_us: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """Return draws of a step that keep what may be waiting for others: of what they gain, at most so much is none.

    Args:
        times_us: draws of a step that takes all transfers for transfers.
        now_us: the run's own step.
        waits_us: by draw, what of its transfers is waiting.
    """
    found: NDArray[np.float64] = times_us + np.minimum(waits_us, np.maximum(now_us - times_us, 0.0))
    return found


@lru_cache(maxsize=8)
def _normal_quantiles(number: int) -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((place + 0.5) / number) for place in range(number)])
