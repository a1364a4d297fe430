"""The plan: what to change, what it should bring and cost, and what it rests on.

The JSON format ``paro-advise/plan`` is exactly these values. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from paro_advise.errors import ForeignDataError, InputError

FORMAT = "paro-advise/plan"
FORMAT_VERSION = "1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """A predicted number: in 8 of 10 cases between p10 and p90."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a choice should bring.

    Attributes:
        step_time_us: of a step.
        speedup: against the run as it is.
        memory_bytes: model states and transients of one rank, without activations.
        terms: parts of the memory, by name.
    """

    step_time_us: Quantiles
    speedup: Quantiles
    memory_bytes: float
    terms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy with its groups.

    Attributes:
        triple: such as "IIG".
        group_size: ranks of a group; None where no state uses it.
        collectives: "native" or "ho_ring".
        predicted: what it brings.
        redundancy_bytes: what one rank holds beyond GGG.
        exports: framework to "exact", "approximate" or "unsupported".
        feasible: it fits and can be run.
        reason: why it was chosen, or not.
        probability_best: share of the draws in which it was the fastest that fits.
    """

    triple: str
    group_size: int | None
    collectives: str
    predicted: Prediction
    redundancy_bytes: float
    exports: dict[str, str]
    feasible: bool
    reason: str
    probability_best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How far the plan can be trusted.

    Attributes:
        replay_error_pct: replay of the run as it is against its measured step.
        probability_gain: that the chosen plan is more than 2 % faster.
        expected_regret_pct: what is lost on average against the best in each draw.
        text: for people.
    """

    replay_error_pct: float
    probability_gain: float
    expected_regret_pct: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preconditions:
    """Facts that must still hold when the plan is applied."""

    world_size: int
    gpus_per_node: int
    micro_batches: int
    parameter_count: int
    device_memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan.

    Attributes:
        verdict: "change", "keep" or "measure first".
        baseline: the run as it is.
        chosen: what to run; the baseline itself where it is kept.
        switch_on_today: the best that a framework's own settings express.
        candidates: all, the best first.
        assumptions: what was not in the traces.
        probes: what to measure next.
    """

    format: str
    format_version: str
    plan_id: str
    verdict: str
    text: str
    baseline: Choice
    chosen: Choice
    switch_on_today: Choice | None
    candidates: tuple[Choice, ...]
    confidence: Confidence
    preconditions: Preconditions
    assumptions: tuple[str, ...]
    probes: tuple[str, ...]


def with_id(plan: Plan) -> Plan:
    """Return the plan with the hash of its body as its id."""
    return replace(plan, plan_id=body_hash(plan))


def body_hash(plan: Plan) -> str:
    """Return the hash of everything but the id."""
    import msgspec

    body = msgspec.json.encode(replace(plan, plan_id=""), order="sorted")
    return hashlib.sha256(body).hexdigest()[:16]


def plan_to_json(plan: Plan) -> bytes:
    """Return a plan as indented JSON with sorted keys; equal plans give equal bytes."""
    import msgspec

    return msgspec.json.format(msgspec.json.encode(plan, order="sorted"), indent=2) + b"\n"


def read_plan(path: str) -> Plan:
    """Read a plan's file.

    Raises:
        InputError: it cannot be read, or is no plan as it was written.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"the plan must be a readable file: {error.strerror or error}", where=path) from error
    return plan_from_json(data, path)


def plan_from_json(data: bytes, where: str) -> Plan:
    """Read a plan back.

    Raises:
        ForeignDataError: not a plan, another major version, or changed by hand.
    """
    import msgspec

    try:
        plan = msgspec.json.decode(data, type=Plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the file must be a {FORMAT} JSON, it is not: {error}", where=where) from error
    if plan.format != FORMAT or plan.format_version.split(".")[0] != FORMAT_VERSION.split(".")[0]:
        raise ForeignDataError(
            f"the file must be {FORMAT} {FORMAT_VERSION.split('.')[0]}.x, got {plan.format} {plan.format_version}",
            where=where,
        )
    if plan.plan_id != body_hash(plan):
        raise ForeignDataError(
            f"a plan must be as it was written, its body no longer has the id {plan.plan_id}",
            where=where,
            hint="make it again with `paro-advise recommend`",
        )
    return plan
