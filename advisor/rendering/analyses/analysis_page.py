"""The HTML report of an analysis: a view of finished text and charts, then one template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.regimes import regime_text
from paro_advise.advisor.rendering.analyses.analysis_tables import (
    collective_table,
    findings_table,
    input_table,
    link_table,
    module_table,
    parallel_table,
    path_table,
    provenance_table,
    quality_table,
    work_table,
)
from paro_advise.advisor.rendering.analyses.memory_chart import memory_chart
from paro_advise.advisor.rendering.analyses.network_picture import network_picture
from paro_advise.advisor.rendering.charts import Bar, Segment, stacked_bars
from paro_advise.advisor.rendering.page import Cell, Provenance, Row, Table, View, make_table, number, render_page
from paro_advise.advisor.rendering.ranks.host_tables import host_ranks, host_table
from paro_advise.advisor.rendering.ranks.rank_map import MAP_LEGEND, rank_map
from paro_advise.advisor.rendering.ranks.rank_parts import STEP_PARTS, rank_chart, rank_note, rank_table
from paro_advise.advisor.rendering.texts.analysis_text import (
    busy_text,
    confidence,
    framework_text,
    memory_phases,
    products_text,
    profiled,
    together_text,
    work_text,
)
from paro_advise.advisor.rendering.timelines.timeline_view import timeline_view
from paro_advise.advisor.wording.quantities import bytes_text, count_text, share_text, time_text
from paro_advise.core.model_state import STATES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.facts.model import StepFacts
    from paro_advise.advisor.timelines.model import Timeline


def render_report(
    analysis: Analysis,
    timeline: Timeline | None,
    provenance: Provenance,
    hta: Table | None = None,
    steps_of: Mapping[int, Sequence[StepFacts]] | None = None,
) -> str:
    """Return the report as one HTML page.

    Args:
        analysis: the analysis.
        timeline: of its steps, None for no picture.
        provenance: see Provenance.
        hta: HolisticTraceAnalysis' figures as a table, None when not asked for.
        steps_of: each rank's steps, for the map of large runs; None draws none.
    """
    run = analysis.run
    return render_page(
        "analysis.html.j2",
        analysis,
        provenance,
        title=f"{framework_text(analysis)}, {run.world_size or '?'} ranks",
        subtitle=_subtitle(analysis),
        verdict=analysis.verdict.text,
        confidence=confidence(analysis),
        case_text=analysis.verdict.case_text,
        figures=_figures(analysis),
        state_chart=_state_chart(analysis),
        state_legend=[("exposed", "exposed"), ("hidden", "overlapped with compute")],
        state_table=_state_table(analysis),
        state_reasons=[
            (name, regime_text(analysis.states[name].regime), analysis.states[name].text)
            for name in STATES
            if analysis.states[name].count
        ],
        **timeline_view(timeline, share_text(analysis.efficiency.overlap_share)),
        work_text=work_text(analysis.work) + products_text(analysis) if analysis.work else "",
        work_table=work_table(analysis),
        module_table=module_table(analysis),
        parallel_table=parallel_table(analysis),
        path_table=path_table(analysis),
        rank_chart=rank_chart(analysis),
        rank_legend=STEP_PARTS,
        rank_note=rank_note(analysis),
        rank_table=rank_table(analysis),
        rank_map=rank_map(steps_of or {}),
        map_legend=MAP_LEGEND,
        host_table=host_table(analysis.ranks),
        host_ranks=host_ranks(analysis.ranks),
        findings_table=findings_table(analysis),
        collective_table=collective_table(analysis),
        link_table=link_table(analysis),
        network_picture=network_picture(analysis),
        **_memory_view(analysis),
        hta_table=hta,
        quality_table=quality_table(analysis),
        method=_METHOD,
        provenance_table=provenance_table(analysis, provenance),
        input_table=input_table(analysis),
        num_inputs=len(analysis.run.inputs),
    )


def _subtitle(analysis: Analysis) -> str:
    run = analysis.run
    triple = run.strategy.triple or "strategy unknown"
    group = f" (groups of {run.strategy.group_size})" if run.strategy.group_size else ""
    nodes = f" on {run.num_nodes} node{'s' if run.num_nodes != 1 else ''}" if run.num_nodes else ""
    device = f", {run.device_name}" if run.device_name else (f", {run.backend}" if run.backend else "")
    return f"{framework_text(analysis)}, {triple}{group}, {run.world_size or '?'} ranks{nodes}{device}"


def _figures(analysis: Analysis) -> list[dict[str, str]]:
    parts, captured = analysis.breakdown_us, analysis.captured
    is_slowed = bool(profiled(analysis))
    figures = [
        ("step without the profiler, median", time_text(captured.median_step_us if captured and is_slowed else None)),
        (f"{'profiled ' * is_slowed}step, mean", time_text(None if parts.compute is None else parts.step_us)),
        (f"{'profiled ' * is_slowed}step, median", time_text(analysis.step_time_us.median)),
        ("compute, mean", time_text(parts.compute)),
        ("exposed communication, mean", time_text(parts.exposed_communication)),
        ("idle, mean", time_text(parts.idle)),
        ("communication overlapped", share_text(analysis.efficiency.overlap_share)),
        ("inter-node links busy", busy_text(analysis)),
    ]
    if analysis.efficiency.mfu is not None:
        figures.append(("model FLOPs utilisation", share_text(analysis.efficiency.mfu)))
    return [{"label": label, "value": value} for label, value in figures if value != "unknown"]


def _state_chart(analysis: Analysis) -> Markup:
    bars = [
        Bar(
            label=name,
            segments=(
                Segment(kind="exposed", value_us=entry.exposed_us or 0.0, name="exposed"),
                Segment(kind="hidden", value_us=entry.hidden_us or 0.0, name="overlapped"),
            ),
        )
        for name, entry in analysis.states.items()
        if entry.total_us
    ]
    bars.sort(key=lambda bar: STATES.index(bar.label))
    state = analysis.verdict.limiting_state
    title = f"Communication of state {state} is exposed longest" if state else "No state is exposed longest"
    return stacked_bars("chart-states", title, "Exposed and overlapped communication per state and step", bars)


def _state_table(analysis: Analysis) -> Table:
    rows = []
    for name in STATES:
        entry = analysis.states[name]
        if not entry.count and name == "unknown":
            continue
        rows.append(
            Row(
                id=f"state-{name}",
                cells=(
                    Cell(text=name),
                    Cell(text=regime_text(entry.regime), css=""),
                    number(entry.count, count_text(entry.count)),
                    number(entry.bytes, bytes_text(entry.bytes)),
                    number(entry.exposed_us, time_text(entry.exposed_us)),
                    number(entry.hidden_us, time_text(entry.hidden_us)),
                    number(entry.transfer_us, time_text(entry.transfer_us)),
                    number(entry.wait_us, time_text(entry.wait_us)),
                    Cell(text=entry.evidence),
                ),
            )
        )
    names = (
        "state",
        "regime",
        "calls #",
        "bytes #",
        "exposed #",
        "overlapped #",
        "transfer #",
        "wait #",
        "evidence",
    )
    together = together_text(analysis)
    caption = f"Per rank and step; bytes count the full buffer{f'; {together}' if together else ''}"
    return make_table("table-states", caption, names, rows)


def _memory_view(analysis: Analysis) -> View:
    """Return the memory of each phase as a chart and a table; nothing of it where no trace records memory."""
    memory = analysis.memory
    if memory is None:
        return {"memory_chart": "", "memory_table": None, "memory_rank": None}
    phases = memory_phases(memory)
    rows = [Row(cells=(Cell(text=name), number(float(size), bytes_text(size)))) for name, size in phases]
    return {
        "memory_chart": memory_chart("chart-memory", phases, analysis.run.device_memory_bytes),
        "memory_table": make_table(
            "table-memory", "The largest of all ranks and steps", ("phase", "most allocated #"), rows
        ),
        "memory_rank": memory.rank,
    }


_METHOD = (
    (
        "Breakdown: within each profiler step of each rank, compute is the union of compute kernels (on CPU runs: "
        "of operators), exposed communication the union of collectives minus compute, other the union of copies "
        "minus both, idle the rest. The four sum to the step."
    ),
    (
        "Attribution: by the annotations around the issuing call, the process group's description, Python stacks, "
        "the phase of training, the operation with its size, in this order. What none of them tells is shown as "
        "unknown and never folded into a state."
    ),
    (
        "Waiting and transfer: collectives are joined across ranks by group and sequence number, else by step, "
        "operation and order. Host clocks are aligned on the ends of collectives; transfer runs from the last "
        "arrival to the end."
    ),
    (
        "Limits: a link shared by two collectives shows the bandwidth that each got. The profiler itself slows "
        "short steps. Savings are upper bounds: they assume that exposed time vanishes and that nothing else takes "
        "its place."
    ),
)
