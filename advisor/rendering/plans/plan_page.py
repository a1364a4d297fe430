"""A plan as tables: for its own page and for the before/after report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from paro_advise.advisor.prediction.constants import CAPACITY_SHARE, GAIN_RATIO
from paro_advise.advisor.rendering.charts import Point, scatter
from paro_advise.advisor.rendering.constants import FIRST_CANDIDATES, PAGE_CANDIDATES
from paro_advise.advisor.rendering.page import Cell, Row, make_table, number, render_page
from paro_advise.advisor.rendering.plans.scenario_parts import scenario_table, scenario_view
from paro_advise.advisor.rendering.texts.plan_text import ranks_name
from paro_advise.advisor.wording.quantities import bytes_text, time_text
from paro_advise.policies.ablation import ablations
from paro_advise.policies.frameworks.model import Fidelity
from paro_advise.policies.frameworks.registry import RUNTIME, exports_of
from paro_advise.policies.plan import Verdict, as_framework_runs, beside_the_run, same_way
from paro_advise.policies.strategy import CollectiveBackend, Strategy
from paro_advise.policies.strategy_name import collectives_name, grouped_triple, short_choice_name

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.advice.scenarios import Scenarios
    from paro_advise.advisor.rendering.page import Provenance, Table
    from paro_advise.policies.plan import Choice, Plan, Quantiles

_CHOICE_NAMES = (
    "collectives",
    "step #",
    "80 % range #",
    "speed-up #",
    "states and transients, at most #",
    "expected peak #",
    "sent across groups or nodes #",
)


def render_plan(plan: Plan, provenance: Provenance, scenarios: Scenarios | None = None) -> str:
    """Return a plan as one HTML page.

    Args:
        plan: the plan.
        provenance: see Provenance.
        scenarios: other clusters to look at, None for none.
    """
    measures_first = plan.verdict == Verdict.MEASURE_FIRST
    step = plan.chosen.predicted.step_time_us
    if plan.chosen.predicted.peak_bytes is not None:
        memory = ("expected peak memory of a rank", _peak_text(plan.chosen), _peak_text(plan.baseline))
    else:
        now, then = (bytes_text(choice.predicted.memory_bytes) for choice in (plan.baseline, plan.chosen))
        memory = ("states and transients of a rank, at most", then, now)
    figures = [
        ("predicted step", time_text(step.p50), time_text(plan.baseline.predicted.step_time_us.p50)),
        ("speed-up", _times(plan.chosen.predicted.speedup), ""),
        memory,
        (f"probability of a speed-up above {GAIN_RATIO - 1:.0%}", f"{plan.confidence.probability_gain:.2f}", ""),
    ]
    return render_page(
        "plan.html.j2",
        plan,
        provenance,
        title=f"plan {plan.plan_id}",
        subtitle=f"plan {plan.plan_id} for {plan.preconditions.world_size} ranks",
        plan=plan,
        measures_first=measures_first,
        scenarios=None if measures_first or scenarios is None else scenario_view(scenarios),
        scenario_table=None if measures_first or scenarios is None else scenario_table(scenarios),
        scripts=() if measures_first or scenarios is None else ("scenarios.js",),
        figures=[]
        if measures_first
        else [{"label": label, "value": value, "before": before} for label, value, before in figures],
        trade_chart=Markup("") if measures_first else trade_chart(plan),
        alternative_table=alternative_table(plan),
        ablation_table=ablation_table(plan),
        budget_table=budget_table(plan),
        outlook_table=outlook_table(plan),
        lever_table=lever_table(plan),
        answer_table=answer_table(plan),
        sensitivity_table=sensitivity_table(plan),
        export_table=_export_table(plan),
        ho_ring=ho_ring_text(plan),
    )


def trade_chart(plan: Plan) -> Markup:
    """Draw the step time of all candidates that fit against the memory of a rank."""
    peaks = plan.chosen.predicted.peak_bytes is not None
    title = "asked for" if plan.asked_for else "recommended"
    named: list[tuple[str, Choice | None, str]] = []
    named += [("chosen", plan.chosen, title)] if plan.verdict == Verdict.CHANGE else []
    named += [("now", plan.baseline, "now"), ("today", plan.switch_on_today, "fastest with a framework's own settings")]
    fitting = [item for item in beside_the_run(plan) if item.feasible]
    points = [_point("may" if choice.eligible else "not", choice, peaks=peaks) for choice in fitting]
    labelled: list[Choice] = []
    for kind, choice, text in named:
        if choice is not None and not any(same_way(choice, other) for other in labelled):
            labelled.append(choice)
            label = f"{text}: {short_choice_name(choice)}"
            points.append(_point(kind, choice, peaks=peaks, label=label))
    limit = plan.preconditions.device_memory_bytes
    runs_in = _held_bytes(plan.baseline, peaks=peaks) if plan.baseline.feasible else 0.0
    return scatter(
        "chart-trade",
        "Step time against memory",
        "One mark for each candidate that fits: a square for the run as it is, a diamond for the chosen one, a "
        "triangle for the fastest with a framework's own settings, discs for others, hollow where the plan may not "
        "choose them. Lines through marks are 80 % ranges.",
        points,
        memory="expected peak memory of a rank" if peaks else "states and transients of a rank, at most",
        limit_bytes=max(CAPACITY_SHARE * limit, runs_in) if limit else None,
    )


def _held_bytes(choice: Choice, *, peaks: bool) -> float:
    """Return what a rank holds: the expected peak, or states and transients at the most."""
    predicted = choice.predicted
    return predicted.peak_bytes if peaks and predicted.peak_bytes is not None else predicted.memory_bytes


def _point(kind: str, choice: Choice, *, peaks: bool, label: str = "") -> Point:
    held, step = _held_bytes(choice, peaks=peaks), choice.predicted.step_time_us
    name = f"{short_choice_name(choice)}: {time_text(step.p50)}, {bytes_text(held)}"
    return Point(
        kind=kind,
        num_bytes=held,
        time_us=step.p50,
        low_us=step.p10,
        high_us=step.p90,
        name=name,
        label=label,
    )


def _times(speedup: Quantiles) -> str:
    return f"{speedup.p50:.2f}x ({speedup.p10:.2f} to {speedup.p90:.2f})"


def _choice_cells(choice: Choice) -> tuple[Cell, ...]:
    step = choice.predicted.step_time_us
    return (
        Cell(text=collectives_name(choice) + (", host" if choice.offload else "")),
        number(step.p50, time_text(step.p50)),
        Cell(text=f"{time_text(step.p10)} to {time_text(step.p90)}", css="n"),
        number(choice.predicted.speedup.p50, f"{choice.predicted.speedup.p50:.2f}x"),
        number(choice.predicted.memory_bytes, bytes_text(choice.predicted.memory_bytes)),
        number(choice.predicted.peak_bytes, _peak_text(choice)),
        _inter_node_cell(choice),
    )


def _inter_node_cell(choice: Choice) -> Cell:
    """Return what one rank sends across groups in a step."""
    sent = None if choice.traffic is None else choice.traffic.inter_bytes
    return number(sent, "not known" if sent is None else bytes_text(sent))


def _peak_text(choice: Choice) -> str:
    peak = choice.predicted.peak_bytes
    return "not known" if peak is None else bytes_text(peak)


def alternative_table(plan: Plan) -> Table:
    """Return the best candidates and the first that do not fit, each with its reason."""
    others = beside_the_run(plan)
    fits = [choice for choice in others if choice.feasible]
    # What the plan may not choose stands behind what it may.
    fitting = sorted(fits, key=lambda choice: not choice.eligible)[:PAGE_CANDIDATES]
    rejected = [choice for choice in others if not choice.feasible]
    rows = [
        Row(cells=(Cell(text=grouped_triple(c.triple, c.group_size)), *_choice_cells(c), Cell(text=c.reason)))
        for c in [*fitting, *rejected[: max(3, PAGE_CANDIDATES - len(fitting))]]
    ]
    caption = f"Top {len(rows)} of {len(others)} candidates beside the run ({len(rejected)} left out)"
    names = ("strategy", *_CHOICE_NAMES, "why, or why not")
    return make_table("table-alternatives", caption, names, rows, first_rows=FIRST_CANDIDATES)


def ablation_table(plan: Plan) -> Table:
    """Return the chosen strategy with one level changed at a time."""
    rows = []
    for item in ablations(plan):
        cells = _choice_cells(item.choice) if item.choice else (Cell(text=""),) * len(_CHOICE_NAMES)
        why = item.choice.reason if item.choice else item.reason
        rows.append(Row(cells=(Cell(text=item.state), Cell(text=item.triple), *cells, Cell(text=why))))
    caption = f"{plan.chosen.triple} with one letter changed at a time, as predicted"
    return make_table("table-ablation", caption, ("changed", "strategy", *_CHOICE_NAMES, "note"), rows)


def budget_table(plan: Plan) -> Table:
    """Return what each step of a redundancy budget buys."""
    rows = [
        Row(
            cells=(
                number(item.redundancy_bytes, bytes_text(item.redundancy_bytes)),
                Cell(text=grouped_triple(item.triple, item.group_size)),
                Cell(text=collectives_name(item)),
                number(item.step_time_us, time_text(item.step_time_us)),
                number(
                    item.saved_us_per_gib, "" if item.saved_us_per_gib is None else time_text(item.saved_us_per_gib)
                ),
            )
        )
        for item in plan.budget
    ]
    names = ("held beyond GGG #", "strategy", "collectives", "step #", "saved per GiB more #")
    return make_table(
        "table-budget",
        "The fastest for each budget; options that need more memory for no gain are omitted",
        names,
        rows,
    )


def outlook_table(plan: Plan) -> Table:
    """Return the plan on more nodes."""
    rows = [
        Row(
            cells=(
                number(float(item.nodes_factor), f"{item.nodes_factor}x"),
                number(float(item.world_size), str(item.world_size)),
                number(item.baseline_step_us.p50, time_text(item.baseline_step_us.p50)),
                number(item.chosen_step_us.p50, time_text(item.chosen_step_us.p50)),
                number(item.speedup.p50, _times(item.speedup)),
            )
        )
        for item in plan.outlooks
    ]
    names = ("nodes #", f"{ranks_name(plan)} #", "step as it runs #", "step under the plan #", "speed-up #")
    return make_table("table-outlook", "With equal work per rank; the range grows with the distance", names, rows)


def lever_table(plan: Plan) -> Table:
    """Return what gains beside the strategy."""
    rows = []
    for item in plan.levers:
        remarks = (
            "" if item.fits else "does not fit",
            "changes the numbers" if item.changes_numbers else "",
            item.note,
        )
        cells = (
            Cell(text=item.what),
            number(item.speedup_now.p50, _times(item.speedup_now)),
            number(item.speedup_with_plan.p50, _times(item.speedup_with_plan)),
            number(item.more_bytes, bytes_text(item.more_bytes)),
            Cell(text="; ".join(remark for remark in remarks if remark)),
        )
        rows.append(Row(cells=cells))
    names = ("change", "speed-up as it runs #", "speed-up with the plan #", "more memory #", "note")
    return make_table(
        "table-levers", "Predicted by the same replay, each alone; nothing of it is in the plan", names, rows
    )


def answer_table(plan: Plan) -> Table:
    """Return what the user asked and the answers."""
    rows = []
    for item in plan.answers:
        ways = (
            (item.baseline, item.baseline_step_us),
            (item.chosen, item.chosen_step_us),
            (item.best, item.best_step_us),
        )
        cells = [Cell(text=_step_of(name, step)) for name, step in ways]
        rows.append(Row(cells=(Cell(text=item.asked), Cell(text=item.text), *cells)))
    names = ("asked", "answer", "as it runs now", "under the plan", "the fastest that fits")
    return make_table("table-answers", "Asked with --what-if", names, rows)


def _step_of(name: str, step: Quantiles | None) -> str:
    if step is None:
        return ""
    return f"{name}: {time_text(step.p50)} ({time_text(step.p10)} to {time_text(step.p90)})"


def sensitivity_table(plan: Plan) -> Table:
    """Return what the plan gains under other assumptions."""
    rows = [
        Row(
            cells=(
                Cell(text=item.what),
                number(item.value, f"{item.value:,.0f}" if item.value >= 1e4 else f"{item.value:.4g}"),
                Cell(text=item.source),
                number(item.speedup_if_half, f"{item.speedup_if_half:.2f}x"),
                Cell(text=item.best_if_half),
                number(item.speedup_if_double, f"{item.speedup_if_double:.2f}x"),
                Cell(text=item.best_if_double),
            )
        )
        for item in plan.sensitivities
    ]
    names = ("quantity", "value #", "source", "if half #", "best then", "if double #", "best then")
    return make_table("table-sensitivity", "Speed-up of the plan if one quantity is another", names, rows)


def _export_table(plan: Plan) -> Table:
    chosen = plan.chosen
    fidelities = exports_of(Strategy.parse(chosen.triple), CollectiveBackend.NATIVE, chosen.variant, chosen.offload)
    fidelities[RUNTIME] = chosen.exports[RUNTIME]
    rows = []
    for name, fidelity in fidelities.items():
        runs = chosen if name == RUNTIME else as_framework_runs(plan, name)
        choice = None if fidelity == Fidelity.UNSUPPORTED else runs
        cells = (Cell(text=grouped_triple(choice.triple, choice.group_size)), *_choice_cells(choice)) if choice else ()
        blank = (Cell(text=""),) * (1 + len(_CHOICE_NAMES) - len(cells))
        rows.append(Row(cells=(Cell(text=name), Cell(text=fidelity), *cells, *blank)))
    return make_table(
        "table-exports",
        "How well each framework's own settings express the choice, and what they really run",
        ("framework", "expresses it", "runs", *_CHOICE_NAMES),
        rows,
    )


def ho_ring_text(plan: Plan) -> str:
    """Return what HO-Ring brings, taken apart; "" where it is not chosen."""
    gain = plan.ho_ring
    if gain is None:
        return ""
    return (
        f"A gather of {bytes_text(gain.unit_bytes)} over all ranks takes {gain.rounds_after:.0f} inter-node rounds "
        f"instead of {gain.rounds_before:.0f}, sends {bytes_text(gain.port_bytes_after)} through a node's port instead "
        f"of {bytes_text(gain.port_bytes_before)}, and overlaps {time_text(gain.hidden_us)} of intra-node work. With "
        f"the backend's own collectives the same strategy takes {time_text(gain.step_us_without)} a step."
    )
