"""Ranks every strategy, group size and algorithm for a run, and decides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from paro_advise.advisor.candidates import candidates, is_at_hand, is_proposable, offloaded
from paro_advise.advisor.learned import Learned
from paro_advise.advisor.outlook import (
    EQUAL,
    Now,
    budget_steps,
    ho_ring_gain,
    outlooks,
    quantiles,
    sensitivities,
)
from paro_advise.advisor.replay import (
    LEVELS,
    Candidate,
    Links,
    baseline_candidate,
    floor_us,
    measured_links,
    step_us,
    stretch,
)
from paro_advise.policies.fidelity import exports_of
from paro_advise.policies.memory import (
    StateBytes,
    Widths,
    least_transient_bytes,
    state_bytes,
    transient_bytes,
    usual_transient_bytes,
)
from paro_advise.policies.plan import (
    FORMAT,
    FORMAT_VERSION,
    Choice,
    Confidence,
    Plan,
    Preconditions,
    Prediction,
    with_id,
)
from paro_advise.policies.strategy import Level, Strategy
from paro_advise.policies.traffic import Shape
from paro_advise.policies.variants import Variant, plain_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from paro_advise.advisor.calibration import Calibration
    from paro_advise.advisor.levels import Estimate

_DRAWS = 200
_GATE_PCT = 10.0
_GAIN, _SURE = 1.02, 0.9
# Never propose what fills more than this of the device: activations and fragmentation are not in it.
_CAPACITY_SHARE = 0.8
# What the model itself does not know of another strategy, as the standard deviation of the logarithm (prediction
# 3.5), and on CPUs, where bench_prediction measured it; the doubt of links that nobody measured is in their draws.
_OTHER, _ON_CPU, _FLOOR, _HIDDEN = 0.08, 0.06, 0.07, 0.15
_ANCHOR = (0.5, 2.0)
# How much of the host time that should go does go.
_GONE = (0.6, 1.4)
# The host where nothing was measured: what one device moves (1e9 bytes/s), and the doubt.
_HOST_GBPS, _HOST = 12.0, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must respect.

    Attributes:
        device_memory_bytes: of one device; None when unknown, then nothing is excluded.
        redundancy_budget_bytes: what a rank may hold beyond GGG; None for any.
        other_bytes: activations and the rest, from a measured peak.
        host_gbps: what one device moves to or from its host, 1e9 bytes/s.
    """

    device_memory_bytes: float | None = None
    redundancy_budget_bytes: float | None = None
    other_bytes: float = 0.0
    host_gbps: float = _HOST_GBPS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scored:
    candidate: Candidate
    times: NDArray[np.float64]
    memory: StateBytes
    transient: float
    peak: float | None
    redundancy: float
    reason: str  # why it does not fit, "" if it does


def recommend(calibration: Calibration, limits: Limits, seed: int = 0, learned: Learned | None = None) -> Plan:
    """Return the plan for a run.

    Args:
        calibration: the run.
        limits: memory.
        seed: of the draws; equal seeds give equal plans.
        learned: from earlier comparisons.
    """
    learned = learned or Learned()
    generator = np.random.default_rng(seed)
    links = _draws(calibration, generator)
    base = baseline_candidate(calibration)
    replayed = float(step_us(calibration, base, measured_links(calibration)))
    error_pct = 100 * (replayed / calibration.step_us - 1)
    if calibration.traced_error_pct is not None:
        error_pct = max(error_pct, calibration.traced_error_pct, key=abs)
    error_pct = round(error_pct, 2) + 0.0  # no minus before a zero
    baseline = _score(calibration, base, limits, np.full(_DRAWS, calibration.step_us))
    # Arithmetic and what no strategy changes are measured; only the rest of a step is in doubt.
    floor = floor_us(calibration, base)
    # The measured step anchors all: links that would make it shorter or longer than it was are corrected.
    exposed_now = np.maximum(step_us(calibration, base, links) - floor, 0.0)
    anchor = np.clip((calibration.step_us - floor) / np.maximum(exposed_now, 1.0), *_ANCHOR)
    # Buckets that go on at once behind backward on a CPU tell little of the links and of the host's own gaps.
    hidden = _HIDDEN if base.overlaps_reductions and not calibration.is_gpu else 0.0
    scored = []
    for candidate in candidates(calibration):
        own_floor = floor_us(calibration, candidate)
        gone = floor - own_floor
        exposed = np.maximum(step_us(calibration, candidate, links) - own_floor, 0.0) * anchor
        doubt = math.hypot(_OTHER if calibration.is_gpu else _ON_CPU, learned.spread, hidden)
        noise = np.exp(generator.normal(0.0, doubt, _DRAWS))
        # Arithmetic too, as far as communication shared the cores with it.
        shared = _FLOOR * (1 - floor / calibration.step_us)
        left = floor * np.exp(generator.normal(0.0, shared, _DRAWS)) - gone * generator.uniform(*_GONE, _DRAWS)
        times = (np.maximum(left, 0.0) + exposed * noise) * math.exp(-learned.bias)
        scored.append(_score(calibration, candidate, limits, times))
    plain = [item for item in scored if not item.candidate.variant]
    for parameters in (False, True):
        if not all(item.reason for item in scored if is_proposable(item.candidate, calibration.framework)):
            break
        # Nothing fits: the optimizer's states go to the host, then the parameters, before the plan gives up.
        for item in plain:
            if parameters and (str(item.candidate.strategy), item.candidate.collectives) != ("GGG", "native"):
                continue
            moved = offloaded(calibration, item.candidate, limits.host_gbps, parameters=parameters)
            extra = moved.host_us * np.exp(generator.normal(0.0, _HOST, _DRAWS))
            scored.append(_score(calibration, moved, limits, item.times + extra))
    open_to_us = [item for item in scored if not item.reason and is_proposable(item.candidate, calibration.framework)]
    plan, chosen = _decide(calibration, limits, baseline, scored, open_to_us, error_pct)
    if learned.count:
        plan = replace(plan, assumptions=(*plan.assumptions, learned.text))
    fitting = [(item.candidate, item.memory.total) for item in open_to_us]
    ahead = plan.verdict != "keep"
    now = Now(calibration=calibration, links=links, anchor=anchor, base=base, chosen=chosen, bias=learned.bias)
    return with_id(
        replace(
            plan,
            budget=budget_steps([_choice(item, baseline, "", 0.0) for item in open_to_us]),
            outlooks=outlooks(now, seed) if ahead else (),
            sensitivities=sensitivities(now, fitting) if ahead else (),
            ho_ring=ho_ring_gain(calibration, chosen) if ahead else None,
        )
    )


def _draws(calibration: Calibration, generator: np.random.Generator) -> Links:
    def draw(estimate: Estimate) -> Any:
        return estimate.value * np.exp(generator.normal(0.0, estimate.sigma, _DRAWS))

    drawn = {name: draw(getattr(calibration, name)) for name in LEVELS}
    return Links(**drawn, stretch=stretch(calibration))


def _widths(calibration: Calibration) -> Widths:
    """Return bytes per element: fp32 training, or 16-bit parameters with fp32 masters."""
    if calibration.element_bytes >= 4:
        return Widths(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
    return Widths()


def _shape(calibration: Calibration, group_size: int) -> Shape:
    return Shape(
        group_size=group_size,
        num_groups=max(1, calibration.world_size // group_size),
        micro_batches=calibration.micro_batches,
    )


def _score(calibration: Calibration, candidate: Candidate, limits: Limits, times: NDArray[np.float64]) -> _Scored:
    widths = _widths(calibration)
    shape = _shape(calibration, candidate.group_size)
    memory = state_bytes(candidate.strategy, shape, calibration.parameters, widths=widths)
    if candidate.offload:
        memory = replace(memory, optimizer=0.0, parameter=memory.parameter * ("parameter" not in candidate.offload))
    if candidate.backward_level == Level.I:
        copy = calibration.parameters * widths.parameter_bytes / candidate.group_size
        memory = replace(memory, parameter=memory.parameter + copy)
    transient = _buffers(transient_bytes, calibration, candidate)
    # Whole parameters that are kept for backward are redundant, too.
    kept = calibration.parameters * widths.parameter_bytes if candidate.variant == Variant.KEPT else 0.0
    redundancy = memory.total + kept - _ggg_bytes(calibration)
    transient += kept
    total = memory.total + transient + limits.other_bytes
    peak = None
    if limits.other_bytes:
        # What the run as it is holds beyond the least is in the other bytes.
        buffers = least_transient_bytes if candidate == baseline_candidate(calibration) else usual_transient_bytes
        peak = memory.total + _whole(buffers, calibration, candidate) + limits.other_bytes
    reason = ""
    capacity = limits.device_memory_bytes
    if capacity is not None and total > _CAPACITY_SHARE * capacity:
        reason = f"needs {_gib(total)} of {_gib(capacity)}; at most {_CAPACITY_SHARE:.0%} may be planned"
    elif candidate.variant == Variant.QUANTISED:
        reason = "changes the numbers: it sends quantised parameters and gradients"
    elif limits.redundancy_budget_bytes is not None and redundancy > limits.redundancy_budget_bytes:
        reason = f"holds {_gib(redundancy)} beyond GGG, more than the budget of {_gib(limits.redundancy_budget_bytes)}"
    return _Scored(
        candidate=candidate,
        times=times,
        memory=memory,
        transient=transient,
        peak=peak,
        redundancy=redundancy,
        reason=reason,
    )


def _buffers(count: Callable[..., float], calibration: Calibration, candidate: Candidate) -> float:
    """Return bytes beside states and activations, as counted by one of the functions of policies/memory.py."""
    widths, shape = _widths(calibration), _shape(calibration, candidate.group_size)
    largest = max(calibration.unit_bytes) / calibration.element_bytes
    return count(candidate.strategy, shape, largest, widths.parameter_bytes, widths.gradient_bytes)


def _whole(count: Callable[..., float], calibration: Calibration, candidate: Candidate) -> float:
    """Return the same with units that stay whole for backward; the largest is among what is counted."""
    held = _buffers(count, calibration, candidate)
    if candidate.variant == Variant.KEPT:
        largest = max(calibration.unit_bytes) / calibration.element_bytes
        held += (calibration.parameters - largest) * _widths(calibration).parameter_bytes
    return held


def _ggg_bytes(calibration: Calibration) -> float:
    shape = Shape(group_size=1, num_groups=calibration.world_size)
    return state_bytes(Strategy.parse("GGG"), shape, calibration.parameters, widths=_widths(calibration)).total


def _decide(
    calibration: Calibration,
    limits: Limits,
    baseline: _Scored,
    scored: Sequence[_Scored],
    open_to_us: Sequence[_Scored],
    error_pct: float,
) -> tuple[Plan, Candidate]:
    """Return the plan without an id, and the candidate that looks best."""
    medians = {id(item): float(np.median(item.times)) for item in scored}
    order = sorted(scored, key=lambda item: (bool(item.reason), medians[id(item)]))
    wins, regrets = _wins(open_to_us)
    chosen = _choose(open_to_us, medians)
    gain = float(np.mean(baseline.times / chosen.times > _GAIN)) if chosen else 0.0
    replay_is_good = abs(error_pct) <= _GATE_PCT
    if chosen is None:
        verdict = "keep"
    elif not replay_is_good:
        verdict = "measure first"
    elif baseline.reason:
        verdict = "change"  # the run as it is breaks a limit
    elif gain < 1 - _SURE:
        verdict = "keep"
    elif gain >= _SURE:
        verdict = "change"
    else:
        verdict = "measure first"
    base_choice = _choice(baseline, baseline, baseline.reason or "the run as it is", 0.0)
    made = {
        id(item): _choice(
            item,
            baseline,
            item.reason or _why(item, chosen, medians, is_open=item in open_to_us),
            wins.get(id(item), 0.0),
        )
        for item in order
    }
    at_hand = [item for item in order if not item.reason and is_at_hand(item.candidate, calibration.framework)]
    today = at_hand[0] if at_hand else None
    kept = verdict == "keep" or chosen is None
    text = _text(verdict, base_choice, made[id(chosen)], gain, error_pct) if chosen else _nothing(made[id(order[0])])
    plan = Plan(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        plan_id="",
        verdict=verdict,
        text=text,
        baseline=base_choice,
        chosen=base_choice if kept or chosen is None else made[id(chosen)],
        switch_on_today=made[id(today)] if today else None,
        candidates=tuple(made[id(item)] for item in order),
        confidence=Confidence(
            replay_error_pct=error_pct,
            probability_gain=gain,
            expected_regret_pct=round(100 * regrets.get(id(chosen), 0.0), 2),
            text=_confidence_text(error_pct, replay_is_good=replay_is_good),
        ),
        preconditions=Preconditions(
            world_size=calibration.world_size,
            gpus_per_node=calibration.ranks_per_node,
            micro_batches=calibration.micro_batches,
            parameter_count=round(calibration.parameters),
            device_memory_bytes=limits.device_memory_bytes,
        ),
        assumptions=calibration.assumptions,
        probes=_probes(calibration) if verdict == "measure first" else (),
    )
    return plan, (chosen or baseline).candidate


def _wins(fitting: Sequence[_Scored]) -> tuple[dict[int, float], dict[int, float]]:
    """Return how often each is the fastest, and its expected regret as a share."""
    if not fitting:
        return {}, {}
    table = np.stack([item.times for item in fitting])
    best = table.min(axis=0)
    share = np.bincount(table.argmin(axis=0), minlength=len(fitting)) / table.shape[1]
    regret = (table / best - 1).mean(axis=1)
    return (
        {id(item): float(value) for item, value in zip(fitting, share, strict=True)},
        {id(item): float(value) for item, value in zip(fitting, regret, strict=True)},
    )


def _choose(fitting: Sequence[_Scored], medians: dict[int, float]) -> _Scored | None:
    """Return the fastest, or among those within noise of it the one with the least memory."""
    if not fitting:
        return None
    best = min(medians[id(item)] for item in fitting)
    near = [item for item in fitting if medians[id(item)] <= best * (1 + EQUAL)]
    return min(near, key=lambda item: (item.memory.total, medians[id(item)]))


def _choice(item: _Scored, baseline: _Scored, reason: str, probability: float) -> Choice:
    candidate = item.candidate
    uses_groups = "I" in str(candidate.strategy) or candidate.backward_level == Level.I
    terms = {
        "parameter": item.memory.parameter,
        "gradient": item.memory.gradient,
        "optimizer": item.memory.optimizer,
        "transient": item.transient,
    }
    return Choice(
        triple=str(candidate.strategy),
        group_size=candidate.group_size if uses_groups else None,
        collectives=candidate.collectives,
        predicted=Prediction(
            step_time_us=quantiles(item.times),
            speedup=quantiles(baseline.times / item.times),
            memory_bytes=sum(terms.values()),
            terms=terms,
            peak_bytes=item.peak,
        ),
        redundancy_bytes=item.redundancy,
        exports=exports_of(candidate.strategy, candidate.collectives, candidate.variant, candidate.offload),
        feasible=not item.reason,
        reason=reason,
        probability_best=probability,
        offload=candidate.offload,
        variant=candidate.variant,
    )


def _nothing(first: Choice) -> str:
    if not first.feasible:
        return f"Nothing fits: {_name(first)} {first.reason}."
    names = ", ".join(name for name, fidelity in first.exports.items() if fidelity == "exact")
    return f"Nothing fits that `paro-advise run` trains with; {_name(first)} does, by the settings of {names}."


def _why(item: _Scored, chosen: _Scored | None, medians: dict[int, float], *, is_open: bool) -> str:
    if not is_open:
        return "by a framework's own settings only; `paro-advise run` does not use them"
    if chosen is None or item is chosen:
        return "the fastest that fits, or equal to it within noise with less memory"
    slower = medians[id(item)] / medians[id(chosen)] - 1
    if slower < 0:
        return f"{-slower:.1%} faster, which is within noise, for more memory"
    return f"{slower:.1%} slower than the chosen one"


def _text(verdict: str, baseline: Choice, chosen: Choice, gain: float, error_pct: float) -> str:
    name = _name(chosen)
    speedup = chosen.predicted.speedup
    ahead = f"{speedup.p50:.2f}x ({speedup.p10:.2f} to {speedup.p90:.2f})"
    match verdict:
        case "keep":
            return (
                f"Keep {_name(baseline)}: the best alternative that fits, {name}, is more than 2 % faster "
                f"with probability {gain:.2f} only."
            )
        case "change":
            more = chosen.redundancy_bytes - baseline.redundancy_bytes
            broken = "" if baseline.feasible else f" {_name(baseline)} {baseline.reason}."
            return (
                f"Change {_name(baseline)} to {name}: predicted {ahead} the speed, "
                f"{_gib(abs(more))} {'more' if more >= 0 else 'less'} memory per rank for the model states." + broken
            )
        case _ if abs(error_pct) > _GATE_PCT:
            return (
                f"Measure first: the replay of this run is off by {error_pct:+.0f} %, so numbers would mislead; "
                f"{name} looks best."
            )
        case _:
            return (
                f"Measure first: {name} looks best, {ahead}, but more than 2 % faster only with probability {gain:.2f}."
            )


def _name(choice: Choice) -> str:
    groups = f" in groups of {choice.group_size}" if choice.group_size else ""
    groups += f" ({plain_name(choice.variant)})" if choice.variant else ""
    where = choice.offload.replace("+parameter", " and parameters")
    host = f", {where} on the host" if where else ""
    return f"{choice.triple}{groups}" + (" with HO-Ring" if choice.collectives == "ho_ring" else "") + host


def _confidence_text(error_pct: float, *, replay_is_good: bool) -> str:
    gate = "within" if replay_is_good else "beyond"
    off = round(error_pct, 1) + 0.0
    return f"the replay of the traced run is off by {off:+.1f} %, {gate} the {_GATE_PCT:.0f} % that numbers need"


def _probes(calibration: Calibration) -> tuple[str, ...]:
    """Return what to measure so that the answer gets certain, the most useful first."""
    found = []
    probe = "-m paro_advise.runtime.probe"
    nodes, per_node = calibration.num_nodes, calibration.ranks_per_node
    if calibration.intra_gbps.source == "prior" and per_node > 1:
        found.append(
            f"bandwidth inside a node, on one node: torchrun --nproc-per-node {per_node} {probe} > inside.txt, "
            "then recommend with inside.txt beside the traces"
        )
    if calibration.inter_gbps.source == "prior" and nodes > 1:
        found.append(
            f"bandwidth between nodes, on all of them: torchrun --nnodes {nodes} --nproc-per-node {per_node} ... "
            f"{probe} > between.txt, then recommend with between.txt beside the traces"
        )
    if not found:
        found.append("a second trace of three or more steps, of one rank per node, so that the spread gets known")
    return tuple(found)


def _gib(num_bytes: float) -> str:
    if abs(num_bytes) < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def baseline_bytes(calibration: Calibration) -> float:
    """Return the model states and transients of one rank of the run as it is."""
    scored = _score(calibration, baseline_candidate(calibration), Limits(), np.ones(1))
    return scored.memory.total + scored.transient


def least_bytes(calibration: Calibration) -> float:
    """Return what a measured peak of the run as it is must hold: model states, and what is whole while computing."""
    base = baseline_candidate(calibration)
    states = _score(calibration, base, Limits(), np.ones(1)).memory.total
    return states + _whole(least_transient_bytes, calibration, base)
