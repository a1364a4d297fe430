"""Steps that took far longer than the others, as where a checkpoint is saved or data are late."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paro_advise.advisor.ranks.constants import (
    STALL_HELD_SHARE,
    STALL_RATIO,
    STALLED_STEPS,
    STALLED_STEPS_COMPUTING_ALIKE,
    USUAL_SPREAD,
)
from paro_advise.advisor.ranks.usual_steps import without_labels
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.facts.model import StepFacts
    from paro_advise.advisor.ranks.source import Source

STALLED_CODE = "Q310"


class Stalls(NamedTuple):
    """Steps that stalled and are left out.

    Attributes:
        num, num_steps: of how many.
        longest_us: of their times, beyond the median; mean over ranks.
        while_what: what held them, in words.
    """

    num: int
    num_steps: int
    longest_us: float
    while_what: str

    @property
    def text(self) -> str:
        """Return them as a clause."""
        are, most = ("are", " at the most") if self.num > 1 else ("is", "")
        return (
            f"{self.num} of {self.num_steps} steps stalled for {time_text(self.longest_us)}{most} while "
            f"{self.while_what}, and {are} left out: all figures are of the others"
        )


def stalls(walls: Sequence[float], computing: Sequence[float] = ()) -> dict[int, float]:
    """Return which steps stalled, by place, and what they took beyond the median (us).

    A step that has more to compute, as with longer sequences, takes longer and does not stall.

    Args:
        walls: step times, us.
        computing: what devices computed in each, us; () where that is not known.
    """
    if not walls:
        return {}
    median = float(np.median(walls))
    usual = sorted(computing)[len(computing) // 2] if computing else 0.0
    more = [max(0.0, value - usual) for value in computing] or [0.0] * len(walls)
    beyond = {place: wall - extra - median for place, (wall, extra) in enumerate(zip(walls, more, strict=True))}
    beyond = {place: value for place, value in beyond.items() if value > (STALL_RATIO - 1) * median}
    # One of three is told by two that agree.
    do_agree = min(walls) > (1 - USUAL_SPREAD) * median
    is_one_of_three = len(beyond) == 1 and len(walls) == 3 and do_agree
    most = STALLED_STEPS_COMPUTING_ALIKE if computing else STALLED_STEPS
    if len(beyond) > most * len(walls) and not is_one_of_three:
        return {}  # steps of unlike length, none of which is the usual one
    return beyond


def without_stalled_steps(timed: Sequence[tuple[int, Source]]) -> tuple[list[tuple[int, Source]], Stalls | None]:
    """Leave out steps that stalled: means would be mostly of the stalls.

    Those stay in which every rank with a trace communicates for most of the stall: a link that others use is slow then,
    or a rank without a trace is late.

    Args:
        timed: (rank, source) as in Run.
    """
    of_step: dict[str, dict[int, StepFacts]] = defaultdict(dict)
    for rank, item in timed:
        for step in item.steps:
            of_step[step.label][rank] = step
    labels = list(of_step)
    walls, computing = (_means(of_step, name) for name in ("wall_us", "compute_us"))
    usual = {
        rank: float(np.median([step.exposed_communication_us for step in item.steps]))
        for rank, item in timed
        if item.steps
    }
    beyond, held_by = dict[str, float](), set[int]()
    for place, us in stalls(walls, computing).items():
        ranks = {
            rank
            for rank, step in of_step[labels[place]].items()
            if step.exposed_communication_us - usual[rank] < STALL_HELD_SHARE * us
        }
        if ranks:
            beyond[labels[place]] = us
            held_by |= ranks
    if not beyond:
        return list(timed), None
    stalled = [step for label in beyond for step in of_step[label].values()]
    most_us = STALL_HELD_SHARE * sum(us * len(of_step[label]) for label, us in beyond.items())
    found = Stalls(
        num=len(beyond),
        num_steps=len(labels),
        longest_us=max(beyond.values()),
        while_what=_while_what(stalled, most_us) if len(held_by) == len(timed) else _who(sorted(held_by)),
    )
    return [(rank, without_labels(item, beyond)) for rank, item in timed], found


def stall_notices(found: Stalls | None) -> tuple[Notice, ...]:
    """Say what is left out."""
    if found is None:
        return ()
    text = "a warm-up, or a checkpoint that is saved; where it comes back in each run, it costs as much as it takes"
    return (Notice(code=STALLED_CODE, severity=Severity.WARNING, message=found.text, help=f"such as {text}"),)


def _means(of_step: Mapping[str, Mapping[int, StepFacts]], name: str) -> list[float]:
    return [float(np.mean([getattr(step, name) for step in of_ranks.values()])) for of_ranks in of_step.values()]


def _who(held_by: Sequence[int]) -> str:
    """Return that some ranks held the others up, in words."""
    return f"{'ranks' if len(held_by) > 1 else 'rank'} {number_ranges(held_by)} did not communicate, but others did"


def _while_what(stalled: Sequence[StepFacts], most_us: float) -> str:
    """Return what took more of stalls than a time (us), in words."""
    if sum(step.idle_loading_us for step in stalled) > most_us:
        return "the DataLoader held the training thread"
    if sum(step.other_us for step in stalled) > most_us:
        return "devices only copied memory"
    return "devices idled" if sum(step.idle_us for step in stalled) > most_us else "devices did not communicate"
