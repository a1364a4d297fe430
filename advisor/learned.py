"""What earlier comparisons teach about predictions for this cluster (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.comparison import Comparison

_MOST = math.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """How far predicted speed-ups were off.

    Attributes:
        bias: mean logarithm of measured over predicted, drawn towards 0 by one comparison's weight.
        spread: standard deviation around it.
        count: comparisons.
    """

    bias: float = 0.0
    spread: float = 0.0
    count: int = 0

    @property
    def text(self) -> str:
        """Say it to people."""
        off = 100 * math.expm1(self.bias)
        return f"{self.count} earlier comparison{'s' * (self.count != 1)}: speed-ups are corrected by {off:+.1f} %"


def learned_from(comparisons: Sequence[Comparison]) -> Learned:
    """Learn from comparisons that held a plan against a measurement; those of more than 2x off count as 2x."""
    errors = [
        max(-_MOST, min(_MOST, math.log(item.measured / item.predicted)))
        for comparison in comparisons
        for item in comparison.predicted_vs_measured
        if item.name == "speedup" and item.measured > 0 and item.predicted > 0
    ]
    if not errors:
        return Learned()
    return Learned(bias=math.fsum(errors) / (len(errors) + 1), spread=_spread(errors), count=len(errors))


def _spread(errors: Sequence[float]) -> float:
    """Return the standard deviation; of one error its own size."""
    return pstdev(errors) if len(errors) > 1 else abs(fmean(errors))
