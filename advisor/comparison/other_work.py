"""Runs that the user allows to do other amounts of work in a step: what counts is what they do in a second (pure)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import RANGE_TEXT
from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.wording.quantities import signed_text, time_text

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.comparison.model import Metric

_TOKENS = re.compile(r"^(\d{1,9})x(\d{1,9}) torch\.int(?:32|64)$")
_HEADS = {ChangeVerdict.BETTER: "Faster", ChangeVerdict.WORSE: "Slower", ChangeVerdict.SAME: "The same"}


def tokens_of_step(analysis: Analysis) -> float | None:
    """Return tokens of all ranks in a step, if the first input is a batch of token ids."""
    captured = analysis.captured
    if captured is None or not captured.inputs or not captured.steps:
        return None
    shape = _TOKENS.match(captured.inputs[0])
    micro = captured.steps[-1].micro_batches
    return float(int(shape[1]) * int(shape[2]) * micro * captured.world_size) if shape and micro else None


def other_work_text(before: Analysis, after: Analysis, step: Metric, throughput: Metric) -> str:
    """Return what the runs do in a second where their steps hold other numbers of tokens; "" elsewhere.

    Args:
        before, after: the runs.
        step: change of the usual step (us).
        throughput: change of the tokens a second.
    """
    tokens = tokens_of_step(before), tokens_of_step(after)
    if not tokens[0] or not tokens[1] or tokens[0] == tokens[1] or throughput.change_pct is None:
        return ""
    pct = f"{signed_text(throughput.change_pct)} %"
    if throughput.low_pct is not None and throughput.high_pct is not None:
        pct += f", {RANGE_TEXT} {signed_text(throughput.low_pct)} to {signed_text(throughput.high_pct)} %"
    times = [time_text(value or 0) for value in (step.before, step.after)]
    return (
        f"{_HEADS.get(throughput.verdict, 'Cannot tell')}: throughput {throughput.before or 0:,.0f} -> "
        f"{throughput.after or 0:,.0f} tokens/s ({pct}). A step takes {times[0]} for {tokens[0]:,.0f} tokens before, "
        f"{times[1]} for {tokens[1]:,.0f} after."
    )
