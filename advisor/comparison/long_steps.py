"""Runs with some long steps: what they do in a second differs from what their usual steps would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.analysis.constants import STALLED_SHARE
from paro_advise.advisor.comparison.bootstrap import typical
from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.ranks.constants import STALL_RATIO
from paro_advise.advisor.wording.quantities import signed_text, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import StepTime
    from paro_advise.advisor.comparison.model import Metric


def have_long_steps(times: Sequence[StepTime]) -> bool:
    """Tell whether a few long steps take much of the time of a run, whose mean step is then the one that costs."""
    return any(
        float(np.mean(each.values)) > (1 + STALLED_SHARE) * typical(each.values) for each in times if each.values
    )


def overall_verdict(step: Metric, throughput: Metric, times: Sequence[StepTime]) -> ChangeVerdict:
    """Return the verdict on the run: its usual step's, and with many long steps, what they make of it.

    Args:
        step: change of the usual step.
        throughput: change of what the run does in all its time.
        times: of the steps before and after.
    """
    if not have_long_steps(times):
        return step.verdict
    wanted = {ChangeVerdict.BETTER: 1.0, ChangeVerdict.WORSE: -1.0}.get(step.verdict)
    agrees = wanted is not None and wanted * (throughput.change_pct or 0.0) > 0
    return step.verdict if agrees else throughput.verdict


def long_steps_text(throughput: Metric, times: Sequence[StepTime]) -> str:
    """Say what long steps make of the throughput, "" where no run has many."""
    if not have_long_steps(times) or throughput.change_pct is None:
        return ""
    parts = [
        f"{_count_long(each)} of {len(each.values)} steps {when} took over {STALL_RATIO:g} times the usual and make "
        f"the mean {time_text(mean)}, not {time_text(typical(each.values))}"
        for each, when in zip(times, ("before", "after"), strict=True)
        if each.values and (mean := float(np.mean(each.values))) and have_long_steps([each])
    ]
    return f" But {'; '.join(parts)}: over all steps the throughput changed by {signed_text(throughput.change_pct)} %."


def _count_long(times: StepTime) -> int:
    usual = typical(times.values)
    return sum(value > STALL_RATIO * usual for value in times.values)
