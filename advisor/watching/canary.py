"""Whether a running job became faster by a switch, from the times of its steps before and after (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.bootstrap import change_between, typical
from paro_advise.advisor.wording.quantities import signed_text, time_text

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOutcome:
    """What became of a switch.

    Attributes:
        is_faster: steps are shorter for sure: the whole 98 % range of the change lies below zero.
        text: the same in a sentence.
    """

    is_faster: bool
    text: str


def judge(before: Sequence[float], after: Sequence[float], switch_s: float) -> SwitchOutcome:
    """Judge a switch.

    Args:
        before, after: times of steps (us), at least four on each side.
        switch_s: that the switch itself took.
    """
    change = change_between(before, after)
    if change is None:
        return SwitchOutcome(is_faster=False, text="the times of steps cannot be compared")
    first, second = typical(before), typical(after)
    percent = [signed_text(100 * value) for value in (change.value, change.low, change.high)]
    times = f"{time_text(first)} -> {time_text(second)}, {percent[0]} % ({percent[1]} to {percent[2]})"
    if change.high >= 0:
        how = "longer" if change.low > 0 else "not shorter for sure"
        return SwitchOutcome(is_faster=False, text=f"steps are {how}: {times}")
    made_up = f"{switch_s * 1e6 / (first - second):.0f} steps make up for the {switch_s:.2f} s of the switch"
    return SwitchOutcome(is_faster=True, text=f"steps are shorter: {times}; {made_up}")
