"""The tables of an analysis' report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paro_advise.advisor.rendering.constants import MAX_COLLECTIVES, SHOWN_INPUTS, SHOWN_KERNELS, SHOWN_MODULES
from paro_advise.advisor.rendering.page import Cell, Provenance, Row, Table, make_table, number
from paro_advise.advisor.rendering.texts.analysis_text import (
    PATH_HOLDS_WAITING,
    bandwidth_text,
    framework_text,
    holds_waiting,
    latency_text,
    parameters_text,
)
from paro_advise.advisor.wording.quantities import bytes_text, count_text, gbps_text, share_text, time_text
from paro_advise.core.model_state import STATES
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis


def work_table(analysis: Analysis) -> Table:
    """Return what computes."""
    work = analysis.work
    whole = sum(work.kind_us.values()) if work else 0.0
    kernels = work.kernels if work else ()
    rows = [
        Row(
            cells=(
                Cell(text=item.name, css="path"),
                Cell(text=item.kind),
                number(item.count, count_text(item.count)),
                number(item.us, time_text(item.us)),
                number(item.us, share_text(item.us / whole if whole else None)),
            )
        )
        for item in kernels[:SHOWN_KERNELS]
    ]
    caption = f"The {len(rows)} that compute longest, per rank and step; kernels that run at the same time both count"
    return make_table("table-work", caption, ("kernel or operator", "kind", "calls #", "time #", "share #"), rows)


def module_table(analysis: Analysis) -> Table:
    """Return the modules whose collectives are exposed longest."""
    states = [name for name in STATES if any(item.state_exposed_us.get(name) for item in analysis.modules)]
    rows = [
        Row(
            cells=(
                Cell(text=item.module, css="path"),
                number(item.count, count_text(item.count)),
                number(item.bytes, bytes_text(item.bytes)),
                number(item.exposed_us, time_text(item.exposed_us)),
                *(
                    number(item.state_exposed_us.get(name), time_text(item.state_exposed_us.get(name, 0.0)))
                    for name in states
                ),
            )
        )
        for item in analysis.modules[:SHOWN_MODULES]
    ]
    caption = f"{len(rows)} of {len(analysis.modules)} modules, those exposed longest; per rank and step"
    heads = ("module", "calls #", "bytes #", "exposed #", *(f"of {name}s #" for name in states))
    return make_table("table-modules", caption, heads, rows)


def findings_table(analysis: Analysis) -> Table:
    """Return all findings."""
    rows = [
        Row(
            id=f"finding-{item.code}",
            cells=(
                Cell(text=item.code),
                Cell(text=item.status),
                Cell(text=item.text),
                number(item.saving_us, f"up to {time_text(item.saving_us)}" if item.saving_us else ""),
            ),
        )
        for item in analysis.findings
    ]
    return make_table(
        "table-findings",
        "Savings overlap and do not add up. `paro-advise explain CODE` tells more",
        ("code", "status", "finding", "can save #"),
        rows,
    )


def collective_table(analysis: Analysis) -> Table:
    """Return the kinds of collectives."""
    rows = [
        Row(
            cells=(
                Cell(text=entry.state),
                Cell(text=entry.detail),
                Cell(text=entry.op),
                number(entry.bytes, bytes_text(entry.bytes)),
                number(entry.group_size, "unknown" if entry.group_size is None else str(entry.group_size)),
                Cell(text=entry.span),
                number(entry.count, count_text(entry.count)),
                number(entry.p50_us, time_text(entry.p50_us)),
                number(entry.p95_us, time_text(entry.p95_us)),
                number(entry.p99_us, time_text(entry.p99_us)),
                number(entry.exposed_us, time_text(entry.exposed_us)),
            )
        )
        for entry in analysis.collectives[:MAX_COLLECTIVES]
    ]
    names = (
        "state",
        "detail",
        "op",
        "bytes #",
        "ranks #",
        "span",
        "calls #",
        "p50 #",
        "p95 #",
        "p99 #",
        "exposed #",
    )
    caption = f"The {len(rows)} kinds that are exposed longest; calls and exposure per rank and step"
    return make_table("table-collectives", caption, names, rows)


def link_table(analysis: Analysis) -> Table:
    """Return the links."""
    rows = []
    for link in analysis.links:
        is_least = link.is_lower_bound and link.busbw_gbps is not None
        span = (
            f"{link.busbw_low_gbps:.3g} to {link.busbw_high_gbps:.3g}"
            if link.busbw_low_gbps is not None and link.busbw_high_gbps is not None and not is_least
            else ""
        )
        rows.append(
            Row(
                cells=(
                    Cell(text=link.op),
                    Cell(text=link.span),
                    number(link.group_size, str(link.group_size)),
                    number(link.num_samples, str(link.num_samples)),
                    number(link.alpha_us, latency_text(link)),
                    number(
                        link.reached_gbps if is_least else link.busbw_gbps,
                        bandwidth_text(link) if is_least else gbps_text(link.busbw_gbps),
                    ),
                    Cell(text=span, css="n"),
                    Cell(text=link.source),
                )
            )
        )
    names = ("op", "span", "ranks #", "samples #", "latency #", "bus bandwidth #", "10-90 % #", "source")
    return make_table("table-links", "Robust fit over all transfers", names, rows)


def quality_table(analysis: Analysis) -> Table:
    """Return the notes on the data."""
    rows = [
        Row(
            cells=(
                Cell(text=item.code),
                Cell(text=item.severity, css=f"sev-{item.severity}"),
                Cell(text=item.message),
                Cell(text=item.help),
            )
        )
        for item in analysis.data_quality[:200]
    ]
    return make_table(
        "table-quality", plural(len(analysis.data_quality), "note"), ("code", "weight", "what", "what to do"), rows
    )


def provenance_table(analysis: Analysis, provenance: Provenance) -> Table:
    """Return how the page was made and what ran."""
    run = analysis.run
    strategy = run.strategy
    pairs: list[tuple[str, Any]] = [
        ("tool", f"paro-advise {provenance.version}, format {analysis.format_version}"),
        ("made", provenance.created_utc),
        ("command", provenance.command),
        ("framework", framework_text(analysis)),
        ("strategy", f"{strategy.triple or 'unknown'} while computing, {strategy.triple_at_rest or 'unknown'} at rest: "
         + ("; ".join(strategy.reasons) or "no model-state communication seen")),
        ("micro-batches per step", run.micro_batches),
        ("parameters", parameters_text(run)),
        ("ranks per node", f"{run.gpus_per_node} ({run.gpus_per_node_source})" if run.gpus_per_node else None),
        ("device", run.device_name),
        ("device memory", bytes_text(run.device_memory_bytes) if run.device_memory_bytes else None),
        ("backend", run.backend),
        ("NCCL", run.nccl_version),
        ("clock error", time_text(analysis.clock_error_us) if analysis.clock_error_us is not None else None),
        ("steps (us)", ", ".join(f"{value:.0f}" for value in analysis.step_time_us.values[:20])),
    ]  # fmt: skip
    pairs += [(key, value) for key, value in list(run.metadata.items())[:40]]
    rows = [
        Row(cells=(Cell(text=name), Cell(text="unknown" if value in (None, "") else str(value))))
        for name, value in pairs
    ]
    return make_table("table-provenance", "Where the numbers come from", ("what", "value"), rows)


def input_table(analysis: Analysis) -> Table:
    """Return the inputs, of many the first ones."""
    count = len(analysis.run.inputs)
    caption = f"The first {SHOWN_INPUTS} of {count} inputs; the JSON names all" if count > SHOWN_INPUTS else "Inputs"
    rows = [
        Row(
            cells=(
                Cell(text=item.path, css="path"),
                Cell(text=item.kind),
                number(item.bytes, bytes_text(item.bytes)),
                Cell(text=item.sha256, css="path"),
            )
        )
        for item in analysis.run.inputs[:SHOWN_INPUTS]
    ]
    return make_table("table-inputs", caption, ("path", "kind", "size #", "SHA-256"), rows)


def parallel_table(analysis: Analysis) -> Table:
    """Return the communication of each kind of model parallelism."""
    rows = [
        Row(
            cells=(
                Cell(text=f"{kind} parallelism"),
                number(part.group_size, str(part.group_size or "unknown")),
                number(part.count, count_text(part.count)),
                number(part.bytes, bytes_text(part.bytes)),
                number(part.total_us, time_text(part.total_us)),
                number(part.exposed_us, time_text(part.exposed_us)),
            )
        )
        for kind, part in analysis.model_parallel.items()
    ]
    names = ("for", "ranks #", "calls a step #", "bytes a step #", "time #", "exposed #")
    return make_table("parallel-table", "Model parallelism, per rank and step", names, rows)


def path_table(analysis: Analysis) -> Table:
    """Return what the critical path consists of, the longest parts first."""
    path = analysis.critical_path
    if path is None:
        return make_table("path-table", "", (), ())
    whole = sum(path.work_us.values()) + sum(path.transfer_us.values())
    parts = [(f"work of rank {rank}", time_us) for rank, time_us in path.work_us.items()]
    parts += [(f"{state} transfers", time_us) for state, time_us in path.transfer_us.items()]
    rows = [
        Row(
            cells=(
                Cell(text=name),
                number(time_us, time_text(time_us)),
                number(time_us / whole, share_text(time_us / whole)),
            )
        )
        for name, time_us in sorted(parts, key=lambda item: -item[1])
        if time_us > 0
    ]
    title = f"Means of {plural(path.num_steps, 'step')}{PATH_HOLDS_WAITING if holds_waiting(analysis) else ''}"
    return make_table("path-table", title, ("part", "time #", "share #"), rows)
