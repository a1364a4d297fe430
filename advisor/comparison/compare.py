"""Compares two runs: what changed, how sure that is, and whether the plan was right (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.model import StepTime
from paro_advise.advisor.comparison.acceptance import Thresholds, judge
from paro_advise.advisor.comparison.bootstrap import Change, change_between, typical
from paro_advise.advisor.comparison.comparability import check_comparability, work_caveat
from paro_advise.advisor.comparison.constants import MIN_SAMPLES, RANGE_TEXT, REAL_CHANGE_PCT, REPEATS_PCT
from paro_advise.advisor.comparison.long_steps import have_long_steps, long_steps_text, overall_verdict
from paro_advise.advisor.comparison.metrics import mean_us, metric_of
from paro_advise.advisor.comparison.model import (
    FORMAT,
    ChangeVerdict,
    CollectiveChange,
    Comparison,
    Metric,
    Predicted,
    Side,
)
from paro_advise.advisor.comparison.other_work import other_work_text, tokens_of_step
from paro_advise.advisor.comparison.parity import parity_of
from paro_advise.advisor.comparison.rank_parts import (
    WAITING,
    common_ranks,
    exposed_us,
    over_ranks,
    ranks_caveat,
    unattributed_states,
)
from paro_advise.core.model_state import MODEL_STATES
from paro_advise.core.plural import plural
from paro_advise.errors import StalePlanError
from paro_advise.policies.plan import Verdict, same_way
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.trace_parsers.notice import Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry
    from paro_advise.policies.plan import Choice, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the user adds to the traces.

    Attributes:
        thresholds: acceptance criteria.
        allow_unlike: facts in which the runs may differ.
        price_per_gpu_hour: in any currency; None for no cost.
        watts_per_gpu: mean power; None for no energy.
        device_memory_bytes: None for what the runs say.
    """

    thresholds: Thresholds = field(default_factory=Thresholds)
    allow_unlike: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None
    watts_per_gpu: float | None = None
    device_memory_bytes: float | None = None


def compare(before: Analysis, after: Analysis, plan: Plan | None, terms: Terms | None = None) -> Comparison:
    """Compare two runs.

    Args:
        before, after: their analyses.
        plan: that led from one to the other, to hold its predictions against; None without.
        terms: see Terms.

    Raises:
        UnlikeRunsError: they did not do the same work.
    """
    terms = terms or Terms()
    unlike = check_comparability(before, after, terms.allow_unlike)
    if plan is not None:
        _check_plan(plan, before)
    sides, paired = _sides(before, after)
    metrics = _metrics(before, after, sides, terms, paired=paired)
    by_name = {metric.name: metric for metric in metrics}
    parity = parity_of(before, after)
    device = terms.device_memory_bytes or after.run.device_memory_bytes
    step, times = by_name["step_time"], [side.step_time_us for side in sides]
    tested = _tested_choice(plan, after)
    other_work = other_work_text(before, after, step, by_name["throughput"])
    untested = _why_untested(plan, tested, after, step)
    if other_work and tested is not None:
        untested = "The plan is one for steps of the run before: its prediction was not tested."
    predicted = () if untested else _predicted_step(tested, step)
    return Comparison(
        format=FORMAT.name,
        format_version=FORMAT.version,
        before=sides[0],
        after=sides[1],
        metrics=metrics,
        collectives=_collectives(before, after),
        parity=parity,
        predicted_vs_measured=predicted,
        acceptance=judge(terms.thresholds, by_name["throughput"], parity, sides[1].peak_memory_bytes, device),
        verdict=by_name["throughput"].verdict if other_work else overall_verdict(step, by_name["throughput"], times),
        text=(f"{other_work} {untested}".rstrip() if other_work else _text(step, sides, tested, untested))
        + (_native_text(plan, tested) if predicted else "")
        + long_steps_text(by_name["throughput"], times)
        + work_caveat(before, after)
        + ranks_caveat(before, after),
        unlike=unlike,
        plan=plan,
    )


def _check_plan(plan: Plan, before: Analysis) -> None:
    """Make sure that a plan was made for such a run.

    Raises:
        StalePlanError: it was not.
    """
    facts = plan.preconditions
    for name, planned, found in (
        ("world_size", facts.world_size, before.run.world_size),
        ("micro_batches", facts.micro_batches, before.run.micro_batches),
    ):
        if found is not None and found != planned:
            raise StalePlanError(
                f"the plan must be one for these runs: made for {name} {planned}, they have {found}",
                where=f"plan {plan.plan_id}",
                hint="give the plan that `recommend` made of the run before",
            )


def _timed(analysis: Analysis) -> dict[int, float]:
    steps = analysis.captured.steps if analysis.captured else ()
    return {step.step: step.step_us for step in steps if step.timed and step.step_us and step.step_us > 0}


def _sides(before: Analysis, after: Analysis) -> tuple[tuple[Side, Side], bool]:
    """Return both runs with the steps to judge, and whether these are pairs.

    Steps of equal numbers see the same data: where most are common, the others are left out.
    """
    first, second = _timed(before), _timed(after)
    if not (first and second):
        profiled = [tuple(time for time in run.step_time_us.recorded if time > 0) for run in (before, after)]
        return (_side(before, profiled[0], "profiled"), _side(after, profiled[1], "profiled")), False
    common = sorted(set(first) & set(second))
    paired = len(common) >= MIN_SAMPLES and 2 * len(common) >= max(len(first), len(second))
    if paired:
        first, second = ({step: times[step] for step in common} for times in (first, second))
    one, other = (tuple(times.values()) for times in (first, second))
    return (_side(before, one, "unprofiled"), _side(after, other, "unprofiled")), paired


def _side(analysis: Analysis, values: tuple[float, ...], source: str) -> Side:
    return Side(
        run=analysis.run,
        step_time_us=StepTime.of(values),
        steps_source=source,
        num_steps=len(values),
        breakdown_us=analysis.breakdown_us,
        states=analysis.states,
        peak_memory_bytes=analysis.captured.peak_memory_bytes if analysis.captured else None,
        warnings=tuple(item for item in analysis.data_quality if item.severity != Severity.INFO),
    )


def _metrics(
    before: Analysis, after: Analysis, sides: tuple[Side, Side], terms: Terms, *, paired: bool
) -> tuple[Metric, ...]:
    first, second = (side.step_time_us.values for side in sides)
    steps_us = [typical(values) if values else None for values in (first, second)]
    change = change_between(first, second, paired=paired)
    found = [metric_of("step_time", "us", steps_us[0], steps_us[1], change, samples="steps")]
    if have_long_steps([side.step_time_us for side in sides]):  # what a run does in an hour, it does with its stalls
        steps_us = [math.fsum(values) / len(values) if values else None for values in (first, second)]
        change = change_between(first, second, paired=paired, trim=0.0)
        found.append(metric_of("step_time_mean", "us", steps_us[0], steps_us[1], change, samples="steps"))
    found += _throughput(before, after, steps_us, change, terms)
    found += [
        over_ranks(before, after, name, get)
        for name, get in (
            ("compute", lambda rank: rank.compute_us),
            ("exposed_communication", lambda rank: rank.exposed_communication_us),
            ("idle", lambda rank: rank.idle_us),
            (WAITING, lambda rank: rank.wait_us),
        )
    ]
    are_alike = common_ranks(before, after) is None
    unseen = {*unattributed_states(before), *unattributed_states(after)}
    for state in MODEL_STATES:
        found.append(over_ranks(before, after, f"{state}_exposed", partial(exposed_us, state, unseen)))
        entries = before.states.get(state), after.states.get(state)
        for part in ("hidden", "wait"):
            is_known = part != "wait" or are_alike
            # What does not communicate hides nothing, and waits for nobody.
            told = [
                getattr(entry, f"{part}_us") if is_known and entry and (entry.count or state not in unseen) else None
                for entry in entries
            ]
            values = [None if value is None else mean_us([value]) for value in told]
            found.append(metric_of(f"{state}_{part}", "us", values[0], values[1], lower_is_better=None))
    found += [
        metric_of(
            "overlap_share", "share", before.efficiency.overlap_share, after.efficiency.overlap_share,
            lower_is_better=None,
        ),
        metric_of(
            "inter_node_busy_share", "share", before.efficiency.inter_node_busy_share,
            after.efficiency.inter_node_busy_share, lower_is_better=None,
        ),
        metric_of("peak_memory", "bytes", sides[0].peak_memory_bytes, sides[1].peak_memory_bytes, lower_is_better=None),
    ]  # fmt: skip
    device = terms.device_memory_bytes or after.run.device_memory_bytes
    if device:
        rooms = [device - side.peak_memory_bytes if side.peak_memory_bytes else None for side in sides]
        found.append(metric_of("memory_headroom", "bytes", rooms[0], rooms[1], lower_is_better=None))
    return tuple(found)


def _inverse(change: Change | None) -> Change | None:
    """Return the change of the reciprocal."""
    if change is None:
        return None
    return Change(value=1 / (1 + change.value) - 1, low=1 / (1 + change.high) - 1, high=1 / (1 + change.low) - 1)


def _scale(change: Change | None, factor: float) -> Change | None:
    """Return the change of a quantity that also grew by a factor."""
    if change is None:
        return None
    value, low, high = ((1 + end) * factor - 1 for end in (change.value, change.low, change.high))
    return Change(value=value, low=low, high=high)


def _throughput(
    before: Analysis,
    after: Analysis,
    steps_us: Sequence[float | None],
    change: Change | None,
    terms: Terms,
) -> list[Metric]:
    """Return throughput, device hours, cost and energy, all per token where tokens are known."""
    work = [tokens_of_step(before), tokens_of_step(after)]
    per_step = work if all(work) else [1.0, 1.0]
    unit = "tokens/s" if all(work) else "steps/s"
    what = "million tokens" if all(work) else "thousand steps"
    scale = 1e6 if all(work) else 1e3
    # Runs that the user allows to differ do other amounts of work in a step, on other numbers of ranks.
    grown = (work[1] or 1.0) / (work[0] or 1.0) if all(work) else 1.0
    if not all(work) and before.run.world_size != after.run.world_size:
        change = None  # more ranks may do more in a step, or the same
    dearer, faster = None, _scale(_inverse(change), grown)
    if before.run.world_size and after.run.world_size:
        dearer = _scale(change, after.run.world_size / before.run.world_size / grown)
    rates: list[float | None] = [
        amount / time * 1e6 if amount and time else None for amount, time in zip(per_step, steps_us, strict=True)
    ]
    found = [
        metric_of(
            "throughput",
            unit,
            rates[0],
            rates[1],
            faster,
            lower_is_better=False,
            samples="steps",
        ),
    ]
    hours = [
        analysis.run.world_size * scale / rate / 3600 if rate and analysis.run.world_size else None
        for analysis, rate in zip((before, after), rates, strict=True)
    ]
    found.append(metric_of("device_hours", f"h per {what}", hours[0], hours[1], dearer, samples="steps"))
    if terms.price_per_gpu_hour is not None:
        cost = [value * terms.price_per_gpu_hour if value is not None else None for value in hours]
        found.append(metric_of("cost", f"per {what}", cost[0], cost[1], dearer, samples="steps"))
    if terms.watts_per_gpu is not None:
        energy = [value * terms.watts_per_gpu / 1e3 if value is not None else None for value in hours]
        found.append(metric_of("energy", f"kWh per {what}", energy[0], energy[1], dearer, samples="steps"))
    return found


def _collectives(before: Analysis, after: Analysis) -> tuple[CollectiveChange, ...]:
    keys: dict[tuple[str, str], None] = {}
    for analysis in (before, after):
        for entry in analysis.collectives:
            if entry.state in MODEL_STATES:
                keys[entry.state, entry.op] = None
    found = []
    for state, op in sorted(keys, key=lambda key: (MODEL_STATES.index(key[0]), key[1])):
        one, other = (_largest(analysis.collectives, state, op) for analysis in (before, after))
        found.append(
            CollectiveChange(
                state=state,
                op=op,
                count_before=_sum(before.collectives, state, op),
                count_after=_sum(after.collectives, state, op),
                p50_us_before=one.p50_us if one else None,
                p50_us_after=other.p50_us if other else None,
                p95_us_before=one.p95_us if one else None,
                p95_us_after=other.p95_us if other else None,
                p99_us_before=one.p99_us if one else None,
                p99_us_after=other.p99_us if other else None,
            )
        )
    return tuple(found)


def _largest(entries: Sequence[CollectiveEntry], state: str, op: str) -> CollectiveEntry | None:
    """Return the kind of a state and operation that takes longest in all."""
    fitting = [entry for entry in entries if (entry.state, entry.op) == (state, op)]
    return max(fitting, key=lambda entry: entry.count * (entry.p50_us or 0.0), default=None)


def _sum(entries: Sequence[CollectiveEntry], state: str, op: str) -> float | None:
    return math.fsum(entry.count for entry in entries if (entry.state, entry.op) == (state, op)) or None


def _took_place(plan: Plan | None, after: Analysis) -> bool:
    """Tell whether the run after is the one that the plan recommends, as far as its traces tell."""
    if plan is None or after.run.strategy.triple_at_rest is None:
        return True
    world = plan.preconditions.world_size
    # In a group of all ranks, I is G.
    planned, found = (
        triple.replace("I", "G") if size == world else triple
        for triple, size in (
            (plan.chosen.triple, plan.chosen.group_size),
            (after.run.strategy.triple_at_rest, after.run.strategy.group_size),
        )
    )
    return found == planned


def _tested_choice(plan: Plan | None, after: Analysis) -> Choice | None:
    """Return what of a plan the run after tests, None for nothing.

    Where `paro-advise run` has no HO-Ring to run, it uses the backend's own collectives, of which the plan has a
    prediction as well.
    """
    if plan is None:
        return None
    may_have_run = not after.run.backend or after.run.collectives_use_cores
    if plan.chosen.collectives != CollectiveBackend.HO_RING or may_have_run:
        return plan.chosen
    native = replace(plan.chosen, collectives=CollectiveBackend.NATIVE)
    return next((choice for choice in plan.candidates if same_way(choice, native)), None)


def _why_untested(plan: Plan | None, tested: Choice | None, after: Analysis, step: Metric) -> str:
    """Say why a plan's prediction was not tested, "" where it was."""
    if plan is None:
        return ""
    if plan.verdict == Verdict.KEEP:
        return "The plan keeps the run as it is: there is no prediction to test."
    if plan.verdict == Verdict.MEASURE_FIRST:
        return "The plan says to measure first: it has no prediction to test."
    if not _took_place(plan, after):
        ran = after.run.strategy.triple_at_rest
        return f"The plan recommends {plan.chosen.triple}, but {ran} ran: its prediction was not tested."
    if tested is None:
        return "The plan predicts HO-Ring, but the backend's own collectives ran: its prediction was not tested."
    if step.verdict == ChangeVerdict.UNCLEAR:
        return "Too little is known of the step times to test the plan's prediction."
    return ""


def _predicted_step(tested: Choice | None, step: Metric) -> tuple[Predicted, ...]:
    if tested is None or not step.before or not step.after:
        return ()
    chosen = tested.predicted
    found = []
    for name, guess, measured in (
        ("step_time_us", chosen.step_time_us, step.after),
        ("speedup", chosen.speedup, step.before / step.after),
    ):
        found.append(
            Predicted(
                name=name,
                predicted=guess.p50,
                low=guess.p10,
                high=guess.p90,
                measured=measured,
                inside=guess.p10 <= measured <= guess.p90,
            )
        )
    return tuple(found)


def _repeats_caveat(step: Metric) -> str:
    """Say of a small change that a range over the steps of two recordings does not hold what repeats differ by."""
    if step.low_pct is None or step.high_pct is None or min(abs(step.low_pct), abs(step.high_pct)) >= REPEATS_PCT:
        return ""
    return (
        f" The range is that of these two recordings; repeats of a job may differ by {REPEATS_PCT:g} %: record both "
        "again to be sure."
    )


def _native_text(plan: Plan | None, tested: Choice | None) -> str:
    """Say that what was tested is not the prediction for the plan's collectives, "" where it is."""
    if plan is None or tested is None or tested.collectives == plan.chosen.collectives:
        return ""
    return " That is its prediction for the backend's own collectives, which ran in place of HO-Ring."


def _text(step: Metric, sides: tuple[Side, Side], tested: Choice | None, untested: str) -> str:
    from paro_advise.advisor.wording.quantities import signed_text, time_text

    if not step.before or not step.after or step.change_pct is None:
        missing = [side for side, time in (("before", step.before), ("after", step.after)) if not time]
        which = "neither run has" if len(missing) == 2 else f"the run {''.join(missing)} has no"
        return f"Cannot tell: {which} timed steps."
    span = f"{time_text(step.before)} -> {time_text(step.after)}"
    pct = f"{signed_text(step.change_pct)} %"
    if step.low_pct is not None and step.high_pct is not None:
        pct += f", {RANGE_TEXT} {signed_text(step.low_pct)} to {signed_text(step.high_pct)} %"
    ratio = f"speed-up {step.before / step.after:.2f}x"
    match step.verdict:
        case ChangeVerdict.BETTER:
            text = f"Faster: step {span} ({pct}), {ratio}.{_repeats_caveat(step)}"
        case ChangeVerdict.WORSE:
            text = f"Slower: step {span} ({pct}), {ratio}.{_repeats_caveat(step)}"
        case ChangeVerdict.SAME:
            low, high = step.low_pct, step.high_pct
            is_beyond = low is not None and high is not None and not low <= 0 <= high
            least = f"less than the {REAL_CHANGE_PCT:g} % from which a change counts"
            text = f"The same {f'but for {least}' if is_beyond else 'within noise'}: step {span} ({pct})."
        case _:
            counts = f"{plural(sides[0].num_steps, 'step')} before and {sides[1].num_steps} after"
            few = min(side.num_steps for side in sides) < MIN_SAMPLES
            why = f"a range needs at least {MIN_SAMPLES} of each run" if few else "too noisy"
            text = f"Cannot tell: step {span} ({pct}), based on {counts}: {why}."
    if untested:
        text += f" {untested}"
    elif tested is not None:
        guess, measured = tested.predicted.speedup, step.before / step.after
        where = (
            "as predicted"
            if guess.p10 <= measured <= guess.p90
            else ("better than predicted" if measured > guess.p90 else "worse than predicted")
        )
        text += f" The plan predicted {guess.p50:.2f}x ({guess.p10:.2f} to {guess.p90:.2f}): {where}."
    return text
