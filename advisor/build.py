"""Builds the analysis of a run from the facts of its inputs (pure)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from paro_advise.advisor import analysis as out
from paro_advise.advisor.efficiency import efficiency
from paro_advise.advisor.findings import findings
from paro_advise.advisor.joining import join_stacks
from paro_advise.advisor.links import fit_links, samples_of, span_column
from paro_advise.advisor.matching import Matched, match_ranks
from paro_advise.advisor.rank_facts import RankFacts, read_table
from paro_advise.advisor.ranks import RankSet, rank_set
from paro_advise.advisor.regimes import CASES, StepEvidence, Verdict, judge_step
from paro_advise.advisor.state_summary import StateSummary, summarise_states
from paro_advise.advisor.states import Regime, State
from paro_advise.advisor.stragglers import Straggler, find_stragglers
from paro_advise.advisor.strategy import Strategy, infer_strategy, parameter_count
from paro_advise.advisor.topology import Topology, find_topology
from paro_advise.advisor.units import time_text
from paro_advise.advisor.untimed import log_collectives, log_links, log_metadata, log_states, log_verdict
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    from paro_advise.advisor.captured import Captured
    from paro_advise.advisor.links import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user says about the run.

    Attributes:
        gpus_per_node: ranks on a node, None to infer.
        tokens_per_step: tokens of all ranks in one step, for MFU.
        peak_tflops: dense peak of one device, None to look it up by name.
        skip_steps: warm-up steps left out at the start.
    """

    gpus_per_node: int | None = None
    tokens_per_step: int | None = None
    peak_tflops: float | None = None
    skip_steps: int = 0


def build_analysis(
    facts: Sequence[RankFacts], notices: Sequence[Notice], options: Options, captured: Captured | None = None
) -> out.Analysis:
    """Build the analysis.

    Args:
        facts: of all usable inputs, in order of path.
        notices: from reading them.
        options: see Options.
        captured: steps without the profiler.
    """
    facts, joins = join_stacks(facts)
    found = rank_set(facts, options.skip_steps)
    notes = [*notices, *joins, *found.notices]
    launched = captured.local_world_size if captured else None
    if launched and (found.world_size or launched) % launched:
        launched = None  # nodes of different sizes
    topology = find_topology(found.timed, found.world_size, options.gpus_per_node or launched)
    if launched and not options.gpus_per_node:
        topology = replace(topology, source="metadata")
    topology = _topology_of_logs(topology, found, options)
    matched, spans_known = _matched(found, topology, notes)
    links, impossible = _links(matched, found)
    stragglers = find_stragglers(matched.table, found.timed, _mean_step(found)) if matched else []
    micro = _micro_batches(found)
    typical = _typical_step(found)
    strategy = _strategy(typical, found, micro, notes)
    states = summarise_states(matched, found, links, _mean_step(found)) if matched else log_states(found)
    verdict = _verdict(found, states, links, topology, strategy) if found.timed else log_verdict(found, links)
    _note_unknowns(notes, found, matched, topology, impossible, spans_known)
    count = _stated_count(found) or (parameter_count(typical, micro or 1) if typical is not None else None)
    analysis = out.Analysis(
        format=out.FORMAT,
        format_version=out.FORMAT_VERSION,
        run=_run(facts, found, topology, strategy, micro, count),
        step_time_us=_step_time(found),
        breakdown_us=_breakdown(found),
        states={state.value: entry.entry for state, entry in states.items()},
        links=tuple(links),
        stragglers=tuple(stragglers),
        clock_offsets_us={str(rank): value for rank, value in matched.offset_us.items()} if matched else {},
        clock_error_us=matched.clock_error_us if matched else None,
        verdict=_verdict_entry(verdict, stragglers),
        collectives=_collectives(matched, found),
        ranks=_ranks(found, topology, matched),
        efficiency=efficiency(matched, found, count, options),
        findings=(),
        data_quality=_quality(notes),
        captured=captured,
    )
    return replace(analysis, findings=tuple(findings(analysis)))


def _matched(found: RankSet, topology: Topology, notes: list[Notice]) -> tuple[Matched | None, bool]:
    if not found.timed:
        return None, False
    clock_of = {
        rank: facts.header.host
        or (
            f"node {topology.node_of[rank]}"
            if rank in topology.node_of and topology.source == "metadata"
            else f"rank {rank}"
        )
        for rank, facts in found.timed
    }
    matched = match_ranks(found.timed, clock_of)
    spans = span_column(matched.table, topology, found.world_size)
    table = matched.table.with_columns(spans.fill_null("").alias("span"))
    if matched.num_unequal:
        message = f"{matched.num_unequal} collectives were not joined: the ranks disagree on their bytes"
        notes.append(Notice(code="Q311", severity=Severity.WARNING, message=message))
    known = bool((table["span"] != "").any()) if len(table) else False
    return replace(matched, table=table), known


def _topology_of_logs(topology: Topology, found: RankSet, options: Options) -> Topology:
    """Fall back to what NCCL's own logs say about nodes."""
    if topology.gpus_per_node or options.gpus_per_node:
        return topology
    for facts in found.untimed:
        header = facts.header
        per_node = header.gpus_per_node
        if not per_node and header.num_nodes and header.world_size:
            per_node = header.world_size // header.num_nodes
        if per_node:
            world = range(found.world_size or per_node)
            node_of = {rank: rank // per_node for rank in world}
            return Topology(gpus_per_node=per_node, source="metadata", node_of=node_of)
    return topology


def _links(matched: Matched | None, found: RankSet) -> tuple[list[Link], int]:
    links, impossible = fit_links(samples_of(matched.table)) if matched else ([], 0)
    more, worse = log_links(found)
    known = {(link.op, link.span, link.group_size) for link in links}
    links += [link for link in more if (link.op, link.span, link.group_size) not in known]
    return links, impossible + worse


def _mean_step(found: RankSet) -> float:
    walls = [step.wall_us for _, facts in found.timed for step in facts.steps]
    return float(np.mean(walls)) if walls else 0.0


def _micro_batches(found: RankSet) -> int | None:
    counts = sorted(facts.num_micro_batches for _, facts in found.timed if facts.num_micro_batches)
    return counts[len(counts) // 2] if counts else None


def _typical_step(found: RankSet) -> pl.DataFrame | None:
    """Return the collectives of the typical step of the first rank that has any."""
    import polars as pl

    for _, facts in found.timed:
        table = read_table(facts.collectives_ipc)
        part = table.filter(pl.col("step") == facts.timeline_step)
        if len(part):
            return part
    return None


def _strategy(typical: pl.DataFrame | None, found: RankSet, micro: int | None, notes: list[Notice]) -> Strategy:
    empty = Strategy(triple=None, triple_at_rest=None, group_size=None, source="", reasons=())
    if typical is None:
        return empty
    if micro is None:
        notes.append(
            Notice(
                code="Q320",
                severity=Severity.INFO,
                message="the number of micro-batches cannot be told; one per step is assumed",
                help="record CPU activities too, so that backward passes can be counted",
            )
        )
    stated = next((facts.header.metadata for _, facts in found.timed if "strategy" in facts.header.metadata), None)
    if stated is not None:
        size = stated.get("group_size", "")
        return Strategy(
            triple=stated["strategy"],
            triple_at_rest=stated["strategy"],
            group_size=int(size) if size.isdecimal() else None,
            source="metadata",
            reasons=("the runtime wrote its strategy into the trace",),
        )
    return infer_strategy(typical, found.world_size, micro or 1, found.framework)


def _stated_count(found: RankSet) -> int | None:
    """Return the trained parameters as our own runtime wrote them into the trace."""
    stated = (facts.header.metadata.get("parameters", "") for _, facts in found.timed)
    return next((int(text) for text in stated if text.isdecimal() and int(text)), None)


def _verdict(
    found: RankSet,
    states: dict[State, StateSummary],
    links: Sequence[Link],
    topology: Topology,
    strategy: Strategy,
) -> Verdict:
    breakdown = _breakdown(found)

    def best(spans: tuple[str, ...]) -> float | None:
        values = [link.busbw_gbps for link in links if link.span in spans and link.busbw_gbps]
        return max(values, default=None)

    return judge_step(
        StepEvidence(
            step_time_us=_mean_step(found),
            compute_us=breakdown.compute or 0.0,
            exposed_us=breakdown.exposed_communication or 0.0,
            idle_us=breakdown.idle or 0.0,
            exposed_by_state={
                state: item.entry.exposed_us or 0.0
                for state, item in states.items()
                if item.entry.count and found.timed
            },
            regime_by_state={state: item.regime for state, item in states.items()},
            num_nodes=len(set(topology.node_of.values())) or None,
            inter_gbps=best(("inter", "mixed")),
            intra_gbps=best(("intra",)),
            shards_globally="G" in (strategy.triple_at_rest or "")[:1],
            sees_all_ranks=found.sees_all,
            is_cut=found.is_cut,
        )
    )


def _verdict_entry(verdict: Verdict, stragglers: Sequence[Straggler]) -> out.VerdictEntry:
    text = verdict.text
    if stragglers:
        worst = stragglers[0]
        waits = f"the others wait {time_text(worst.lateness_us)} a step for it"
        if verdict.regime == Regime.STRAGGLER:
            rest = text.partition(": ")[2]
            text = f"Straggler bound: rank {worst.rank} arrives late ({worst.cause}) and {waits}. "
            text += rest[:1].upper() + rest[1:].replace(" limits the step:", " suffers most:")
        else:
            text += f" Rank {worst.rank} arrives late ({worst.cause}): {waits}."
    return out.VerdictEntry(
        regime=verdict.regime.value,
        limiting_state=verdict.limiting_state,
        text=text,
        case=verdict.case,
        case_text=CASES.get(verdict.case, ""),
    )


def _step_time(found: RankSet) -> out.StepTime:
    per_step: dict[str, list[float]] = {}
    for _, facts in found.timed:
        for step in facts.steps:
            per_step.setdefault(step.label, []).append(step.wall_us)
    return out.StepTime.of([float(np.mean(walls)) for walls in per_step.values()])


def _breakdown(found: RankSet) -> out.Breakdown:
    steps = [step for _, facts in found.timed for step in facts.steps]
    if not steps:
        return out.Breakdown(compute=None, exposed_communication=None, other=None, idle=None)

    def mean(field: str) -> float:
        return float(np.mean([getattr(step, field) for step in steps]))

    return out.Breakdown(
        compute=mean("compute_us"),
        exposed_communication=mean("exposed_communication_us"),
        other=mean("other_us"),
        idle=mean("idle_us"),
    )


def _collectives(matched: Matched | None, found: RankSet) -> tuple[out.CollectiveEntry, ...]:
    import polars as pl

    if matched is None or not len(matched.table):
        return log_collectives(found)
    rank_steps = max(1, sum(len(facts.steps) for _, facts in found.timed))
    keys = ["state", "detail", "op", "bytes", "group_size", "span", "evidence"]
    duration = (pl.col("end_us") - pl.col("start_us")).alias("duration_us")
    grouped = (
        matched.table.with_columns(duration)
        .group_by(keys)
        .agg(
            pl.len().alias("count"),
            *[
                pl.col("duration_us").quantile(share, "linear").alias(name)
                for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
            ],
            pl.col("exposed_us").sum(),
        )
        .sort(["exposed_us", *keys], descending=[True] + [False] * len(keys), nulls_last=True)
        .head(240)
    )
    return tuple(
        out.CollectiveEntry(
            state=row["state"],
            detail=row["detail"],
            op=row["op"],
            bytes=row["bytes"],
            group_size=row["group_size"],
            span=row["span"] or "unknown",
            count=row["count"] / rank_steps,
            p50_us=row["p50"],
            p95_us=row["p95"],
            p99_us=row["p99"],
            exposed_us=row["exposed_us"] / rank_steps,
            evidence=row["evidence"],
        )
        for row in grouped.iter_rows(named=True)
    )


def _ranks(found: RankSet, topology: Topology, matched: Matched | None) -> tuple[out.RankEntry, ...]:
    import polars as pl

    waits: dict[int, float] = {}
    if matched is not None:
        sums = matched.table.group_by("rank").agg(pl.col("wait_us").sum(), pl.col("wait_us").count().alias("n"))
        waits = {rank: wait for rank, wait, count in sums.iter_rows() if count}
    entries = []
    for rank, facts in found.timed:
        steps = facts.steps
        if not steps:
            continue

        def mean(field: str, steps: tuple[object, ...] = steps) -> float:
            return float(np.mean([getattr(step, field) for step in steps]))

        entries.append(
            out.RankEntry(
                rank=rank,
                node=topology.node_of.get(rank),
                host=facts.header.host,
                num_steps=len(steps),
                step_time_us=mean("wall_us"),
                compute_us=mean("compute_us"),
                exposed_communication_us=mean("exposed_communication_us"),
                other_us=mean("other_us"),
                idle_us=mean("idle_us"),
                state_exposed_us={
                    state.value: float(np.mean([step.state_exposed_us.get(state.value, 0.0) for step in steps]))
                    for state in State
                },
                wait_us=waits[rank] / len(steps) if rank in waits else None,
            )
        )
    return tuple(entries)


def _run(
    facts: Sequence[RankFacts],
    found: RankSet,
    topology: Topology,
    strategy: Strategy,
    micro: int | None,
    count: int | None,
) -> out.Run:
    # What timed the steps speaks first: a benchmark beside it may have run on another backend.
    headers = [item.header for _, item in found.timed] + [item.header for item in facts]

    def first(field: str) -> object:
        return next((value for value in (getattr(header, field) for header in headers) if value), None)

    nodes = len(set(topology.node_of.values())) or first("num_nodes")
    return out.Run(
        world_size=found.world_size,
        ranks=tuple(rank for rank, _ in found.timed) or found.untimed_ranks,
        ranks_missing=found.missing,
        gpus_per_node=topology.gpus_per_node,
        gpus_per_node_source=topology.source,
        num_nodes=nodes,  # type: ignore[arg-type]
        backend=first("backend"),  # type: ignore[arg-type]
        framework=found.framework,
        strategy=strategy,
        num_steps=max((len(item.steps) for _, item in found.timed), default=0),
        micro_batches=micro,
        parameter_count=count,
        device_name=first("device_name"),  # type: ignore[arg-type]
        device_memory_bytes=first("device_memory_bytes"),  # type: ignore[arg-type]
        nccl_version=first("nccl_version"),  # type: ignore[arg-type]
        metadata=log_metadata(found),
        inputs=tuple(
            out.InputEntry(
                path=item.source.path,
                bytes=item.source.bytes,
                sha256=item.source.sha256,
                kind=item.source.kind.value,
            )
            for item in facts
        ),
    )


def _note_unknowns(
    notes: list[Notice],
    found: RankSet,
    matched: Matched | None,
    topology: Topology,
    impossible: int,
    spans_known: bool,  # noqa: FBT001 - one of several facts about the run
) -> None:
    def note(code: str, severity: Severity, message: str, help_text: str = "") -> None:
        notes.append(Notice(code=code, severity=severity, message=message, help=help_text))

    if not found.timed:
        note("Q312", Severity.WARNING, "no input times the steps: breakdown and exposure are unknown",
             "record torch profiler traces of the same run")  # fmt: skip
        return
    if len(found.timed) == 1 and (found.world_size or 2) > 1:
        note("Q313", Severity.WARNING,
             "one rank only: waiting cannot be told from transferring, stragglers and clock offsets are unknown",
             "add the trace of at least one more rank, best one per node")  # fmt: skip
    elif matched is not None and matched.partial_groups > 0.01:
        note("Q314", Severity.WARNING,
             f"{matched.partial_groups:.0%} of the joined collectives have ranks without a trace: "
             "waiting for such a rank counts as transfer, and bandwidths are lower bounds")  # fmt: skip
    if matched is not None and matched.num_alone and len(found.timed) > 1:
        note("Q315", Severity.INFO,
             f"{matched.num_alone} of {len(matched.table)} collectives were found on one rank only")  # fmt: skip
    if not topology.gpus_per_node and not spans_known and (found.world_size or 1) > 1:
        note("Q316", Severity.WARNING, "the nodes of the ranks are unknown: intra- and inter-node cannot be told apart",
             "pass --gpus-per-node")  # fmt: skip
    if topology.source == "hosts" and len(set(topology.node_of.values())) == 1 and len(found.timed) > 1:
        note("Q319", Severity.INFO,
             "all ranks name the same host, so they count as one node; containers and cloned machines may share a name",
             "pass --gpus-per-node if they are several nodes")  # fmt: skip
    if impossible:
        note("Q317", Severity.WARNING,
             f"{impossible} collectives claim more than 2000 GB/s and were left out of the link fit")  # fmt: skip


def _quality(notes: Sequence[Notice]) -> tuple[out.QualityEntry, ...]:
    order = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.INFO: 2}
    distinct = sorted(set(notes), key=lambda note: (order[note.severity], note.code, note.message))
    return tuple(
        out.QualityEntry(code=note.code, severity=note.severity.value, message=note.message, help=note.help)
        for note in distinct
    )
