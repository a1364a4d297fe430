"""The plan: what to change, what it should bring and cost, and what it is based on.

The JSON format ``paro-advise/plan`` is exactly these values. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from paro_advise.core.documents import Format, document_bytes, from_json
from paro_advise.errors import ForeignDataError, UsageError
from paro_advise.policies.frameworks.model import Fidelity, Offload, Variant
from paro_advise.policies.frameworks.registry import RUNTIME, approximation_of, exports_of
from paro_advise.policies.strategy import CollectiveBackend, Strategy
from paro_advise.policies.traffic import Traffic  # noqa: TC001 - the format is decoded by this type

FORMAT = Format(name="paro-advise/plan", version="1.7")


class Verdict(StrEnum):
    """What a plan says to do."""

    CHANGE = "change"
    KEEP = "keep"
    MEASURE_FIRST = "measure first"


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
        memory_bytes: model states and transients of one rank at the most, without activations.
        terms: parts of the memory, by name.
        peak_bytes: what one rank should hold at the most in a step, activations included; None where those
            are not known. At a slow network transients, and with them the peak, may reach their bound.
    """

    step_time_us: Quantiles
    speedup: Quantiles
    memory_bytes: float
    terms: dict[str, float]
    peak_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy with its groups.

    Attributes:
        triple: such as "IIG".
        group_size: ranks of a group; None where no state uses it.
        collectives: what moves the bytes.
        predicted: what it brings.
        redundancy_bytes: what one rank holds beyond GGG.
        exports: how well each framework's own settings express it.
        feasible: it fits and can be run.
        reason: why it was chosen, or not.
        probability_best: share of the draws in which it was the fastest that fits.
        offload: states on the host.
        variant: what a framework's own setting makes of the triple.
        traffic: what one rank sends in a step by the strategy's procedure; None for a variant, which departs from it.
        eligible: the plan may choose it, if it fits: what runs it can be had, and was run on such a backend.
        reduces_each_micro_batch: gradients are added up across all ranks in every micro-batch, not once a step.
    """

    triple: str
    group_size: int | None
    collectives: CollectiveBackend
    predicted: Prediction
    redundancy_bytes: float
    exports: dict[str, Fidelity]
    feasible: bool
    reason: str
    probability_best: float
    offload: Offload = Offload.NONE
    variant: Variant = Variant.PLAIN
    traffic: Traffic | None = None
    eligible: bool = True  # since 1.4
    reduces_each_micro_batch: bool = False  # since 1.7

    @property
    def exact_frameworks(self) -> tuple[str, ...]:
        """Return the names of frameworks whose own settings express it exactly."""
        names = (name for name, fidelity in self.exports.items() if fidelity == Fidelity.EXACT)
        return tuple(name for name in names if name != RUNTIME)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How far the plan can be trusted.

    Attributes:
        replay_error_pct: replay of the run as it is against its measured step.
        probability_gain: that the chosen plan is more than 2 % faster than the run; where the run is kept, the best
            other way.
        expected_regret_pct: what is lost on average against the best in each draw.
        text: for people.
    """

    replay_error_pct: float
    probability_gain: float
    expected_regret_pct: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStep:
    """The fastest choice for a redundancy budget.

    Attributes:
        redundancy_bytes: what it holds beyond GGG.
        triple, group_size, collectives: the choice.
        step_time_us: its median.
        saved_us_per_gib: against the step before, per GiB more; None for the first.
        variant: what a framework's own setting makes of the triple; since 1.6.
    """

    redundancy_bytes: float
    triple: str
    group_size: int | None
    collectives: CollectiveBackend
    step_time_us: float
    saved_us_per_gib: float | None
    variant: Variant = Variant.PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesWhatIf:
    """The same plan on more nodes, with equal work per rank; the range grows with the distance."""

    nodes_factor: int
    world_size: int
    baseline_step_us: Quantiles
    chosen_step_us: Quantiles
    speedup: Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """What makes a step shorter beside the strategy; nothing of it is in the plan.

    Attributes:
        what: to change.
        speedup_now, speedup_with_plan: of the run as it is, and of the plan.
        more_bytes: that one rank then holds under the plan; None where it is not known.
        fits: the plan with it fits.
        changes_numbers: training computes something else with it.
        note: what to know, "" for nothing.
    """

    what: str
    speedup_now: Quantiles
    speedup_with_plan: Quantiles
    more_bytes: float | None
    fits: bool
    changes_numbers: bool
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was asked with ``--what-if``, and the answer.

    Attributes:
        asked: as it was written.
        text: in words; what a changed run looks like, or how far a target holds.
        baseline, chosen, best: ways to run the changed run: as now, as the plan says, and the fastest that fits.
        baseline_step_us, chosen_step_us, best_step_us: their steps.
    """

    asked: str
    text: str
    baseline: str = ""
    baseline_step_us: Quantiles | None = None
    chosen: str = ""
    chosen_step_us: Quantiles | None = None
    best: str = ""
    best_step_us: Quantiles | None = None


class EstimateSource(StrEnum):
    """Where a number that a prediction is based on is from."""

    MEASURED = "measured"  # in the run's own traces
    SUMS = "sums"  # likewise, but of all-reduces alone
    BENCHMARK = "benchmark"  # listed in a description
    STATED = "stated"  # in a description, as a link's own rate
    DERIVED = "derived"  # from others of these
    PRIOR = "prior"  # assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What the plan gains if something it is based on is half or twice as large.

    Attributes:
        what: the quantity.
        value: as the plan takes it, in the unit of its name.
        source: where its value is from.
        speedup_if_half, speedup_if_double: of the chosen strategy.
        best_if_half, best_if_double: what would then be chosen, as in the table of candidates.
    """

    what: str
    value: float
    source: EstimateSource
    speedup_if_half: float
    speedup_if_double: float
    best_if_half: str
    best_if_double: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoRingGain:
    """What HO-Ring changes in a gather of the largest unit over all ranks, and in the step.

    Attributes:
        unit_bytes: of that unit.
        rounds_before, rounds_after: between nodes, one after the other.
        port_bytes_before, port_bytes_after: through the port of a node.
        hidden_us: intra-node work that runs during the inter-node rounds.
        step_us_without: of the chosen strategy with the backend's own collectives.
    """

    unit_bytes: float
    rounds_before: float
    rounds_after: float
    port_bytes_before: float
    port_bytes_after: float
    hidden_us: float
    step_us_without: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preconditions:
    """Facts that must still hold when the plan is applied."""

    world_size: int
    gpus_per_node: int
    micro_batches: int
    parameter_count: int
    device_memory_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInput:
    """A file that a plan was made from.

    Attributes:
        name: of the file, without its folder.
        sha256: of its content.
    """

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLink:
    """A quantity of the links as a plan takes it.

    Attributes:
        what: name with its unit, such as "inter_gbps" (1e9 bytes/s) or "inter_alpha_us".
        value: its median.
        source: where it is from.
    """

    what: str
    value: float
    source: EstimateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a plan was made from and by, so that it can be made again.

    Attributes:
        tool_version: of paro-advise.
        inputs: files.
        framework: that trains, as recognised or described.
        data_parallel_ranks, model_parallel_ranks: ranks that share the data, and ranks that share a model.
        compute_us, step_us: arithmetic and time of a step of the run as it is.
        links: of the cluster.
    """

    tool_version: str
    inputs: tuple[PlanInput, ...]
    framework: str
    data_parallel_ranks: int
    model_parallel_ranks: int
    compute_us: float
    step_us: float
    links: tuple[PlanLink, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan.

    Attributes:
        verdict: what to do.
        baseline: the run as it is.
        chosen: what to run; the baseline itself where it is kept.
        switch_on_today: the best that a framework's own settings express.
        candidates: all, the best first.
        assumptions: what was not in the traces.
        probes: what to measure next.
        budget: what each step of a redundancy budget buys, the smallest first.
        outlooks: the same on more nodes.
        sensitivities: the same under other assumptions.
        ho_ring: what HO-Ring brings; None where it is not chosen.
        asked_for: the strategy that the user named, which is chosen then; since 1.5.
        answers: to what the user asked with ``--what-if``; since 1.6.
        levers: what gains beside the strategy, the best first; since 1.6.
        origin: what it was made from and by; since 1.6.
    """

    format: str
    format_version: str
    plan_id: str
    verdict: Verdict
    text: str
    baseline: Choice
    chosen: Choice
    switch_on_today: Choice | None
    candidates: tuple[Choice, ...]
    confidence: Confidence
    preconditions: Preconditions
    assumptions: tuple[str, ...]
    probes: tuple[str, ...]
    budget: tuple[BudgetStep, ...] = ()
    outlooks: tuple[NodesWhatIf, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    ho_ring: HoRingGain | None = None
    asked_for: str = ""
    answers: tuple[Answer, ...] = ()
    levers: tuple[Lever, ...] = ()
    origin: Origin | None = None


def as_framework_runs(plan: Plan, framework: str) -> Choice | None:
    """Return the prediction of what a framework's own settings make of the chosen strategy.

    An approximation is what it really is, and nothing but our runtime has HO-Ring. None where the plan
    holds no such prediction.
    """
    chosen = plan.chosen
    fidelity = exports_of(Strategy.parse(chosen.triple), CollectiveBackend.NATIVE).get(framework)
    triple, variant = chosen.triple, chosen.variant
    if fidelity == Fidelity.APPROXIMATE and not variant:
        triple, variant = approximation_of(chosen.triple, framework) or (triple, variant)
    fitting = [
        choice
        for choice in plan.candidates
        if (choice.triple, choice.variant, choice.collectives, choice.offload)
        == (triple, variant, CollectiveBackend.NATIVE, chosen.offload)
    ]
    return next((choice for choice in fitting if choice.group_size in (None, chosen.group_size)), None)


def kept_text(plan: Plan) -> str:
    """Return why a plan that keeps the run changes nothing: that nothing fits, if so, as the run itself does not."""
    return "the plan keeps the run as it is" if plan.chosen.feasible else plan.text.rstrip(".")


def check_runnable(plan: Plan) -> None:
    """Make sure that the runtime can train as a plan wants.

    Raises:
        UsageError: it wants a framework's own way to run a triple, such as a second copy for backward.
    """
    chosen = plan.chosen
    if plan.verdict == Verdict.KEEP or not chosen.variant:
        return
    has_it = chosen.exact_frameworks
    own = plan.origin.framework.lower() if plan.origin else ""
    name = next((name for name in has_it if own.startswith(name)), has_it[0] if has_it else "FRAMEWORK")
    raise UsageError(
        f"a plan must be one of the runtime's own strategies to run, got {chosen.triple}, {chosen.variant.label}",
        where=f"plan {plan.plan_id}",
        hint=f"set it in the framework: paro-advise recommend ... --export {name}=FILE; or plan another one: "
        "--strategy III",
    )


def same_way(first: Choice, second: Choice) -> bool:
    """Tell whether two choices run alike, whatever is predicted of them."""
    names = ("triple", "group_size", "collectives", "variant", "offload", "reduces_each_micro_batch")
    return all(getattr(first, name) == getattr(second, name) for name in names)


def beside_the_run(plan: Plan) -> tuple[Choice, ...]:
    """Return the candidates to show beside the run as it is: not that way once more, unless it looks best."""
    if plan.verdict == Verdict.MEASURE_FIRST:
        return plan.candidates
    return tuple(choice for choice in plan.candidates if not same_way(choice, plan.baseline))


def with_id(plan: Plan) -> Plan:
    """Return the plan with the hash of its body as its id."""
    return replace(plan, plan_id=body_hash(plan))


def body_hash(plan: Plan) -> str:
    """Return the hash of everything but the id."""
    import msgspec

    return _hash(msgspec.json.decode(msgspec.json.encode(plan)))


def _hash(body: dict[str, Any]) -> str:
    """Return the hash of a plan as it was written: later fields, which it does not have, must not change it."""
    import msgspec

    return hashlib.sha256(msgspec.json.encode({**body, "plan_id": ""}, order="sorted")).hexdigest()[:16]


def read_plan(path: str) -> Plan:
    """Read a plan's file.

    Raises:
        InputError: it cannot be read, or is not a plan as it was written.
    """
    return plan_from_json(document_bytes(path), path)


def plan_from_json(data: bytes, where: str) -> Plan:
    """Read a plan back.

    Raises:
        ForeignDataError: not a plan, another major version, or changed by hand.
    """
    import msgspec

    plan = from_json(data, FORMAT, Plan, where)
    if plan.plan_id != _hash(msgspec.json.decode(data)):
        raise ForeignDataError(
            f"a plan must be as it was written, its body no longer has the id {plan.plan_id}",
            where=where,
            hint="make it again with `paro-advise recommend`",
        )
    return plan
