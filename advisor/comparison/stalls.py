"""Runs some of whose steps stall: what they do in a second differs from what their usual steps would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.analysis.constants import STALL_RATIO, STALLED_SHARE
from paro_advise.advisor.comparison.bootstrap import typical
from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.wording.quantities import signed_text, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import StepTime
    from paro_advise.advisor.comparison.model import Metric


def have_stalls(times: Sequence[StepTime]) -> bool:
    """Tell whether a few long steps take much of the time of a run, whose mean step is then the one that costs."""
    return any(
        float(np.mean(each.values)) > (1 + STALLED_SHARE) * typical(each.values) for each in times if each.values
    )


def overall_verdict(step: Metric, throughput: Metric, times: Sequence[StepTime]) -> ChangeVerdict:
    """Return the verdict on the run: its usual step's, and where steps stall, what they make of it.

    Args:
        step: change of the usual step.
        throughput: change of what the run does in all its time.
        times: of the steps before and after.
    """
    if not have_stalls(times):
        return step.verdict
    wanted = {ChangeVerdict.BETTER: 1.0, ChangeVerdict.WORSE: -1.0}.get(step.verdict)
    agrees = wanted is not None and wanted * (throughput.change_pct or 0.0) > 0
    return step.verdict if agrees else throughput.verdict


def stalls_text(throughput: Metric, times: Sequence[StepTime]) -> str:
    """Say what stalls make of the throughput, "" where no run has many."""
    if not have_stalls(times) or throughput.change_pct is None:
        return ""
    parts = [
        f"{_long_steps(each)} of {len(each.values)} steps {when} stalled and make the mean {time_text(mean)}, not "
        f"{time_text(typical(each.values))}"
        for each, when in zip(times, ("before", "after"), strict=True)
        if each.values and (mean := float(np.mean(each.values))) and have_stalls([each])
    ]
    return f" But {'; '.join(parts)}: over all steps the throughput changed by {signed_text(throughput.change_pct)} %."


def _long_steps(times: StepTime) -> int:
    usual = typical(times.values)
    return sum(value > STALL_RATIO * usual for value in times.values)
