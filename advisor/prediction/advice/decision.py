"""Which candidate a plan recommends, how sure it is of it, and why not the others (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.advice.on_gpus import HO_RING_ON_GPUS, RUN_ON_GPUS, needed_of_script
from paro_advise.advisor.prediction.advice.what_if import quantiles
from paro_advise.advisor.prediction.constants import (
    EQUAL_SHARE,
    GAIN_PROBABILITY,
    GAIN_RATIO,
    GATE_PCT,
    HOPELESS_PCT,
    NAMED_RATIO,
)
from paro_advise.advisor.wording.quantities import bytes_text, signed_text
from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Fidelity
from paro_advise.policies.frameworks.registry import RUNTIME, exports_of
from paro_advise.policies.plan import (
    FORMAT,
    Choice,
    Confidence,
    EstimateSource,
    Plan,
    Preconditions,
    Prediction,
    Verdict,
    same_way,
)
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.policies.strategy_name import choice_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.scoring import Limits, Scored


_DEALT_OUT = (
    "ranks of a node do not follow each other (PARO033), so groups of ranks in a row are not where they are predicted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedCandidates:
    """All candidates of a plan.

    Attributes:
        baseline: the run as it is.
        scored: all candidates, those first that fit, then by median time.
        eligible: those of them that fit and that `paro-advise run` trains with.
        usable_today: the fastest that a framework's own settings express, None without any.
        replay_error_pct: replay of the run as it is against its measured step.
        asked_for: what the user named, None where the plan decides.
        wanted: the fastest way to run that.
    """

    baseline: Scored
    scored: Sequence[Scored]
    eligible: Sequence[Scored]
    usable_today: Scored | None
    replay_error_pct: float
    asked_for: str = ""
    wanted: Scored | None = None


def decide(calibration: Calibration, limits: Limits, field: RankedCandidates) -> tuple[Plan, Scored]:
    """Return the plan without an id, and the candidate that looks best or was asked for."""
    plan, best = _choose_recommendation(calibration, limits, field)
    if field.wanted is None:
        return plan, best
    chosen = next(choice for choice, item in zip(plan.candidates, field.scored, strict=True) if item is field.wanted)
    keeps = same_way(plan.baseline, chosen)
    regret = _regret_of_keeping(field) if keeps else _wins(field.eligible)[1].get(id(field.wanted), 0.0)
    confidence = replace(
        plan.confidence,
        probability_gain=_gain(field.baseline, field.wanted),
        expected_regret_pct=round(100 * regret, 2),
    )
    caveat = "" if keeps else _caveat(calibration, field.wanted)
    ahead = "" if keeps else f": predicted {_ahead(chosen)}{_memory(plan.baseline, chosen)}"
    what = f"keep {choice_name(chosen)}" if keeps else _first_lower(_change(plan.baseline, chosen))
    call = "" if keeps else needed_of_script(calibration, field.baseline, field.wanted)
    asked = replace(
        plan,
        verdict=Verdict.KEEP if keeps else Verdict.CHANGE,
        text=f"As asked for, {what}{ahead}{f', but {caveat}' if caveat else ''}.{call} Without --strategy: {plan.text}",
        chosen=chosen,
        confidence=confidence,
        asked_for=field.asked_for,
    )
    return asked, field.wanted


def _choose_recommendation(calibration: Calibration, limits: Limits, field: RankedCandidates) -> tuple[Plan, Scored]:
    baseline = field.baseline
    chosen = fastest(field.eligible, baseline)
    # The same way to run is no change, whatever noise makes of it.
    keeps = chosen is None or same_way(choice_of(baseline, baseline), choice_of(chosen, baseline))
    gain = 0.0 if chosen is None or keeps else _gain(baseline, chosen)
    verdict = _verdict(field, chosen, gain)
    caveat = _caveat(calibration, chosen) if verdict in (Verdict.CHANGE, Verdict.MEASURE_FIRST) else ""
    if caveat:
        verdict = Verdict.MEASURE_FIRST
    wins, regrets = _wins(field.eligible)
    base_choice = _choice(baseline, baseline, baseline.reason or "the run as it is", 0.0)
    is_untested = calibration.is_gpu and not limits.allow_untested
    compared_with = field.wanted or chosen
    choices = {
        id(item): _choice(
            item,
            baseline,
            item.reason
            or _why(
                item,
                compared_with,
                is_eligible=item in field.eligible,
                is_untested=is_untested,
                is_asked_for=field.wanted is not None,
            ),
            wins.get(id(item), 0.0),
            is_eligible=item in field.eligible,
        )
        for item in field.scored
    }
    best = choices[id(chosen)] if chosen else None
    is_kept = verdict == Verdict.KEEP or best is None
    regret = _regret_of_keeping(field) if is_kept else regrets.get(id(chosen), 0.0)
    text = (
        _text(verdict, base_choice, best, gain, field, keeps=keeps)
        if best
        else _nothing_fits(base_choice, field.scored, [choices[id(item)] for item in field.scored])
    )
    surer = _surer(field, chosen, choices) if verdict == Verdict.MEASURE_FIRST and not caveat else None
    if best and abs(field.replay_error_pct) <= HOPELESS_PCT:
        text += _beside(verdict, base_choice, best, [choices[id(item)] for item in field.eligible], surer)
    text += _surer_text(surer, best)
    if verdict == Verdict.CHANGE and chosen is not None:
        text += needed_of_script(calibration, baseline, chosen)
    if calibration.framework == Framework.UNKNOWN and verdict == Verdict.CHANGE:
        text += " The traces name no framework: `paro-advise run` needs FSDP, DDP or DeepSpeed around the model."
    plan = Plan(
        format=FORMAT.name,
        format_version=FORMAT.version,
        plan_id="",
        verdict=verdict,
        text=f"{text} No change yet: {caveat}." if caveat else text,
        baseline=base_choice,
        chosen=base_choice if is_kept or best is None else best,
        switch_on_today=choices[id(field.usable_today)] if field.usable_today else None,
        candidates=tuple(choices[id(item)] for item in field.scored),
        confidence=Confidence(
            replay_error_pct=field.replay_error_pct,
            probability_gain=gain,
            expected_regret_pct=round(100 * regret, 2),
            text=_confidence_text(field.replay_error_pct, is_described=calibration.is_described),
        ),
        preconditions=_preconditions(calibration, limits),
        assumptions=(*_caveats(calibration), *calibration.assumptions),
        probes=_probes(calibration, caveat) if verdict == Verdict.MEASURE_FIRST else (),
    )
    return plan, baseline if verdict == Verdict.KEEP or chosen is None else chosen


def _preconditions(calibration: Calibration, limits: Limits) -> Preconditions:
    return Preconditions(
        world_size=calibration.job_world_size,
        gpus_per_node=calibration.job_ranks_per_node,
        micro_batches=calibration.micro_batches,
        parameter_count=round(calibration.parameters),
        device_memory_bytes=limits.device_memory_bytes,
    )


def _caveat(calibration: Calibration, chosen: Scored | None) -> str:
    """Return why a choice that is predicted to gain is none to change to yet, "" where nothing speaks against it."""
    if calibration.is_dealt_out and chosen is not None and chosen.candidate.uses_groups:
        return _DEALT_OUT
    return calibration.unmodelled


def _caveats(calibration: Calibration) -> list[str]:
    """Return what makes predictions mislead, of some candidates or of all."""
    return [*filter(None, (calibration.unmodelled, _DEALT_OUT if calibration.is_dealt_out else ""))]


def _gain(baseline: Scored, chosen: Scored) -> float:
    """Return the probability that a candidate is faster than the run as it is, beyond noise."""
    return float(np.mean(baseline.times / chosen.times > GAIN_RATIO))


def median_us(item: Scored) -> float:
    """Return the median step time of a candidate."""
    return float(np.median(item.times))


def fastest(fitting: Sequence[Scored], baseline: Scored) -> Scored | None:
    """Return the fastest, or among those within noise of it the one with the least memory; None without any.

    Where the run itself is not within noise of it, one that gains what is worth a change, if any does.
    """
    if not fitting:
        return None
    best = min(map(median_us, fitting))
    equal, run_us = best * (1 + EQUAL_SHARE), median_us(baseline)
    near = [item for item in fitting if median_us(item) <= equal]
    is_equal = bool(baseline.reason) or run_us <= equal
    worth = [] if is_equal else [item for item in near if run_us > GAIN_RATIO * median_us(item)]
    return min(worth or near, key=lambda item: (item.memory.total + item.transient, median_us(item)))


def _verdict(field: RankedCandidates, chosen: Scored | None, gain: float) -> Verdict:
    if chosen is None:
        return Verdict.KEEP
    if abs(field.replay_error_pct) > GATE_PCT:
        return Verdict.MEASURE_FIRST
    if field.baseline.reason:
        return Verdict.CHANGE  # the run as it is breaks a limit
    if gain < 1 - GAIN_PROBABILITY or median_us(field.baseline) < GAIN_RATIO * median_us(chosen):
        return Verdict.KEEP
    return Verdict.CHANGE if gain >= GAIN_PROBABILITY else Verdict.MEASURE_FIRST


def _wins(fitting: Sequence[Scored]) -> tuple[dict[int, float], dict[int, float]]:
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


def _regret_of_keeping(field: RankedCandidates) -> float:
    """Return what the run as it is loses on average against the best in each draw, as a share."""
    best = np.stack([field.baseline.times, *(item.times for item in field.eligible)]).min(axis=0)
    return float((field.baseline.times / best - 1).mean())


def choice_of(item: Scored, baseline: Scored) -> Choice:
    """Return a candidate as a plan shows it, without a reason."""
    return _choice(item, baseline, "", 0.0)


def _choice(item: Scored, baseline: Scored, reason: str, probability: float, *, is_eligible: bool = True) -> Choice:
    candidate = item.candidate
    terms = {
        "parameter": item.memory.parameter,
        "gradient": item.memory.gradient,
        "optimizer": item.memory.optimizer,
        "transient": item.transient,
    }
    exports = exports_of(candidate.strategy, candidate.collectives, candidate.variant, candidate.offload)
    return Choice(
        triple=str(candidate.strategy),
        group_size=candidate.group_size if candidate.uses_groups else None,
        collectives=candidate.collectives,
        predicted=Prediction(
            step_time_us=quantiles(item.times),
            speedup=quantiles(baseline.times / item.times),
            memory_bytes=sum(terms.values()),
            terms=terms,
            peak_bytes=item.peak,
        ),
        redundancy_bytes=item.redundancy,
        exports=exports if not candidate.by_runtime else {**exports, RUNTIME: Fidelity.EXACT},
        feasible=not item.reason,
        reason=reason,
        probability_best=probability,
        offload=candidate.offload,
        variant=candidate.variant,
        traffic=item.traffic,
        eligible=is_eligible,
        reduces_each_micro_batch=candidate.replicates_each_pass,
    )


def _why(item: Scored, chosen: Scored | None, *, is_eligible: bool, is_untested: bool, is_asked_for: bool) -> str:
    """Say why a candidate was chosen, or how it compares with the one that was."""
    if not is_eligible and is_untested:
        if item.candidate.collectives == CollectiveBackend.HO_RING:
            return f"experimental: {HO_RING_ON_GPUS}; --allow-untested lets a plan choose it"
        if item.candidate.by_runtime:
            return f"experimental: {RUN_ON_GPUS}; --allow-untested lets a plan choose it"
        return "no setting of the framework that ran expresses it"
    if not is_eligible:
        return "by a framework's own settings only; `paro-advise run` does not use them"
    if is_asked_for and item is chosen:
        return "asked for"
    if chosen is None or item is chosen:
        return "the fastest that fits, or equal to it within noise with less memory"
    slower = median_us(item) / median_us(chosen) - 1
    if slower < 0 and is_asked_for:
        return f"{-slower:.1%} faster than the one asked for"
    if slower < 0:
        return f"{-slower:.1%} faster, which is within noise, for more memory"
    return f"{slower:.1%} slower than the chosen one"


def _nothing_fits(baseline: Choice, scored: Sequence[Scored], choices: Sequence[Choice]) -> str:
    """Say what comes closest: what fits and is not ours to run, the fastest first, else what needs the least memory."""
    keeps = f"Keep {choice_name(baseline)}: " if baseline.feasible else ""
    nothing = "nothing else fits" if keeps else "Nothing fits"
    first = next((choice for choice in choices if choice.feasible), None)
    if first is None:
        by_memory = [choice for item, choice in zip(scored, choices, strict=True) if item.exceeds_memory]
        least = min(by_memory or choices, key=lambda choice: choice.predicted.memory_bytes)
        return f"{keeps}{nothing}, not even {choice_name(least)}: it {least.reason}."
    name, names = choice_name(first), ", ".join(first.exact_frameworks)
    settings = f"by the settings of {names}"
    if first.exports.get(RUNTIME) == Fidelity.EXACT:
        return (
            f"{keeps}{nothing} that has been timed on this kind of device; {name} does, by `paro-advise run`: "
            f"experimental, and --allow-untested lets a plan choose it{f'; or {settings}' if names else ''}."
        )
    return f"{keeps}{nothing} that `paro-advise run` trains with; {name} does, {settings}."


def _text(
    verdict: Verdict, baseline: Choice, chosen: Choice, gain: float, field: RankedCandidates, *, keeps: bool
) -> str:
    name, now, error_pct = choice_name(chosen), choice_name(baseline), field.replay_error_pct
    ahead = _ahead(chosen)
    match verdict:
        case Verdict.KEEP if keeps:
            return (
                f"Keep {now}: with its own step predicted in the same way, no other that fits is faster by what counts "
                "as a difference. Speed-ups compare with the step as measured."
            )
        case Verdict.KEEP:
            today = field.usable_today
            is_beaten = today is not None and median_us(field.baseline) > GAIN_RATIO * median_us(today)
            is_ours = any(today is item for item in field.eligible)
            is_others = is_beaten and not is_ours
            which = "nothing that `paro-advise run` trains with" if is_others else "no alternative that fits"
            return f"Keep {now}: {which} is faster by what counts as a difference."
        case Verdict.CHANGE:
            broken = "" if baseline.feasible else f" {now} {baseline.reason}."
            return f"{_change(baseline, chosen)}: predicted {ahead}{_memory(baseline, chosen)}.{broken}"
        case _ if abs(error_pct) > HOPELESS_PCT:
            return (
                f"Measure first: replaying this run misses its measured time by {error_pct:+.0f} %. The model does not "
                "describe it, and none of the predicted times can be relied on."
            )
        case _ if abs(error_pct) > GATE_PCT:
            looks = (
                f"{name} looks best"
                if chosen.predicted.speedup.p50 > 1 and not keeps
                else "none looks faster than the run as it is"
            )
            return (
                f"Measure first: replaying this run misses its measured time by {error_pct:+.0f} %, so numbers would "
                f"mislead; {looks}."
            )
        case _ if not baseline.feasible:
            return f"Measure first: {now} {baseline.reason}. Of what fits, {name} looks best, {ahead}."
        case _:
            return (
                f"Measure first: {name} looks best, {ahead}, with a probability of {gain:.2f} of a speed-up above "
                f"{GAIN_RATIO - 1:.0%}."
            )


def _beside(
    verdict: Verdict, baseline: Choice, chosen: Choice, eligible: Sequence[Choice], surer: Choice | None
) -> str:
    """Say why the fastest by its median is not the one that was chosen; "" where it is, or is the surer one."""
    if verdict == Verdict.KEEP:
        others = [choice for choice in eligible if not same_way(baseline, choice)]
        quickest = max(others, key=lambda choice: choice.predicted.speedup.p50, default=baseline)
        speedup = quickest.predicted.speedup
        if speedup.p50 < GAIN_RATIO:
            return ""
        return (
            f" {choice_name(quickest)} is predicted {speedup.p50:.2f}x ({speedup.p10:.2f} to {speedup.p90:.2f}): step "
            f"times within {EQUAL_SHARE:.0%} of each other count as equal, and the least memory decides."
        )
    quickest = max(eligible, key=lambda choice: choice.predicted.speedup.p50)
    if quickest is surer or quickest.predicted.speedup.p50 < NAMED_RATIO * chosen.predicted.speedup.p50:
        return ""
    return (
        f" {choice_name(quickest)} is predicted {quickest.predicted.speedup.p50:.2f}x, which is no difference beyond "
        "noise, and takes more memory."
    )


def _surer(field: RankedCandidates, chosen: Scored | None, choices: Mapping[int, Choice]) -> Choice | None:
    """Return the fastest of those whose gain is as sure as a change needs it, beside the chosen one; None for none."""
    others = [item for item in field.eligible if item is not chosen]
    worth = [item for item in others if median_us(field.baseline) >= GAIN_RATIO * median_us(item)]
    sure = [item for item in worth if _gain(field.baseline, item) >= GAIN_PROBABILITY]
    if not sure or field.baseline.reason or abs(field.replay_error_pct) > GATE_PCT:
        return None
    return choices[id(min(sure, key=median_us))]


def _surer_text(surer: Choice | None, best: Choice | None) -> str:
    if surer is None:
        return ""
    is_less = best is None or surer.predicted.step_time_us.p50 > best.predicted.step_time_us.p50
    return f" Surer, {'and less' if is_less else 'for more memory'}: {choice_name(surer)}, {_ahead(surer)}."


def _ahead(chosen: Choice) -> str:
    speedup = chosen.predicted.speedup
    return f"speed-up {speedup.p50:.2f}x ({speedup.p10:.2f} to {speedup.p90:.2f})"


def _first_lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _change(baseline: Choice, chosen: Choice) -> str:
    same = (baseline.triple, baseline.group_size, baseline.variant, baseline.offload) == (
        chosen.triple,
        chosen.group_size,
        chosen.variant,
        chosen.offload,
    )
    changes = []
    if baseline.reduces_each_micro_batch:
        changes.append(
            "reduce gradients once a step in place of every micro-batch (`run` does; DDP by no_sync, FSDP2 by "
            "set_requires_all_reduce; FSDP1's no_sync also keeps whole gradients, for more memory)"
        )
    if chosen.collectives != baseline.collectives:
        is_ho_ring = chosen.collectives == CollectiveBackend.HO_RING
        changes.append(f"replace its collectives by {'HO-Ring' if is_ho_ring else 'those of the backend'}")
    if same and changes:
        return f"Keep {choice_name(baseline)}; {' and '.join(changes)}"
    once = ""
    if baseline.reduces_each_micro_batch and not chosen.reduces_each_micro_batch and chosen.triple[1] != "G":
        once = f", which sums gradients {'between groups ' if chosen.triple[1] == 'I' else ''}once a step"
    is_known = (baseline.triple, baseline.group_size) == (chosen.triple, chosen.group_size)
    return f"Change {choice_name(baseline)} to {choice_name(chosen, is_known=is_known)}{once}"


def _memory(baseline: Choice, chosen: Choice) -> str:
    before, after = baseline.predicted, chosen.predicted
    more, when = after.memory_bytes - before.memory_bytes, ""
    if before.peak_bytes is not None and after.peak_bytes is not None:
        more, when = after.peak_bytes - before.peak_bytes, " at the peak"
    if bytes_text(abs(more)) == bytes_text(0):
        return ", with the same memory"
    return f", {bytes_text(abs(more))} {'more' if more > 0 else 'less'} memory per rank{when}"


def _confidence_text(error_pct: float, *, is_described: bool) -> str:
    if is_described:
        return "no trace was read: all numbers follow from the description; measure before you rely on them"
    gate = "within" if abs(error_pct) <= GATE_PCT else "beyond"
    off = signed_text(error_pct)
    return f"replaying the traced step reproduces its time to {off} %, {gate} the {GATE_PCT:.0f} % tolerance"


def _probes(calibration: Calibration, caveat: str) -> tuple[str, ...]:
    """Return what to measure so that the answer gets certain, the most useful first."""
    found: list[str] = []
    if calibration.is_described:
        return ("a trace of a few steps of the run, of one rank per node: it tells exposed communication and links",)
    if caveat == _DEALT_OUT:
        started = "torchrun does so; mpirun --map-by slot, srun --distribution=block"
        return (f"the same run with ranks started node by node ({started})",)
    probe = "-m paro_advise.runtime.probe"
    nodes, per_node = calibration.num_nodes, calibration.ranks_per_node
    if calibration.intra_gbps.source == EstimateSource.PRIOR and per_node > 1:
        found.append(
            f"intra-node bandwidth, on one node: torchrun --nproc-per-node {per_node} {probe} > inside.txt, "
            "then recommend with inside.txt beside the traces"
        )
    if calibration.inter_gbps.source == EstimateSource.PRIOR and nodes > 1:
        found.append(
            f"inter-node bandwidth, on all of them: torchrun --nnodes {nodes} --nproc-per-node {per_node} ... "
            f"{probe} > between.txt, then recommend with between.txt beside the traces"
        )
    if calibration.transfer_us is None and calibration.seen_share < 1:
        found.insert(
            0, "the same run with traces of more ranks, one a node at least, so that waiting is told from moving"
        )
    if not found:
        found.append("a second trace of three or more steps, of one rank per node, so that the spread gets known")
    return tuple(found)
