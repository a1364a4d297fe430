"""Steps that took far longer than the others, as where a checkpoint is saved or data are late."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paro_advise.advisor.ranks.constants import (
    SENDS_MORE_RATIO,
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


class Stall(NamedTuple):
    """A step that stalled and is left out.

    Attributes:
        num_steps: with it.
        wall_us: its time; mean over ranks.
        beyond_us: of that, what it took beyond the median.
        while_what: what held it, in words.
    """

    num_steps: int
    wall_us: float
    beyond_us: float
    while_what: str

    @property
    def text(self) -> str:
        """Return it as a clause."""
        return (
            f"1 of {self.num_steps} steps stalled for {time_text(self.beyond_us)} while {self.while_what}, and is left "
            "out: all figures are of the others"
        )


def stalls(walls: Sequence[float], computing: Sequence[float] = ()) -> dict[int, float]:
    """Return which steps stalled, by place, and what they took beyond the median (us).

    A step that has more to compute, as with longer sequences, takes longer and does not stall.

    Args:
        walls: step times, us.
        computing: see ``busy_times``; () where that is not known.
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


def without_stalled_step(timed: Sequence[tuple[int, Source]]) -> tuple[list[tuple[int, Source]], Stall | None]:
    """Leave out the one step that stalled: means would be mostly of the stall.

    Several may come back as long as the run lasts, and stay; so does one in which every rank with a trace communicates
    for most of the stall: a link that others use is slow then, or a rank without a trace is late. Where many steps as
    marked hold no update, the one that does is no stall.

    Args:
        timed: (rank, source) as in Run.
    """
    of_step: dict[str, dict[int, StepFacts]] = defaultdict(dict)
    for rank, item in timed:
        for step in item.steps:
            of_step[step.label][rank] = step
    labels, busy_us = list(of_step), busy_times(timed)
    walls = [float(np.mean([step.wall_us for step in of_ranks.values()])) for of_ranks in of_step.values()]
    found = stalls(walls, [busy_us[label] for label in labels])
    if len(found) != 1 or any(item.facts.num_updates == 0 for _, item in timed):
        return list(timed), None
    ((place, beyond_us),) = found.items()
    steps = of_step[labels[place]]
    others = {rank: [step for step in item.steps if step.label != labels[place]] for rank, item in timed}
    most_us = STALL_HELD_SHARE * beyond_us
    held_by = [
        rank for rank, step in steps.items() if _beyond(step, others[rank], "exposed_communication_us") < most_us
    ]
    if not held_by or not all(others.values()):
        return list(timed), None
    stall = Stall(
        num_steps=len(labels),
        wall_us=walls[place],
        beyond_us=beyond_us,
        while_what=_while_what(steps, others, most_us) if len(held_by) == len(steps) else _who(sorted(held_by)),
    )
    return [(rank, without_labels(item, {labels[place]})) for rank, item in timed], stall


def stall_notices(found: Stall | None) -> tuple[Notice, ...]:
    """Say what is left out."""
    if found is None:
        return ()
    text = "a warm-up, or a checkpoint that is saved; where it comes back in each run, it costs as much as it takes"
    return (Notice(code=STALLED_CODE, severity=Severity.WARNING, message=found.text, help=f"such as {text}"),)


def busy_times(timed: Sequence[tuple[int, Source]]) -> dict[str, float]:
    """Return what ranks compute in each step (us, mean), with what one that sends more exposes beyond the others.

    Parameters that are averaged every few steps (local SGD) make a step longer, which stalls for nothing. Of ranks that
    wait meanwhile the one that exposes least waits for nobody.
    """
    computed: dict[str, list[float]] = defaultdict(list)
    further: dict[str, list[float]] = defaultdict(list)
    for _, item in timed:
        exposed_us = [step.exposed_communication_us for step in item.steps]
        usual_us = float(np.median(exposed_us)) if exposed_us else 0.0
        for step, sends_more in zip(item.steps, _send_more(item), strict=True):
            computed[step.label].append(step.compute_us)
            further[step.label].append(max(0.0, step.exposed_communication_us - usual_us) if sends_more else 0.0)
    return {label: float(np.mean(times)) + min(further[label]) for label, times in computed.items()}


def _send_more(item: Source) -> list[bool]:
    """Tell which steps of a rank send far more bytes than half of them do."""
    if not item.steps:
        return []
    step_of = item.collectives["step"].to_numpy()
    num_bytes = item.collectives["bytes"].fill_null(0).to_numpy()
    is_of_step = (step_of >= 0) & (step_of < len(item.steps))
    sizes = np.bincount(step_of[is_of_step], weights=num_bytes[is_of_step], minlength=len(item.steps))
    most = SENDS_MORE_RATIO * float(np.median(sizes))
    return [size > most for size in sizes.tolist()]


def _beyond(step: StepFacts, others: Sequence[StepFacts], name: str) -> float:
    """Return what a part of a step takes beyond the rank's other ones (us)."""
    usual = float(np.median([getattr(other, name) for other in others])) if others else 0.0
    return float(getattr(step, name)) - usual


def _who(held_by: Sequence[int]) -> str:
    """Return that some ranks held the others up, in words."""
    return f"{'ranks' if len(held_by) > 1 else 'rank'} {number_ranges(held_by)} did not communicate, but others did"


def _while_what(steps: Mapping[int, StepFacts], others: Mapping[int, Sequence[StepFacts]], most_us: float) -> str:
    """Return which part of a step took more than so long (us) beyond its usual time, in words."""
    for name, what in (
        ("idle_loading_us", "the DataLoader held the training thread"),
        ("other_us", "devices only copied memory"),
        ("idle_us", "devices idled"),
    ):
        if float(np.mean([_beyond(step, others[rank], name) for rank, step in steps.items()])) > most_us:
            return what
    return "devices did not communicate"
