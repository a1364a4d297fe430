"""Reads some ranks of many: enough to state the exposed communication of all of them with a range.

The ranks are read in an order that spreads over the job first (one of each block of neighbours, which share nodes,
the blocks shuffled) and is the same for the same files. After each round the mean share of a step that communication is
exposed, over the ranks read, has a 95 % range by Student's t with the correction for a finite number of ranks (Cochran,
Sampling Techniques, 1977, section 2). Reading ends where half of the range is at most what was asked. `make
bench-sampling` prints how often such ranges hold the mean of all ranks.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, TypeVar

from paro_advise.advisor.facts.constants import (
    SAMPLE_BLOCKS,
    SAMPLE_FIRST,
    SAMPLE_GROWTH,
    SAMPLE_HALF_RANGE,
    STUDENT_T,
)
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.facts.model import RankFacts
    from paro_advise.advisor.facts.reading.all_inputs import ReadInputs
    from paro_advise.trace_parsers.bytes.blocks import SourceRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSample:
    """What a sample says of all ranks.

    Attributes:
        num_read, num_all: traces.
        exposed_share: mean share of a step in which communication is exposed.
        half_range: of its 95 % range; 0 where all were read, infinite where it cannot be told.
    """

    num_read: int
    num_all: int
    exposed_share: float
    half_range: float


_Item = TypeVar("_Item")


def sampling_order(items: Sequence[_Item], key: Callable[[_Item], str]) -> list[_Item]:
    """Return items in the order of reading: one of each block of neighbours, then a second one of each, and so on.

    Args:
        items: in the order of their ranks.
        key: tells them apart; decides the order within and among blocks.
    """

    def shuffled(item: _Item) -> bytes:
        return hashlib.sha256(key(item).encode()).digest()

    size = max(1, math.ceil(len(items) / SAMPLE_BLOCKS))
    blocks = [sorted(items[begin : begin + size], key=shuffled) for begin in range(0, len(items), size)]
    blocks.sort(key=lambda block: shuffled(block[0]))
    return [block[turn] for turn in range(size) for block in blocks if turn < len(block)]


def read_sample(
    refs: Sequence[SourceRef], read: Callable[[Sequence[SourceRef]], ReadInputs], skip_steps: int = 0
) -> tuple[list[ReadInputs], RankSample]:
    """Read traces until the sample tells enough.

    Args:
        refs: of one run, in the order of its ranks.
        read: reads some of them.
        skip_steps: warm-up steps to leave out.

    Returns:
        What was read, round by round, and what it says of all.
    """
    order = sampling_order(refs, lambda ref: ref.label)
    done: list[ReadInputs] = []
    taken = 0
    wanted = min(len(order), SAMPLE_FIRST)
    while True:
        done.append(read(order[taken:wanted]))
        taken = wanted
        sample = judge_sample([facts for part in done for facts in part.facts], len(order), taken, skip_steps)
        if taken == len(order) or sample.half_range <= SAMPLE_HALF_RANGE:
            return done, sample
        wanted = min(len(order), max(taken + 1, math.ceil(SAMPLE_GROWTH * taken)))


def judge_sample(facts: Sequence[RankFacts], num_all: int, num_read: int, skip_steps: int = 0) -> RankSample:
    """Return the exposed communication of all ranks with its range, from those that the analysis counts.

    Traces that end early count only where there are no others, as in the analysis.
    """
    whole = [item for item in facts if not item.is_cut]
    shares = []
    for item in whole or facts:
        steps = item.steps[min(skip_steps, max(0, len(item.steps) - 1)) :]
        wall = sum(step.wall_us for step in steps)
        if wall > 0:
            shares.append(sum(step.exposed_communication_us for step in steps) / wall)
    if not shares:
        return RankSample(num_read=num_read, num_all=num_all, exposed_share=0.0, half_range=math.inf)
    half = 0.0 if num_read >= num_all else half_range(shares, num_all)
    return RankSample(num_read=num_read, num_all=num_all, exposed_share=fmean(shares), half_range=half)


def half_range(values: Sequence[float], num_all: int) -> float:
    """Return half of the 95 % range of the mean of all, of which some values are known; infinite with less than two."""
    if len(values) < 2:
        return math.inf
    finite = math.sqrt(max(0.0, (num_all - len(values)) / max(1, num_all - 1)))
    return _student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)) * finite


def _student_t(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t; between listed degrees that of the lower one, which is the larger."""
    return next(value for least, value in reversed(STUDENT_T) if degrees >= least)


def sample_notice(sample: RankSample) -> Notice:
    """Say how many ranks were read, and what that leaves open."""
    return Notice(
        code="Q323",
        severity=Severity.WARNING,
        message=f"{sample.num_read:,} of {sample.num_all:,} traces were read; exposed communication is "
        f"{100 * sample.exposed_share:.1f} % ± {100 * sample.half_range:.1f} of a step over all ranks (95 % range)",
        help="a slow rank may be among those not read; without --sample all are",
    )
