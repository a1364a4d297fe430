"""The before/after report: a view of a comparison, then one template."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.regimes import regime_text
from paro_advise.advisor.comparison.constants import NARROW_RANGE_PCT, RANGE_TEXT, REAL_CHANGE_PCT, REPEATS_PCT
from paro_advise.advisor.comparison.model import ChangeVerdict
from paro_advise.advisor.rendering.charts import Bar, Segment, lines, stacked_bars
from paro_advise.advisor.rendering.comparisons.waterfall import waterfall
from paro_advise.advisor.rendering.constants import SHOWN_INPUTS
from paro_advise.advisor.rendering.page import Cell, Row, make_table, number, render_page
from paro_advise.advisor.rendering.plans.plan_page import ablation_table, alternative_table
from paro_advise.advisor.rendering.ranks.rank_parts import STEP_PARTS
from paro_advise.advisor.rendering.texts.comparison_text import change_text, name_text, value_text
from paro_advise.advisor.rendering.timelines.lanes_chart import lanes_chart, lanes_legend
from paro_advise.advisor.wording.quantities import bytes_text, count_text, signed_text, time_text
from paro_advise.core.model_state import MODEL_STATES, STATES, State
from paro_advise.core.plural import plural
from paro_advise.policies.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from paro_advise.advisor.comparison.model import Comparison, Metric, Side
    from paro_advise.advisor.rendering.page import Provenance, Table
    from paro_advise.advisor.timelines.model import RankStep, Timeline
    from paro_advise.policies.plan import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Timelines:
    """The steps of both runs, None where they are not known."""

    before: Timeline | None = None
    after: Timeline | None = None


def render_comparison(comparison: Comparison, timelines: Timelines, provenance: Provenance) -> str:
    """Return the before/after report as one HTML page."""
    before, after, plan = comparison.before, comparison.after, comparison.plan
    typical = _typical_steps(timelines)
    metrics = {metric.name: metric for metric in comparison.metrics}
    return render_page(
        "comparison.html.j2",
        comparison,
        provenance,
        title=f"{after.run.framework}: before and after",
        subtitle=f"before: {_run_text(before)}; after: {_run_text(after)}",
        verdict=comparison.text,
        confidence=_confidence(comparison),
        figures=[
            _figure(metrics[name], label)
            for name, label in (
                ("step_time", "step"),
                ("exposed_communication", f"exposed communication{', profiled' * any(_slowdowns(comparison))}"),
                ("peak_memory", "peak memory of a rank"),
                ("throughput", "throughput"),
            )
        ],
        split_chart=_split_chart(before, after),
        split_legend=STEP_PARTS,
        waterfall_chart=_waterfall(before, after),
        split_note=_split_note(comparison),
        changes=_changes(comparison),
        predicted_table=_predicted_table(comparison),
        metric_table=_metric_table(comparison),
        state_chart=_state_chart(before, after),
        state_legend=[("exposed", "exposed"), ("hidden", "overlapped with compute")],
        timeline_charts=_timelines(typical),
        timeline_legend=lanes_legend([item for _, item in typical]),
        parity_chart=_parity_chart(comparison),
        parity_text=_parity_text(comparison),
        collective_table=_collective_table(comparison),
        plan=plan,
        evidence=_evidence(comparison),
        alternative_table=alternative_table(plan) if plan else None,
        ablation_table=ablation_table(plan) if plan else None,
        acceptance_table=_acceptance_table(comparison),
        saved=_saving(comparison),
        method=_METHOD,
        provenance_table=_provenance_table(comparison, provenance),
    )


def _run_text(side: Side) -> str:
    run = side.run
    uses_groups = run.strategy.at_rest is not None and run.strategy.at_rest.uses_groups
    group = f" in groups of {run.strategy.group_size}" if run.strategy.group_size and uses_groups else ""
    return f"{run.framework}, {run.strategy.triple_at_rest or 'strategy unknown'}{group}, {run.world_size or '?'} ranks"


def _confidence(comparison: Comparison) -> str:
    parts = []
    for name, side in (("before", comparison.before), ("after", comparison.after)):
        profiled = "" if side.steps_source == "unprofiled" else ", slowed by the profiler"
        ranks = f"{len(side.run.ranks)} of {side.run.world_size or '?'} ranks traced"
        parts.append(f"{name}: {plural(side.num_steps, 'step')}{profiled}, {ranks}")
    text = "Based on " + "; ".join(parts) + "."
    if comparison.unlike:
        text += f" The runs differ: {comparison.unlike_text}."
    return text


def _figure(metric: Metric, label: str) -> dict[str, str]:
    return {
        "label": label,
        "before": value_text(metric.before, metric.unit),
        "after": value_text(metric.after, metric.unit),
        "change": "" if metric.change_pct is None else f"{signed_text(metric.change_pct)} %",
    }


def _slowdowns(comparison: Comparison) -> list[float]:
    """Return how much slower the profiled steps were than those that the step time is of, 0 where it is of them."""
    found = []
    for side in (comparison.before, comparison.after):
        times = side.steps_source == "unprofiled" and side.breakdown_us.compute is not None and side.step_time_us.median
        found.append(side.breakdown_us.step_us / times if times else 0.0)
    return found


def _split_note(comparison: Comparison) -> str:
    one, other = _slowdowns(comparison)
    if not (one and other):
        return ""
    return (
        f"The bars are of profiled steps, {one:.2f}x as long as others before and {other:.2f}x after; the step times "
        "above are of steps without the profiler."
    )


def _split_chart(before: Side, after: Side) -> Markup:
    bars = []
    for name, side in (("before", before), ("after", after)):
        parts = side.breakdown_us
        values = (parts.compute, parts.exposed_communication, parts.other, parts.idle)
        bars.append(
            Bar(
                label=name,
                segments=tuple(
                    Segment(kind=kind, value_us=value or 0.0, name=text)
                    for (kind, text), value in zip(STEP_PARTS, values, strict=True)
                ),
            )
        )
    exposed = [time_text(side.breakdown_us.exposed_communication) for side in (before, after)]
    title = f"Exposed communication {exposed[0]} before and {exposed[1]} after"
    return stacked_bars("chart-split", title, "Parts of the mean profiled step", bars)


def _waterfall(before: Side, after: Side) -> Markup:
    return waterfall("chart-waterfall", *(_parts(side) for side in (before, after)))


def _parts(side: Side) -> list[tuple[str, float]]:
    """Return compute, the exposed communication of each state and what else a step consists of (us).

    States that are exposed at the same time both count in their own figures; here they share what the step loses.
    """
    parts = side.breakdown_us
    exposed = parts.exposed_communication or 0.0
    of_state = {state: (side.states[state].exposed_us or 0.0) if state in side.states else 0.0 for state in STATES}
    whole = sum(of_state.values())
    shares = {state: exposed * value / whole if whole else 0.0 for state, value in of_state.items()}
    shares[State.UNKNOWN] += 0.0 if whole else exposed
    return [
        ("compute", parts.compute or 0.0),
        *((f"exposed, {state}", value) for state, value in shares.items()),
        ("memory copies and sync", parts.other or 0.0),
        ("idle", parts.idle or 0.0),
    ]


def _state_chart(before: Side, after: Side) -> Markup:
    bars = []
    for state in MODEL_STATES:
        for name, side in (("before", before), ("after", after)):
            entry = side.states.get(state)
            bars.append(
                Bar(
                    label=f"{state} {name}"[-18:],
                    segments=(
                        Segment(kind="exposed", value_us=(entry.exposed_us or 0.0) if entry else 0.0, name="exposed"),
                        Segment(kind="hidden", value_us=(entry.hidden_us or 0.0) if entry else 0.0, name="overlapped"),
                    ),
                )
            )
    return stacked_bars("chart-states", "Communication of each state, before over after", "Per rank and step", bars)


def _typical_steps(timelines: Timelines) -> list[tuple[str, RankStep]]:
    """Return the typical step of the lowest rank that both runs show, for each run that shows any."""
    sides = [(name, side) for name, side in (("before", timelines.before), ("after", timelines.after)) if side]
    common = set.intersection(*(set(side.ranks) for _, side in sides)) if sides else set()
    found = [(name, side.of(min(common or side.ranks), side.step)) for name, side in sides]
    return [(name, replace(step, shift_us=0.0)) for name, step in found if step is not None]


def _timelines(steps: Sequence[tuple[str, RankStep]]) -> list[tuple[str, Markup]]:
    high = max((item.wall_us for _, item in steps), default=0.0)
    charts = [
        (
            f"{name}: {item.step} of rank {item.rank}",
            lanes_chart(
                f"chart-timeline-{name}",
                f"The step {name} takes {time_text(item.wall_us)} under the profiler",
                "One step by lanes, on the scale of the longer one",
                [item],
                high,
            ),
        )
        for name, item in steps
    ]
    return [(name, drawn) for name, drawn in charts if drawn]


def _group(triple: str | None, size: int | None) -> str:
    """Return the size of a strategy's groups, of one without groups a word."""
    return str(size) if size and triple and Strategy.parse(triple).uses_groups else "no groups"


def _how_often(choice: Choice) -> str:
    return "each micro-batch" if choice.reduces_each_micro_batch else "once a step"


def _changes(comparison: Comparison) -> list[str]:
    """Return what changed as lines with a sign and a word, never colour alone."""
    plan, run = comparison.plan, comparison.after.run
    before, after = comparison.before.run.strategy, run.strategy
    if plan is None or not comparison.predicted_vs_measured:
        one, other = before.triple_at_rest, after.triple_at_rest
        pairs = [
            ("strategy", one, other),
            ("group size", _group(one, before.group_size), _group(other, after.group_size)),
            ("framework", comparison.before.run.framework, run.framework),
        ]
    else:
        now, planned = plan.baseline, plan.chosen
        pairs = [
            ("strategy", now.triple, planned.triple),
            ("group size", _group(now.triple, now.group_size), _group(planned.triple, planned.group_size)),
            ("collectives", now.collectives, planned.collectives),
        ]
        if now.triple == planned.triple:
            pairs.append(("gradients reduced", _how_often(now), _how_often(planned)))
    lines_ = [f"~ {name}: {one} -> {other}" for name, one, other in pairs if one != other]
    return lines_ or ["nothing that the traces show"]


def _predicted_table(comparison: Comparison) -> Table:
    rows = []
    for item in comparison.predicted_vs_measured:
        is_time = item.name == "step_time_us"
        texts = [
            time_text(value) if is_time else f"{value:.2f}x"
            for value in (item.predicted, item.low, item.high, item.measured)
        ]
        error = 100 * (item.measured / item.predicted - 1)
        rows.append(
            Row(
                cells=(
                    Cell(text="step time" if is_time else "speed-up"),
                    number(item.predicted, texts[0]),
                    Cell(text=f"{texts[1]} to {texts[2]}", css="n"),
                    number(item.measured, texts[3]),
                    Cell(text=f"{signed_text(error)} %", css="n"),
                    Cell(text="inside the range" if item.inside else "outside the range"),
                )
            )
        )
    names = ("what", "predicted #", "80 % range #", "measured #", "off by #", "range")
    return make_table("table-predicted", "What the plan predicted, and what was measured", names, rows)


def _metric_table(comparison: Comparison) -> Table:
    rows = [
        Row(
            id=f"metric-{metric.name}",
            cells=(
                Cell(text=name_text(metric)),
                number(metric.before, value_text(metric.before, metric.unit)),
                number(metric.after, value_text(metric.after, metric.unit)),
                number(metric.change_pct, change_text(metric)),
                Cell(text=metric.verdict, css=f"v-{metric.verdict}" if metric.verdict else ""),
                Cell(text=metric.samples),
            ),
        )
        for metric in comparison.metrics
        if metric.before is not None or metric.after is not None
    ]
    names = ("metric", "before #", "after #", f"change ({RANGE_TEXT}) #", "verdict", "range over")
    caption = "Times are means over ranks and steps; the step time is the mean of the middle half of the steps"
    return make_table("table-metrics", caption, names, rows)


def _collective_table(comparison: Comparison) -> Table:
    rows = []
    for item in comparison.collectives:
        cells = [Cell(text=item.state), Cell(text=item.op)]
        for one, other, is_time in (
            (item.count_before, item.count_after, False),
            (item.p50_us_before, item.p50_us_after, True),
            (item.p95_us_before, item.p95_us_after, True),
            (item.p99_us_before, item.p99_us_after, True),
        ):
            text = time_text if is_time else count_text
            cells += [number(value, "" if value is None else text(value)) for value in (one, other)]
        rows.append(Row(cells=tuple(cells)))
    names = ("state", "op", "calls before #", "after #", "p50 before #", "after #", "p95 before #", "after #",
             "p99 before #", "after #")  # fmt: skip
    caption = "Calls per rank and step; times of the kind of each state and operation that takes longest"
    return make_table("table-collectives", caption, names, rows)


def _parity_chart(comparison: Comparison) -> Markup | str:
    parity = comparison.parity
    if parity is None:
        return ""
    shown = [
        (step, one, other)
        for step, one, other in zip(parity.steps, parity.loss_before, parity.loss_after, strict=True)
        if math.isfinite(one) and math.isfinite(other)
    ]
    return lines(
        "chart-parity",
        _parity_text(comparison),
        "Loss of each step before (wide) and after (narrow)",
        [step for step, _, _ in shown],
        (("line-before", [one for _, one, _ in shown]), ("line-after", [other for _, _, other in shown])),
    )


def _parity_text(comparison: Comparison) -> str:
    parity = comparison.parity
    if parity is None or parity.loss_max_pct is None:
        return "Losses were not compared: both runs must be captured."
    text = f"Losses of {plural(parity.num_steps, 'step')} differ by at most {parity.loss_max_pct:.2g} %"
    if parity.num_diverged_before or parity.num_diverged_after:
        counts = f"{plural(parity.num_diverged_before, 'step')} before and {parity.num_diverged_after} after"
        text = f"The loss of {counts} is NaN or infinite. " + text
    if parity.gradient_norm_max_pct is not None:
        text += f", gradient norms by at most {parity.gradient_norm_max_pct:.2g} %"
    return text + "."


def _evidence(comparison: Comparison) -> list[tuple[str, str]]:
    """Return what the decision is based on: the regime of each state before."""
    return [
        (f"{state}: {regime_text(entry.regime)}", entry.text)
        for state in MODEL_STATES
        if (entry := comparison.before.states.get(state)) is not None and entry.count
    ]


def _acceptance_table(comparison: Comparison) -> Table:
    words = {True: ("pass", "v-pass"), False: ("fail", "v-fail"), None: ("not judged", "")}
    rows = []
    for item in comparison.asked_criteria:
        word, css = words[item.passed]
        rows.append(
            Row(
                cells=(
                    Cell(text=item.criterion),
                    number(item.threshold, "none" if item.threshold is None else f"{item.threshold:g}"),
                    number(item.measured, "unknown" if item.measured is None else f"{item.measured:.3g}"),
                    Cell(text=word, css=css),
                    Cell(text=item.text),
                )
            )
        )
    names = ("criterion", "limit #", "measured #", "result", "note")
    return make_table("table-acceptance", "Acceptance checks", names, rows)


def _saving(comparison: Comparison) -> str:
    """Return the device hours saved a day, with the formula."""
    one, other = comparison.step.before, comparison.step.after
    world = comparison.after.run.world_size
    if not one or not other or not world or comparison.verdict != ChangeVerdict.BETTER or comparison.unlike:
        return ""
    hours = 24 * world * (1 - other / one)
    return (
        f"Saves {hours:.3g} device-hours per day: 24 h x {world} devices x (1 - {time_text(other)} / {time_text(one)})."
    )


def _provenance_table(comparison: Comparison, provenance: Provenance) -> Table:
    pairs = [
        ("tool", f"paro-advise {provenance.version}, format {comparison.format_version}"),
        ("made", provenance.created_utc),
        ("command", provenance.command),
    ]
    if comparison.plan:
        pairs.append(("plan", comparison.plan.plan_id))
    for name, side in comparison.sides:
        pairs.append((name, f"{_run_text(side)}; {side.run.device_name or side.run.backend or 'device unknown'}"))
        pairs += [
            (f"{name}: input", f"{item.path}, {bytes_text(item.bytes)}, SHA-256 {item.sha256}")
            for item in side.run.inputs[:SHOWN_INPUTS]
        ]
        pairs += [(f"{name}: {item.severity} {item.code}", item.message) for item in side.warnings[:SHOWN_INPUTS]]
    rows = [
        Row(cells=(Cell(text=name), Cell(text=text, css="path" if "input" in name else ""))) for name, text in pairs
    ]
    return make_table("table-provenance", "Where the numbers come from", ("what", "value"), rows)


_METHOD = (
    (
        "Step times come from steps that ran without the profiler, after a warm-up of three, where a capture logged "
        "them; the split of a step, states and collectives come from the profiled ones, which the profiler slows."
    ),
    (
        f"A change is real when its {RANGE_TEXT} leaves out zero and it is {REAL_CHANGE_PCT:g} % or more; it is the "
        f"same when the range lies within {NARROW_RANGE_PCT:g} % either way; else it cannot be told. A part of a step "
        "is also the same where all ranks have equal values, or where its range is below a thousandth of the step. The "
        "range is "
        f"that of the two recordings: repeats of a job may differ by {REPEATS_PCT:g} %. A step time is the mean of the "
        "middle half of the steps (the interquartile mean), everything else the mean over ranks; changes are of just "
        "these values. Their ranges are those of a bootstrap over steps or ranks, widened for few samples; steps that "
        "vary together in both runs are paired, and steps that only one run has are left out where most are common."
    ),
    (
        "Losses are sums over the backward passes of a step, averaged over ranks; gradient norms are those of the "
        "whole model before clipping. Predictions carry an 80 % range: two in ten fall outside of it."
    ),
)
