"""What limits the whole step, in one sentence."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    COMPUTE_SHARE,
    FINDING_SHARE,
    HARDLY_OVERLAPPED,
    HOST_CAUSE_SHARE,
    HOST_IDLE_SHARE,
    NAMED_CAUSE_SHARE,
    NONE_OVERLAPPED,
    SLOW_STAGE_RATIO,
    WAIT_SHARE,
)
from paro_advise.advisor.analysis.judgement.headlines import CASES, MOSTLY_COMPUTE, case_of, headline_of
from paro_advise.advisor.analysis.judgement.operations import operations_name, operations_text
from paro_advise.advisor.analysis.judgement.step_evidence import StepEvidence
from paro_advise.advisor.analysis.model import VerdictEntry
from paro_advise.advisor.analysis.regimes import Regime, StepVerdict
from paro_advise.advisor.analysis.summary import step_time
from paro_advise.advisor.facts.model import GRAPHS_CODE
from paro_advise.advisor.ranks.links.link import LatencySource
from paro_advise.advisor.wording.quantities import bytes_text, gbps_text, number_ranges, time_text
from paro_advise.core.collective import Op
from paro_advise.core.framework import Framework
from paro_advise.core.plural import plural
from paro_advise.core.span import CROSSES_NODES, GroupSpan
from paro_advise.policies.strategy import Level
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.analysis.model import Breakdown, CollectiveEntry, IdleParts
    from paro_advise.advisor.analysis.observed.strategy import ObservedStrategy
    from paro_advise.advisor.analysis.state_summary import StateSummary
    from paro_advise.advisor.ranks.links.link import Link
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.slow_groups import SlowGroup
    from paro_advise.advisor.ranks.stragglers import Straggler
    from paro_advise.advisor.ranks.topology import Topology
    from paro_advise.core.model_state import State


def verdict_entry(
    run: Run,
    parts: Breakdown,
    idle: IdleParts | None,
    states: Mapping[State, StateSummary],
    links: Sequence[Link],
    topology: Topology,
    strategy: ObservedStrategy,
    stragglers: Sequence[Straggler],
    collectives: Sequence[CollectiveEntry],
    exchange: str | None,
    slow_groups: Sequence[SlowGroup],
) -> VerdictEntry:
    """Say what limits the step, in a sentence that carries the deciding numbers."""
    if run.timed:
        verdict = _step_verdict(run, parts, idle, states, links, topology, strategy, collectives, exchange)
    else:
        verdict = _log_verdict(run, links)
    text = verdict.text
    if stragglers:
        if verdict.limiting_state and _make_most_of_it(stragglers, run):
            verdict = replace(verdict, regime=Regime.STRAGGLER)
        in_turn, worst = len(stragglers) > 1, stragglers[0]
        who = " and ".join(item.text for item in stragglers)
        are, it = ("are stragglers", "them") if worst.alike or in_turn else ("is a straggler", "it")
        are += " in turn" if in_turn else ""
        cause = " and ".join(dict.fromkeys(item.cause for item in stragglers))
        waits = f"the others wait {time_text(sum(item.lateness_us for item in stragglers))} a step for {it}"
        if verdict.regime == Regime.STRAGGLER:
            text = _with_headline(text, f"Straggler bound: {who} {are} ({cause}) and {waits}. ")
        else:
            text += f" {who.capitalize()} {are} ({cause}): {waits}."
    elif slow_groups:
        verdict = _with_slow_link(verdict, slow_groups[0], run, parts.exposed_communication or 0.0)
        text = verdict.text
    return VerdictEntry(
        regime=verdict.regime.value,
        limiting_state=verdict.limiting_state,
        text=text,
        case=verdict.case,
        case_text=CASES.get(verdict.case, ""),
    )


def _with_slow_link(verdict: StepVerdict, slow: SlowGroup, run: Run, exposed_us: float) -> StepVerdict:
    """Return a verdict that names the slow links of some ranks, first where most of what is exposed is their excess.

    These expose most of it themselves then; of what they hide nothing is gained.
    """
    own = [step.exposed_communication_us for rank, item in run.timed if rank in slow.ranks for step in item.steps]
    is_exposed = bool(own) and sum(own) / len(own) >= WAIT_SHARE * slow.excess_us
    is_most = verdict.limiting_state and slow.excess_us >= WAIT_SHARE * exposed_us
    if not (is_exposed and is_most) or verdict.text.startswith(MOSTLY_COMPUTE):
        return replace(verdict, text=f"{verdict.text} {slow.text[:1].upper()}{slow.text[1:]}.")
    waits = "Other ranks wait for that. " if verdict.regime == Regime.STRAGGLER else ""
    regime = {GroupSpan.INTER: Regime.BANDWIDTH_INTER, GroupSpan.INTRA: Regime.BANDWIDTH_INTRA}.get(slow.span)
    text = _with_headline(verdict.text, f"Slow link: {slow.text}. {waits}")
    return replace(verdict, regime=regime or verdict.regime, case="", text=text)


def _with_headline(text: str, headline: str) -> str:
    """Return a verdict's text with another cause in front of what its operations take."""
    untrained = _NO_TRAINING if text.startswith(_NO_TRAINING) else ""
    rest = text[len(untrained) :].partition(": ")[2]
    return f"{headline}{untrained}{rest[:1].upper()}{rest[1:]}"


def _make_most_of_it(stragglers: Sequence[Straggler], run: Run) -> bool:
    """Tell whether most of what others expose is waiting for stragglers, one of which does not wait itself.

    One that is late in each step exposes less than half of what the others do: its transfers are theirs. But it hides
    more of them behind its longer arithmetic, too, so that what the others wait must be most of what they expose.
    """
    late = {rank for item in stragglers for rank in (item.alike or (item.rank,))}
    exposed = {rank: [step.exposed_communication_us for step in item.steps] for rank, item in run.timed}
    own = [value for rank, values in exposed.items() if rank in late for value in values]
    others = [value for rank, values in exposed.items() if rank not in late for value in values]
    if not (own and others):
        return False
    of_others = sum(others) / len(others)
    waits = sum(item.lateness_us for item in stragglers) >= WAIT_SHARE * of_others
    return waits and (len(stragglers) > 1 or sum(own) / len(own) < (1 - WAIT_SHARE) * of_others)


def _step_verdict(
    run: Run,
    parts: Breakdown,
    idle: IdleParts | None,
    states: Mapping[State, StateSummary],
    links: Sequence[Link],
    topology: Topology,
    strategy: ObservedStrategy,
    collectives: Sequence[CollectiveEntry],
    exchange: str | None,
) -> StepVerdict:
    def best(spans: tuple[str, ...]) -> float | None:
        values = [link.busbw_gbps for link in links if link.span in spans and link.busbw_gbps]
        return max(values, default=None)

    at_rest = strategy.at_rest
    found = judge_step(
        StepEvidence(
            step_time_us=run.mean_step_us,
            compute_us=parts.compute or 0.0,
            exposed_us=parts.exposed_communication or 0.0,
            idle_us=parts.idle or 0.0,
            exposed_by_state={
                state: item.entry.exposed_us or 0.0 for state, item in states.items() if item.entry.count
            },
            regime_by_state={state: item.limits for state, item in states.items()},
            num_nodes=len(set(topology.node_of.values())) or None,
            inter_gbps=best(CROSSES_NODES),
            intra_gbps=best((GroupSpan.INTRA,)),
            shards_globally=at_rest is not None and at_rest.parameter == Level.G,
            sees_all_ranks=run.sees_all,
            is_cut=run.is_cut,
            hides_graphs=any(notice.code == GRAPHS_CODE for _, item in run.timed for notice in item.facts.notices),
            total_by_state={state: item.entry.total_us or 0.0 for state, item in states.items()},
            operations={state: operations_text(collectives, state) for state in states},
            exchange=exchange,
            queued_us=idle.queued if idle else None,
            loading_us=idle.loading if idle else 0.0,
            updating_us=idle.updating if idle else 0.0,
            copied_us=(parts.other or 0.0) if any(item.facts.is_gpu for _, item in run.timed) else 0.0,
            blocked_us=idle.synchronisation if idle else 0.0,
            updates_whole_us=_mean_us(run, "update_us")
            if at_rest is not None and at_rest.optimizer == Level.N
            else 0.0,
            laid_out_us=_mean_us(run, "copied_out_us"),
            trains=run.trains,
            slow_stage=_slow_stage(run, parts.exposed_communication or 0.0) if exchange == "pipeline" else "",
        )
    )
    return replace(found, text=found.text + _stalls_text(run))


def _stalls_text(run: Run) -> str:
    """Return that steps that stalled are left out, or hold much of the means, "" where none did."""
    told = f" {run.stall.text}." if run.stall else ""
    times = step_time(run)
    num_stalled, stalled_us = times.stalled
    if not times.has_stalls:
        return told
    hold = "holds" if num_stalled == 1 else "hold"
    return told + (
        f" These are means: {num_stalled} of {len(times.values)} steps stalled and {hold} {time_text(stalled_us)} of "
        f"them, half of all steps take {time_text(times.median)} at the most."
    )


def _log_verdict(run: Run, links: Sequence[Link]) -> StepVerdict:
    """Say what inputs without step times tell: a hang, volumes, links."""
    has_trace = any(item.facts.source.kind == SourceKind.KINETO for item in run.untimed)
    dumps = [item.facts for item in run.untimed if item.facts.source.kind == SourceKind.FLIGHT_RECORDER]
    hangs = sum(notice.code == "Q250" for facts in dumps for notice in facts.notices)
    tables = [item.collectives for item in run.untimed]
    count = sum(map(len, tables))
    volume = sum(float(table["bytes"].sum() or 0) for table in tables)
    unsized = sum(table["bytes"].null_count() for table in tables)
    parts = []
    if hangs:
        parts.append(
            f"The run probably hung: collectives that never ended are in {hangs} of {plural(len(dumps), 'dump')}"
        )
    if count:
        where = f", as {len(run.untimed_ranks)} ranks logged them" if len(run.untimed_ranks) > 1 else ""
        were = "was" if count == 1 else "were"
        of = " of unknown size" if unsized == count else f" of{' at least' if unsized else ''} {bytes_text(volume)}"
        parts.append(f"{plural(count, 'collective')}{of} {were} counted{where}")
    known = [link for link in links if link.reached_gbps and link.op != Op.UNKNOWN]
    if known:
        best = max(known, key=lambda link: link.reached_gbps or 0.0)
        ranks = f"{operations_name(best.op)} over {plural(best.group_size, 'rank')}"
        reach = "reach at least" if best.is_lower_bound else "reach"
        is_told = best.latency_source == LatencySource.MEASURED
        beside = "" if is_told or best.is_lower_bound else ", latency included"
        parts.append(f"{ranks} {reach} {gbps_text(best.reached_gbps)} bus bandwidth{beside}")
    headers = [item.header for item in run.untimed]
    median_us = next((header.median_iteration_us for header in headers if header.median_iteration_us), None)
    mean_us = next((header.mean_iteration_us for header in headers if header.mean_iteration_us), None)
    if iteration_us := median_us or mean_us:
        what = "median" if median_us else "mean"
        parts.append(f"iterations take {time_text(iteration_us)} ({what} of the training log)")
    elif headers and all(header.is_benchmark for header in headers):
        parts.insert(0, "No training: this is a benchmark's output")
    elif not dumps and not has_trace and not any(header.framework != Framework.UNKNOWN for header in headers):
        parts.insert(0, _NOTHING_TOLD)
    parts.append("these inputs contain no timing within a step, so what limits it cannot be told")
    text = "; ".join(parts) + "."
    return StepVerdict(regime=Regime.UNKNOWN, limiting_state=None, text=text[0].upper() + text[1:], case="")


def _slow_stage(run: Run, exposed_us: float) -> str:
    """Return whose passes compute longer than the others' by most of what is exposed, "" where none do, or none tells.

    Args:
        run: with traces of all ranks.
        exposed_us: of communication, mean over ranks.
    """
    of_rank = {}
    for rank, item in run.timed:
        passes = [(step.forward_us, step.backward_us) for step in item.steps]
        if any(forward is None or backward is None for forward, backward in passes):
            return ""
        of_rank[rank] = sum((forward or 0.0) + (backward or 0.0) for forward, backward in passes) / max(1, len(passes))
    usual = median(of_rank.values())
    slow = sorted(rank for rank, us in of_rank.items() if us >= SLOW_STAGE_RATIO * usual > 0)
    took_us = sum(of_rank[rank] for rank in slow) / max(1, len(slow))
    explains = took_us - usual >= WAIT_SHARE * exposed_us
    if not slow or 2 * len(slow) >= len(of_rank) or not explains or not run.sees_all:
        return ""
    who = f"ranks {number_ranges(slow)} compute" if len(slow) > 1 else f"rank {slow[0]} computes"
    return f"{who} {time_text(took_us)}, most others {time_text(usual)}"


def _mean_us(run: Run, field: str) -> float:
    return sum(getattr(step, field) for step in run.steps) / len(run.steps) if run.steps else 0.0


def has_unexplained_gaps(step_us: float, exposed_us: float, idle_us: float, queued_us: float | None) -> bool:
    """Tell whether most of a step's idle time, and more than it communicates, passes with the next kernel launched.

    Args:
        step_us, exposed_us, idle_us: of the step, what communication exposes, and the idle rest.
        queued_us: of the idle time, with the next kernel launched already; None where that is not known.
    """
    return idle_us > HOST_IDLE_SHARE * step_us and idle_us > exposed_us and (queued_us or 0.0) > 0.5 * idle_us


def judge_step(evidence: StepEvidence) -> StepVerdict:
    """Name what limits the step."""
    step = evidence.step_time_us
    if step <= 0:
        return StepVerdict(
            regime=Regime.UNKNOWN,
            limiting_state=None,
            text="The input carries no step times, so what limits the step cannot be told.",
            case="",
        )
    if evidence.is_cut:
        return StepVerdict(
            regime=Regime.UNKNOWN,
            limiting_state=None,
            text="No verdict: the trace ends early or lacks events, and what is missing would look like idle time. "
            "The figures below cover what is there; record it again.",
            case="",
        )
    if evidence.hides_graphs:
        return StepVerdict(
            regime=Regime.UNKNOWN,
            limiting_state=None,
            text="No verdict: CUDA graphs were recorded as wholes, and all that runs in them counts as computing, "
            "collectives too. Record with nsys profile --cuda-graph-trace=node.",
            case="",
        )
    comm, idle, compute = (value / step for value in (evidence.exposed_us, evidence.idle_us, evidence.compute_us))
    copies = evidence.copied_us / step
    copied = f", copies {copies:.0%}" if copies >= COMPUTE_SHARE else ""
    split = f"compute {compute:.0%}, exposed communication {comm:.0%}{copied}, idle {idle:.0%} of {time_text(step)}"
    state = max(evidence.exposed_by_state, key=lambda key: evidence.exposed_by_state[key], default=None)
    untrained = _untrained_text(evidence)
    advice = "" if untrained or comm >= COMPUTE_SHARE else " Sharding will not help."
    if has_unexplained_gaps(step, evidence.exposed_us, evidence.idle_us, evidence.queued_us):
        return StepVerdict(
            regime=Regime.UNKNOWN, limiting_state=None, text=untrained + _queued_text(evidence, split), case=""
        )
    if copies > HOST_IDLE_SHARE and copies > max(comm, idle):
        return StepVerdict(
            regime=Regime.HOST_BOUND,
            limiting_state=None,
            text=f"{untrained}Bound by copies: for {time_text(evidence.copied_us)} of the {time_text(step)} step the "
            f"devices only copy memory, as where batches or offloaded states come from the host ({split}).{advice}",
            case="",
        )
    if idle > HOST_IDLE_SHARE and idle > comm:
        return StepVerdict(
            regime=Regime.HOST_BOUND,
            limiting_state=None,
            text=f"{untrained}Host bound: {_host_text(evidence)} ({split})."
            + ("" if evidence.updating_us > 0.5 * evidence.idle_us else advice),
            case="",
        )
    if comm < COMPUTE_SHARE or state is None:
        gain = "" if untrained else _most_text(evidence)
        return StepVerdict(
            regime=Regime.COMPUTE_BOUND,
            limiting_state=None,
            text=f"{untrained}Compute bound: {split}.{gain}",
            case="fast_fabric" if (evidence.num_nodes or 0) > 1 and not untrained else "",
        )
    state, together = _most_of_one_regime(state, evidence)
    regime = evidence.regime_by_state[state]
    return StepVerdict(
        regime=regime,
        limiting_state=state.value,
        text=f"{untrained}{headline_of(regime, state, evidence)} {_state_text(state, evidence, split)}{together}",
        case=case_of(evidence, comm) if regime in _OF_THE_NETWORK else "",
    )


# Regimes in which what several states expose has one cause.
_OF_ONE_CAUSE = (Regime.BANDWIDTH_INTER, Regime.BANDWIDTH_INTRA, Regime.LATENCY)
# Regimes under which a typical case of the network's is named.
_OF_THE_NETWORK = (Regime.BANDWIDTH_INTER, Regime.LATENCY, Regime.CONTENTION)


def _most_of_one_regime(longest: State, evidence: StepEvidence) -> tuple[State, str]:
    """Return the state to name: of those that one regime limits, where these expose more than the longest with its own.

    Also that sum in words, "" where it is the longest anyhow.
    """
    sums: dict[Regime, float] = {}
    least_us = FINDING_SHARE * evidence.step_time_us
    for state, exposed_us in evidence.exposed_by_state.items():
        regime = evidence.regime_by_state.get(state, Regime.UNKNOWN)
        sums[regime] = sums.get(regime, 0.0) + (exposed_us if exposed_us >= least_us else 0.0)
    own = evidence.regime_by_state[longest]
    most = max(_OF_ONE_CAUSE, key=lambda regime: sums.get(regime, 0.0))
    if own == most or sums.get(most, 0.0) <= max(sums[own], evidence.exposed_by_state[longest]):
        return longest, ""
    limited = (state for state, us in evidence.exposed_by_state.items() if us >= least_us)
    alike = [state for state in limited if evidence.regime_by_state.get(state) == most]
    first, *others = sorted(alike, key=lambda state: -evidence.exposed_by_state[state])
    names = " and ".join(f"{state} communication" for state in others)
    share = min(1.0, sums[most] / max(evidence.exposed_us, 1e-9))
    are = "is" if len(others) == 1 else "are"
    return first, f" With {names}, which {are} bound alike, {time_text(sums[most])} are exposed ({share:.0%} of all)."


def _most_text(evidence: StepEvidence) -> str:
    """Return what a change of sharding can gain at the most."""
    step, total = evidence.step_time_us, sum(evidence.total_by_state.values())
    most = f"{evidence.exposed_us / step:.1%}"
    # Kernels take longer while a collective runs beside them; how much longer no trace of one strategy tells.
    is_beside = total - sum(evidence.exposed_by_state.values()) > FINDING_SHARE * step
    if most == "0.0%":
        rest = "can gain only what arithmetic loses beside collectives" if is_beside else "will not help"
        return f" No communication is exposed: sharding {rest}."
    parts = [
        *(["what arithmetic loses beside collectives"] if is_beside else []),
        *(
            f"what {text} takes ({us / step:.1%})"
            for text, us in (
                ("the optimizer's step on each rank", evidence.updates_whole_us),
                ("laying out gathered parameters", evidence.laid_out_us),
            )
            if us >= FINDING_SHARE * step
        ),
    ]
    if not parts:
        return f" No change of sharding can gain more than {most}."
    added = f"{', '.join(parts[:-1])} and {parts[-1]}" if parts[1:] else parts[0]
    return f" A change of sharding can gain at most the {most} of exposed communication and, on top of it, {added}."


_NOTHING_TOLD = "Nothing here tells whether a model is trained"


def _untrained_text(evidence: StepEvidence) -> str:
    """Say that nothing trains, or that nothing tells, "" where a model trains or its ranks talk to each other."""
    if evidence.trains is False:
        return _NO_TRAINING
    return f"{_NOTHING_TOLD}. " if evidence.trains is None and not evidence.exposed_by_state else ""


_NO_TRAINING = "No training was recorded: neither a backward pass nor an optimizer's step. "


def _state_text(state: State, evidence: StepEvidence, split: str) -> str:
    """Return what a state's collectives cost, in the words of its operations."""
    exposed = evidence.exposed_by_state[state]
    # States that run at the same time are each exposed: shares may sum to more than one.
    share = min(exposed / max(evidence.exposed_us, 1e-9), 1.0)
    total = evidence.total_by_state.get(state, exposed)
    overlap = f"{exposed / max(total, 1e-9):.0%} of it exposed"
    if exposed >= HARDLY_OVERLAPPED * total:
        overlap = "none of it overlapped" if exposed >= NONE_OVERLAPPED * total else "hardly any of it overlapped"
    what = evidence.operations.get(state) or f"{state} communication"
    is_one = what.startswith("1 ") and " and " not in what
    take = "takes" if is_one or not evidence.operations.get(state) else "take"
    return (
        f"{what} {take} {time_text(total)} of the {time_text(evidence.step_time_us)} step, {overlap} "
        f"({time_text(exposed)}, {share:.0%} of all exposed communication; {split})."
    )


def _host_text(evidence: StepEvidence) -> str:
    """Return why the devices idle, as far as the host's own rows tell."""
    causes = (
        (evidence.loading_us, "the DataLoader holds the training thread"),
        (evidence.updating_us, "the host is in the optimizer's step"),
    )
    longest, cause = max(causes)
    if longest > NAMED_CAUSE_SHARE * evidence.idle_us:
        step = time_text(evidence.step_time_us)
        return f"{cause} for {time_text(longest)} of the {step} step while the devices wait"
    return "the devices wait for work that the host has not launched yet" if evidence.queued_us is not None else (
        "the devices wait for work"
    )  # fmt: skip


def _queued_text(evidence: StepEvidence, split: str) -> str:
    """Return what is known where devices idle although their work was launched."""
    text = (
        f"Cannot tell: for {time_text(evidence.queued_us)} of the {time_text(evidence.step_time_us)} step no recorded "
        "kernel runs although the next one was launched already: kernels are missing from the trace (CUDA graphs), or "
        f"streams wait for each other ({split})."
    )
    if evidence.blocked_us > HOST_CAUSE_SHARE * evidence.step_time_us:
        text += f" The host is not short of time: it waits {time_text(evidence.blocked_us)} a step for the device."
    state = max(evidence.exposed_by_state, key=lambda key: evidence.exposed_by_state[key], default=None)
    if state is not None and evidence.operations.get(state):
        exposed = time_text(evidence.exposed_by_state[state])
        text += f" Certain is what {evidence.operations[state]} expose: {exposed}."
    return text
