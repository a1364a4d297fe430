"""The report of inputs that time no step: what logs, dumps and benchmarks say, and what to record to learn more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.analyses.analysis_tables import (
    input_table,
    link_table,
    provenance_table,
    quality_table,
)
from paro_advise.advisor.rendering.analyses.network_picture import network_picture
from paro_advise.advisor.rendering.constants import MAX_COLLECTIVES
from paro_advise.advisor.rendering.page import Cell, Provenance, Row, Table, make_table, number, render_page
from paro_advise.advisor.rendering.texts.analysis_text import confidence, framework_text
from paro_advise.advisor.wording.quantities import bytes_text, count_text, time_text
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis

# Figures of training logs by their key, and how they are called.
_SAID = {
    "total_steps": "steps planned",
    "iteration_count": "iterations logged",
    "median_tokens_per_second": "tokens per second, median",
    "median_samples_per_second": "samples per second, median",
    "global_batch_size": "samples per step",
    "zero_stage": "ZeRO stage",
    "data_parallel_size": "data-parallel ranks",
    "tensor_model_parallel_size": "tensor-parallel ranks",
    "pipeline_model_parallel_size": "pipeline stages",
    "hosts": "hosts",
    "fault_ranks": "ranks with a fault",
    "fault_types": "faults",
}


def render_log_page(analysis: Analysis, provenance: Provenance) -> str:
    """Return the report as one HTML page.

    Args:
        analysis: without a rank whose steps are timed.
        provenance: see Provenance.
    """
    run = analysis.run
    ranks = f"{run.world_size} ranks" if run.world_size else "ranks unknown"
    nodes = f" on {plural(run.num_nodes, 'node')}" if run.num_nodes else ""
    name = framework_text(analysis) if run.framework != "unknown" else "Logs and dumps"
    return render_page(
        "log.html.j2",
        analysis,
        provenance,
        title=f"{name}, {ranks}",
        subtitle=f"{name}, {ranks}{nodes}",
        verdict=analysis.verdict.text,
        confidence=confidence(analysis),
        figures=_figures(analysis),
        said_table=_said_table(analysis),
        collective_table=_counted_table(analysis),
        link_table=link_table(analysis),
        network_picture=network_picture(analysis) if analysis.links else "",
        quality_table=quality_table(analysis),
        provenance_table=provenance_table(analysis, provenance),
        input_table=input_table(analysis),
        num_inputs=len(analysis.run.inputs),
    )


def _figures(analysis: Analysis) -> list[dict[str, str]]:
    run = analysis.run
    iteration_ms = run.metadata.get("median_iteration_ms")
    calls = sum(entry.count for entry in analysis.collectives)
    found = [
        ("iteration, median of the log", time_text(float(iteration_ms) * 1e3) if iteration_ms else ""),
        ("ranks", str(run.world_size or "")),
        ("nodes", str(run.num_nodes or "")),
        ("collectives counted", count_text(calls) if calls else ""),
    ]
    return [{"label": label, "value": value} for label, value in found if value]


def _said_table(analysis: Analysis) -> Table:
    """Return what the inputs say of the run, and nothing that they do not."""
    run = analysis.run
    strategy = run.strategy
    pairs = [
        ("framework", framework_text(analysis) if run.framework != "unknown" else ""),
        ("strategy", f"{strategy.triple}: {'; '.join(strategy.reasons)}" if strategy.triple else ""),
        ("ranks per node", f"{run.gpus_per_node} ({run.gpus_per_node_source})" if run.gpus_per_node else ""),
        ("device", run.device_name),
        ("backend", run.backend),
        ("NCCL", run.nccl_version),
        *((label, run.metadata.get(key)) for key, label in _SAID.items()),
        *(
            (key.removeprefix("tuning_").replace("_", " by ", 1).replace("_", "/"), plural(int(value), "time"))
            for key, value in run.metadata.items()
            if key.startswith("tuning_")
        ),
        *(
            (f"links by {key.removeprefix('transport_')}", plural(int(value), "time"))
            for key, value in run.metadata.items()
            if key.startswith("transport_")
        ),
    ]
    rows = [Row(cells=(Cell(text=name), Cell(text=str(value)))) for name, value in pairs if value]
    return make_table("table-said", "What the inputs do not say is left out", ("what", "value"), rows)


def _counted_table(analysis: Analysis) -> Table:
    """Return the collectives by purpose and size, without the times that they do not have."""
    rows = [
        Row(
            cells=(
                Cell(text=entry.state),
                Cell(text=entry.op),
                number(entry.bytes, bytes_text(entry.bytes)),
                number(entry.group_size, "unknown" if entry.group_size is None else str(entry.group_size)),
                number(entry.count, count_text(entry.count)),
            )
        )
        for entry in analysis.collectives[:MAX_COLLECTIVES]
    ]
    names = ("state", "op", "bytes #", "ranks #", "calls #")
    return make_table("table-collectives", "Kinds of collectives as they were counted", names, rows)
