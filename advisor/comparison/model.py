"""Two runs side by side as values; the JSON format ``paro-advise/comparison`` is exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.advisor.analysis.model import Breakdown, QualityEntry, RunEntry, StateEntry, StepTime  # noqa: TC001

# The format is decoded by these types, so they are needed at run time.
from paro_advise.advisor.comparison.constants import THROUGHPUT
from paro_advise.core.documents import Format, document_bytes, from_json
from paro_advise.policies.plan import Plan  # noqa: TC001

FORMAT = Format(name="paro-advise/comparison", version="1.1")


class ChangeVerdict(StrEnum):
    """What became of a quantity."""

    BETTER = "better"
    SAME = "same"
    WORSE = "worse"
    UNCLEAR = "unclear"
    NEUTRAL = ""  # neither is good nor bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        step_time_us: of steps without the profiler where both captures logged them, and of those that both
            runs have where that is most of them.
        steps_source: "unprofiled" or "profiled".
        num_steps: that step_time_us is based on.
        peak_memory_bytes: None without a capture.
        warnings: what was lost, left out or guessed of the run, as its analysis says it.
    """

    run: RunEntry
    step_time_us: StepTime
    steps_source: str
    num_steps: int
    breakdown_us: Breakdown
    states: dict[str, StateEntry]
    peak_memory_bytes: int | None
    warnings: tuple[QualityEntry, ...] = ()  # since 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A quantity before and after.

    Attributes:
        change_pct, low_pct, high_pct: relative change and its 98 % range; None where it cannot be told.
        verdict: for the user; NEUTRAL for what is neither good nor bad.
        samples: what the range is based on: "steps", "ranks" or "" for a single number.
    """

    name: str
    unit: str
    before: float | None
    after: float | None
    change_pct: float | None
    low_pct: float | None
    high_pct: float | None
    verdict: ChangeVerdict
    samples: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """The collectives of a state and operation before and after, per rank and step; None for absent."""

    state: str
    op: str
    count_before: float | None
    count_after: float | None
    p50_us_before: float | None
    p50_us_after: float | None
    p95_us_before: float | None
    p95_us_after: float | None
    p99_us_before: float | None
    p99_us_after: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A prediction of the plan beside what was measured."""

    name: str
    predicted: float
    low: float
    high: float
    measured: float
    inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Whether both runs train the same, over the steps that both logged.

    Attributes:
        num_steps: with a loss of both.
        num_diverged_before, num_diverged_after: steps that both logged whose loss is NaN or infinite.
        loss_max_pct, gradient_norm_max_pct: the largest relative difference of a step.
        steps, loss_before, loss_after: the series, at most 400 points.
    """

    num_steps: int
    num_diverged_before: int
    num_diverged_after: int
    loss_max_pct: float | None
    gradient_norm_max_pct: float | None
    steps: tuple[int, ...]
    loss_before: tuple[float, ...]
    loss_after: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """An acceptance criterion; ``passed`` is None where it could not be evaluated, and ``text`` says why."""

    criterion: str
    threshold: float | None
    measured: float | None
    passed: bool | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole comparison.

    Attributes:
        verdict: on the step time.
        text: the verdict in a sentence.
        unlike: facts in which the runs differ although they should not, as the user allowed.
        plan: that led from one to the other.
    """

    format: str
    format_version: str
    before: Side
    after: Side
    metrics: tuple[Metric, ...]
    collectives: tuple[CollectiveChange, ...]
    parity: Parity | None
    predicted_vs_measured: tuple[Predicted, ...]
    acceptance: tuple[Criterion, ...]
    verdict: ChangeVerdict
    text: str
    unlike: tuple[str, ...]
    plan: Plan | None

    @property
    def sides(self) -> tuple[tuple[str, Side], tuple[str, Side]]:
        """Return both runs with what they are called."""
        return ("before", self.before), ("after", self.after)

    @property
    def step(self) -> Metric:
        """Return the step time."""
        return next(metric for metric in self.metrics if metric.name == "step_time")

    @property
    def asked_criteria(self) -> tuple[Criterion, ...]:
        """Return the criteria that have a limit or a value; nobody asked for the others."""
        return tuple(item for item in self.acceptance if item.threshold is not None or item.measured is not None)

    @property
    def unlike_text(self) -> str:
        """Return in what the runs differ, as one list."""
        return "; ".join(self.unlike)

    @property
    def is_too_slow(self) -> bool:
        """Tell whether the step became longer than is tolerated: at all, or by more than a limit below 0 allows."""
        limits = [item for item in self.acceptance if item.criterion == THROUGHPUT and (item.threshold or 0.0) < 0]
        return self.verdict == ChangeVerdict.WORSE and not any(item.passed is not False for item in limits)

    @property
    def passed(self) -> bool:
        """Tell whether the run became no slower than is tolerated and failed no criterion."""
        return not self.is_too_slow and all(item.passed is not False for item in self.acceptance)


def read_comparison(path: str) -> Comparison:
    """Read a comparison from a JSON file or a report.

    Raises:
        InputError: it cannot be read, or holds none.
    """
    return comparison_from_json(document_bytes(path), path)


def comparison_from_json(data: bytes, where: str) -> Comparison:
    """Read a comparison back.

    Raises:
        ForeignDataError: not a comparison, or of another major version.
    """
    return from_json(data, FORMAT, Comparison, where)
