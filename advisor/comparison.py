"""Two runs side by side as values; the JSON format ``paro-advise/comparison`` is exactly these."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

# The format is decoded by these types, so they are needed at run time.
from paro_advise.advisor.analysis import Breakdown, Run, StateEntry, StepTime  # noqa: TC002
from paro_advise.errors import ForeignDataError, InputError
from paro_advise.policies.plan import Plan  # noqa: TC002

FORMAT = "paro-advise/comparison"
FORMAT_VERSION = "1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        step_time_us: of steps without the profiler where both captures logged them, and of those that both
            runs have where that is most of them.
        steps_source: "unprofiled" or "profiled".
        num_steps: that step_time_us rests on.
        peak_memory_bytes: None without a capture.
    """

    run: Run
    step_time_us: StepTime
    steps_source: str
    num_steps: int
    breakdown_us: Breakdown
    states: dict[str, StateEntry]
    peak_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A quantity before and after.

    Attributes:
        change_pct, low_pct, high_pct: relative change and its 98 % range; None where it cannot be told.
        verdict: "better", "worse", "same" or "unclear"; "" for what is neither good nor bad.
        samples: what the range rests on: "steps", "ranks" or "" for a single number.
    """

    name: str
    unit: str
    before: float | None
    after: float | None
    change_pct: float | None
    low_pct: float | None
    high_pct: float | None
    verdict: str
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
    """Whether both runs train alike, over the steps that both logged.

    Attributes:
        num_steps: with a loss of both.
        num_diverged_before, num_diverged_after: steps that both logged whose loss is no number.
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
    """An acceptance criterion; ``passed`` is None where it was not judged, and ``text`` says why."""

    criterion: str
    threshold: float | None
    measured: float | None
    passed: bool | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The whole comparison.

    Attributes:
        verdict: "better", "same", "worse" or "unclear".
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
    verdict: str
    text: str
    unlike: tuple[str, ...]
    plan: Plan | None

    @property
    def step(self) -> Metric:
        """Return the step time."""
        return next(metric for metric in self.metrics if metric.name == "step_time")


def read_comparison(path: str) -> Comparison:
    """Read a comparison from a JSON file or a report.

    Raises:
        InputError: it cannot be read, or holds none.
    """
    from paro_advise.advisor.page import embedded_data

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    return comparison_from_json(embedded_data(data, path) if data.lstrip()[:1] == b"<" else data, path)


def comparison_from_json(data: bytes, where: str) -> Comparison:
    """Read a comparison back.

    Raises:
        ForeignDataError: it is none, or of another major version.
    """
    import msgspec

    try:
        found = msgspec.json.decode(data, type=Comparison)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the file must be a {FORMAT} JSON, it is not: {error}", where=where) from error
    if found.format != FORMAT or found.format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise ForeignDataError(
            f"the file must be {FORMAT} {FORMAT_VERSION.split('.')[0]}.x, got {found.format} {found.format_version}",
            where=where,
        )
    return found
