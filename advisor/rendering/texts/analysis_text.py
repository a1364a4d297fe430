"""The analysis as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paro_advise.advisor.analysis.judgement.findings import APPLIES, NOT_JUDGED
from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.analysis.regimes import regime_text
from paro_advise.advisor.ranks.links.link import LatencySource
from paro_advise.advisor.rendering.constants import (
    LEAST_TOGETHER,
    NAMED_KINDS,
    PRODUCTS_SHARE,
    SHOWN_LINKS,
    WIDE_RANGE,
)
from paro_advise.advisor.wording.escaping import plain
from paro_advise.advisor.wording.quantities import bytes_text, count_text, gbps_text, share_text, time_text
from paro_advise.core.model_state import MODEL_STATES, STATES
from paro_advise.core.plural import plural
from paro_advise.core.span import CROSSES_NODES, GroupSpan
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Collection

    from paro_advise.advisor.analysis.model import Analysis, CriticalPath, MemoryPeaks, RunEntry
    from paro_advise.advisor.facts.model import Work
    from paro_advise.advisor.ranks.links.link import Link


PATH_HOLDS_WAITING = " (transfers may hold waiting for ranks without a trace)"


def analysis_text(analysis: Analysis) -> str:
    """Return the analysis as lines for people; the verdict comes first."""
    lines = [confidence(analysis), ""]
    lines += _run_lines(analysis)
    if analysis.ranks:
        lines += ["", *_state_lines(analysis)]
    lines += _link_lines(analysis)
    lines += _finding_lines(analysis)
    return "\n".join([click.style(plain(analysis.verdict.text), bold=True), *map(plain, lines)])


def confidence(analysis: Analysis) -> str:
    """Say in one sentence what the verdict is based on."""
    run = analysis.run
    if not analysis.ranks and any(item.kind == SourceKind.KINETO for item in run.inputs):
        return "No step could be timed: see the notes on the input below."
    if not analysis.ranks:
        return "Logs and dumps only: record torch profiler traces of the same run to see where a step goes."
    seen = f"{len(run.ranks)} of {plural(run.world_size, 'rank')}" if run.world_size else plural(len(run.ranks), "rank")
    least = min((entry.num_steps for entry in analysis.ranks), default=run.num_steps)
    steps = plural(run.num_steps, "step") if least == run.num_steps else f"{least} to {run.num_steps} steps"
    text = f"Seen: {seen}, {steps}{' each' * (len(run.ranks) > 1)}."
    if slowed := profiled(analysis):
        text += f" Times are {slowed}."
    counted = ((name, analysis.states[name]) for name in MODEL_STATES)  # in one order, read back or not
    shares = {name: entry.evidence for name, entry in counted if entry.count}
    if shares:
        text += " Attributed by " + ", ".join(f"{kind} ({name})" for name, kind in shares.items()) + "."
    unknown = analysis.states["unknown"]
    total = sum(entry.total_us or 0.0 for entry in analysis.states.values())
    if unknown.total_us and total:
        text += f" {unknown.total_us / total:.0%} of the communication time could not be attributed."
    return text


def framework_text(analysis: Analysis) -> str:
    """Return the framework's name, and whether it is a guess."""
    return f"{analysis.run.framework}{' (guessed)' if analysis.run.framework_is_guessed else ''}"


def parameters_text(run: RunEntry) -> str:
    """Return the parameters, and how many of them are trained where some are frozen.

    Ranks of tensor or pipeline parallelism hold parts of the model; traces show the part of one.
    """
    return f"{_own_parameters_text(run)}{_part_text(run)}"


def _part_text(run: RunEntry) -> str:
    world, sharing = run.world_size, run.data_parallel_ranks
    if not run.parameter_count or not world or not sharing or world % sharing or world == sharing:
        return ""
    return f" in one of {world // sharing} parts of the model, each on {sharing} of {world} ranks"


def _own_parameters_text(run: RunEntry) -> str:
    if run.total_parameter_count:
        return f"{count_text(run.total_parameter_count)} parameters, {count_text(run.parameter_count)} of them trained"
    shows_all = run.strategy.source == StrategySource.METADATA or not (run.strategy.triple_at_rest or "N").startswith(
        "N"
    )
    # Where parameters are never gathered, frozen ones leave no trace.
    return f"{count_text(run.parameter_count)} {'' if shows_all or not run.parameter_count else 'trained '}parameters"


def profiled(analysis: Analysis) -> str:
    """Say how much slower profiled steps were than others, "" where no others were timed."""
    captured, parts = analysis.captured, analysis.breakdown_us
    if captured is None or not captured.median_step_us or parts.compute is None:
        return ""
    without = captured.median_step_us
    return f"profiled, {parts.step_us / without:.2f}x as long as the {time_text(without)} without the profiler"


def work_text(work: Work) -> str:
    """Name the kinds of work that take most of the computing time."""
    whole = sum(work.kind_us.values())
    if whole <= 0:
        return "nothing"
    named = sorted(work.kind_us.items(), key=lambda item: (-item[1], item[0]))[:NAMED_KINDS]
    text = ", ".join(f"{kind} {share_text(time_us / whole)}" for kind, time_us in named)
    rest = whole - sum(time_us for _, time_us in named)
    return text + (f", rest {share_text(rest / whole)}" if rest > 0 else "")


def products_text(analysis: Analysis) -> str:
    """Say what matrix products reach, and of 16-bit ones the share of the device's peak; "" without shapes."""
    figures = analysis.efficiency
    reached, peak = figures.product_tflops, figures.peak_tflops
    work = analysis.work
    if reached is None or work is None or work.product_us < PRODUCTS_SHARE * sum(work.kind_us.values()):
        return ""
    share = f", {share_text(reached / peak)} of {peak:.0f}" if peak and analysis.run.computes_16_bit else ""
    return f"; matrix products reach {reached:.3g} TFLOPS{share}"


def _run_lines(analysis: Analysis) -> list[str]:
    run, parts = analysis.run, analysis.breakdown_us
    strategy = run.strategy
    group = f", groups of {strategy.group_size}" if strategy.group_size else ""
    group += f", second copy in groups of {strategy.copy_group_size}" if strategy.copy_group_size else ""
    rest = f" ({strategy.triple_at_rest} at rest)" if strategy.triple_at_rest != strategy.triple else ""
    node = f"{run.gpus_per_node} per node ({run.gpus_per_node_source})" if run.gpus_per_node else "nodes unknown"
    passes = plural(run.micro_batches, "micro-batch", "micro-batches") if run.micro_batches else "? micro-batches"
    steps = f"{passes}, {parameters_text(run)}"
    lines = [
        f"run        {framework_text(analysis)}, strategy {strategy.triple or 'unknown'}{rest}{group}, {steps}",
        f"ranks      {_ranks_text(analysis)}, {node}",
    ]
    if analysis.step_time_us.median is not None:
        median = time_text(analysis.step_time_us.median)
        lines.append(
            f"step       {time_text(parts.step_us)} mean of {run.num_steps} (median {median}): "
            f"compute {time_text(parts.compute)}, exposed communication {time_text(parts.exposed_communication)}, "
            f"copies and sync {time_text(parts.other)}, idle {time_text(parts.idle)}"
        )
    efficiency = analysis.efficiency
    shares = [
        (efficiency.overlap_share, share_text(efficiency.overlap_share), "of communication overlapped"),
        (efficiency.inter_node_busy_share, busy_text(analysis), "of the step inter-node links are busy"),
        (efficiency.mfu, share_text(efficiency.mfu), "MFU"),
    ]
    known = [f"{text} {what}" for value, text, what in shares if value is not None]
    if known:
        lines.append("use        " + ", ".join(known))
    if path := analysis.critical_path:
        lines.append(f"critical   {path_text(path)}{PATH_HOLDS_WAITING if holds_waiting(analysis) else ''}")
    if analysis.memory:
        lines.append("memory     " + memory_text(analysis.memory))
    if chosen := tuning_text(run.metadata):
        lines.append("NCCL       " + chosen)
    if analysis.work:
        lines.append("computing  " + work_text(analysis.work) + products_text(analysis))
    return lines


def busy_text(analysis: Analysis) -> str:
    """Return the share of a step during which links between nodes are busy, "unknown" without one.

    Where ranks without a trace may have been waited for it is the most that it can be.
    """
    share = analysis.efficiency.inter_node_busy_share
    is_most = share is not None and holds_waiting(analysis, CROSSES_NODES)
    return f"{'at most ' if is_most else ''}{share_text(share)}"


def holds_waiting(analysis: Analysis, spans: Collection[GroupSpan] = tuple(GroupSpan)) -> bool:
    """Tell whether what counts as transfers may hold waiting for ranks without a trace."""
    return any(link.is_lower_bound for link in analysis.links if link.span in spans)


def path_text(path: CriticalPath) -> str:
    """Name the parts of the critical path, and the rank that most of it runs through."""
    work = sum(path.work_us.values())
    whole = work + sum(path.transfer_us.values())
    rank, most = max(path.work_us.items(), key=lambda item: item[1], default=("", 0.0))
    parts = [f"work {share_text(work / whole)} (rank {rank} {share_text(most / whole)})"]
    moved = sorted(path.transfer_us.items(), key=lambda item: -item[1])
    parts += [f"{state} transfers {share_text(time_us / whole)}" for state, time_us in moved if time_us > 0]
    return "path of a step: " + ", ".join(parts)


def memory_phases(memory: MemoryPeaks) -> list[tuple[str, int]]:
    """Return name and peak (bytes) of each phase, in the order of a step."""
    order = {
        "forward": "forward",
        "backward": "backward",
        "boundary": "boundary",
        "update": "update",
        "unknown": "step",
    }
    return [(name, memory.phase_bytes[phase]) for phase, name in order.items() if phase in memory.phase_bytes]


def memory_text(memory: MemoryPeaks) -> str:
    """Name what is allocated at most in each phase, in the order of a step."""
    peaks = ", ".join(f"{name} {bytes_text(peak)}" for name, peak in memory_phases(memory))
    return f"most allocated: {peaks} (rank {memory.rank})"


def tuning_text(metadata: dict[str, str]) -> str:
    """Return which algorithms and protocols NCCL's log says it chose, "" where it says none."""
    found = [(name.split("_")[1:], count) for name, count in metadata.items() if name.startswith("tuning_")]
    return ", ".join(f"{op} by {'/'.join(rest)} ({count} times)" for (op, *rest), count in found)


def _ranks_text(analysis: Analysis) -> str:
    run = analysis.run
    if not analysis.ranks:
        where = "in the trace" if any(item.kind == SourceKind.KINETO for item in run.inputs) else "in logs"
        named = f"{plural(len(run.ranks), 'rank')} named {where}" if run.ranks else "no rank timed"
        return named + (f", {run.world_size} in all" if run.world_size else "")
    return f"{len(run.ranks)} of {run.world_size or '?'} seen"


def together_text(analysis: Analysis) -> str:
    """Say how much exposed time counts for several states at once, "" where next to none does."""
    whole_us = analysis.breakdown_us.exposed_communication or 0.0
    if analysis.exposed_together_us <= LEAST_TOGETHER * whole_us:
        return ""
    return (
        f"{time_text(analysis.exposed_together_us)} are exposed for several states at once: they count for each, and "
        "hiding one alone does not save them"
    )


def _state_lines(analysis: Analysis) -> list[str]:
    heads = "".join(f"{name:>10}" for name in ("bytes", "exposed", "overlap", "transfer", "wait"))
    lines = [f"{'state':<10} {'calls':>7}{heads}  {'regime':<20} evidence"]
    for name in STATES:
        entry = analysis.states[name]
        if not entry.count:
            continue
        regime = regime_text(entry.regime)
        lines.append(
            f"{name:<10} {count_text(entry.count):>7} {bytes_text(entry.bytes):>9} {time_text(entry.exposed_us):>9} "
            f"{time_text(entry.hidden_us):>9} {time_text(entry.transfer_us):>9} {time_text(entry.wait_us):>9}  "
            f"{regime:<20} {entry.evidence}"
        )
    if together := together_text(analysis):
        lines.append(f"  {together}")
    for kind, part in analysis.model_parallel.items():
        lines.append(
            f"  {kind:<8} {count_text(part.count):>7} {bytes_text(part.bytes):>9} {time_text(part.exposed_us):>9} "
            f"{time_text(max(0.0, part.total_us - part.exposed_us)):>9}  of other: {kind} parallelism"
            + (f", groups of {part.group_size}" if part.group_size else "")
        )
    return lines


def _link_lines(analysis: Analysis) -> list[str]:
    known = [link for link in analysis.links if link.busbw_gbps is not None]
    known.sort(key=lambda link: (-link.num_samples, link.op, link.span, link.group_size))
    lines = [
        f"link       {link.op} over {link.group_size} ranks ({link.span}): "
        f"{bandwidth_text(link)} bus bandwidth, "
        f"latency {latency_text(link)}"
        for link in known[:SHOWN_LINKS]
    ]
    if len(known) > SHOWN_LINKS:
        lines.append(f"           ... and {plural(len(known) - SHOWN_LINKS, 'link')} more with fewer collectives")
    return ["", *lines] if lines else []


def bandwidth_text(link: Link) -> str:
    """Return a bandwidth, with its range where the latency is assumed and leaves a wide one.

    Where ranks without a trace may have been waited for it is what was reached, latency and all: "at least 166 GB/s".
    """
    if link.is_lower_bound:
        return f"at least {gbps_text(link.reached_gbps)}"
    low, high = link.busbw_low_gbps, link.busbw_high_gbps
    is_told = link.latency_source == LatencySource.MEASURED
    if is_told or low is None or high is None or high <= WIDE_RANGE * max(low, 1e-3):
        return gbps_text(link.busbw_gbps)
    low_text, high_text = (gbps_text(end).removesuffix(" GB/s") for end in (low, high))
    return f"{gbps_text(link.busbw_gbps)} ({low_text} to {high_text})"


def latency_text(link: Link) -> str:
    """Return a latency with its range where the range is wide: "24 us", "8.2 us (2 to 33 us)".

    Where ranks without a trace may have been waited for, it may all be waiting: "at most 349 us".
    """
    low, high = link.alpha_low_us, link.alpha_high_us
    if link.is_lower_bound and link.latency_source == LatencySource.MEASURED and high is not None:
        return f"at most {time_text(high)}"
    if link.alpha_us is None or low is None or high is None or high <= WIDE_RANGE * max(low, 1e-3):
        return time_text(link.alpha_us)
    if link.alpha_us <= 0:
        return f"at most {time_text(high)}"
    return f"{time_text(link.alpha_us)} ({time_text(low)} to {time_text(high)})"


def _finding_lines(analysis: Analysis) -> list[str]:
    found = analysis.findings
    lines = []
    for number, item in enumerate((item for item in found if item.status == APPLIES), start=1):
        saving = f"  (up to {time_text(-item.saving_us)})" if item.saving_us else ""
        lines.append(f"  {number}. {item.code}  {item.text}{saving}")
    missing: dict[str, list[str]] = {}
    for item in found:
        if item.status == NOT_JUDGED:
            missing.setdefault(item.text, []).append(item.code)
    lines += [f"  not judged: {', '.join(codes)}  {text}" for text, codes in missing.items()]
    return ["", "findings", *lines] if lines else []
