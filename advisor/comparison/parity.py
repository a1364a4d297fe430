"""Whether two runs learn alike: losses and gradient norms of the same steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import MAX_POINTS
from paro_advise.advisor.comparison.model import Parity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis


def parity_of(before: Analysis, after: Analysis) -> Parity | None:
    """Return by how much losses and gradient norms of the same steps differ, None where a run was not captured."""
    if before.captured is None or after.captured is None:
        return None
    first = {step.step: step for step in before.captured.steps}
    second = {step.step: step for step in after.captured.steps}
    common = sorted(set(first) & set(second))
    losses = [
        (step, a, b) for step in common if (a := first[step].loss) is not None and (b := second[step].loss) is not None
    ]
    norms = [
        (a, b)
        for step in common
        if (a := first[step].gradient_norm) is not None and (b := second[step].gradient_norm) is not None
    ]
    every = max(1, -(-len(losses) // MAX_POINTS))
    return Parity(
        num_steps=len(losses),
        num_diverged_before=sum(first[step].diverged for step in common),
        num_diverged_after=sum(second[step].diverged for step in common),
        loss_max_pct=_worst([(a, b) for _, a, b in losses]),
        gradient_norm_max_pct=_worst(norms),
        steps=tuple(step for step, _, _ in losses[::every]),
        loss_before=tuple(a for _, a, _ in losses[::every]),
        loss_after=tuple(b for _, _, b in losses[::every]),
    )


def _worst(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the largest relative difference in percent."""
    return 100 * max(abs(other - one) / max(abs(one), 1e-30) for one, other in pairs) if pairs else None
