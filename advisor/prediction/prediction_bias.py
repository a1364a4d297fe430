"""The bias of predictions for this cluster, as earlier comparisons show it (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import signed_text
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# A comparison that is off by more than 2x counts as 2x: one failed run must not spoil all predictions.
_MOST = math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBias:
    """How far predicted speed-ups were off in earlier comparisons.

    Attributes:
        mean: mean logarithm of measured over predicted, drawn towards 0 by one comparison's weight.
        spread: standard deviation around it.
        count: comparisons.
    """

    mean: float = 0.0
    spread: float = 0.0
    count: int = 0

    @property
    def text(self) -> str:
        """Say it to people."""
        off = signed_text(100 * math.expm1(self.mean))
        return f"{plural(self.count, 'earlier comparison')}: speed-ups are corrected by {off} %"


NO_BIAS = PredictionBias()


def fit_bias(speedups: Iterable[tuple[float, float]]) -> PredictionBias:
    """Learn from speed-ups as (predicted, measured); those of more than 2x off count as 2x."""
    errors = [
        max(-_MOST, min(_MOST, math.log(measured / predicted)))
        for predicted, measured in speedups
        if measured > 0 and predicted > 0
    ]
    if not errors:
        return NO_BIAS
    return PredictionBias(mean=math.fsum(errors) / (len(errors) + 1), spread=_deviation(errors), count=len(errors))


def _deviation(errors: Sequence[float]) -> float:
    """Return the standard deviation; of one error its own size."""
    return pstdev(errors) if len(errors) > 1 else abs(fmean(errors))
