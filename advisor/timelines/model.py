"""What a timeline consists of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineBox:
    """Something that takes time in a step; times (us) from the start of the rank's step."""

    lane: str  # "compute" or a state
    start_us: float
    end_us: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Attributes:
        shift_us: how much later than the first of the ranks shown it begins, 0 where clocks could not be compared.
        num_left_out: collectives that have no box, the shortest.
    """

    rank: int
    step: str
    shift_us: float
    wall_us: float
    boxes: tuple[TimelineBox, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Steps of some ranks.

    Attributes:
        steps: labels, in order of time.
        ranks: shown, rising.
        shown: every rank and step there is, by step, then rank.
        step: label of the one to look at first.
        first: rank to look at first; where ranks wait, the one that waits longest.
        beside: the rank that it waits for most, None where no rank stands out.
        num_ranks: ranks of the run that have a trace.
        is_aligned: whether the ranks stand on one clock.
    """

    steps: tuple[str, ...]
    ranks: tuple[int, ...]
    shown: tuple[RankStep, ...]
    step: str
    first: int
    beside: int | None
    num_ranks: int
    is_aligned: bool

    def of(self, rank: int, step: str) -> RankStep | None:
        """Return a rank's step, None where its trace has none of that name."""
        return next((item for item in self.shown if item.rank == rank and item.step == step), None)
