"""Findings: what applies, what does not, and what could not be judged (never silently green)."""

from __future__ import annotations

import itertools
from math import inf
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    FINDING_SHARE,
    HOST_CAUSE_SHARE,
    MANY_CALLS,
    ONE_UNIT_BYTES,
    ONE_UNIT_GATHERS,
    ONE_UNIT_PIECES,
    ONE_UNIT_SHARE,
    RARE_CHANCE,
    REDUCTION_RATIO,
)
from paro_advise.advisor.analysis.judgement.operations import operations_text
from paro_advise.advisor.analysis.model import FindingEntry
from paro_advise.advisor.facts.attribution import OF_OPTIMIZER
from paro_advise.advisor.facts.model import REPLAYED_CODE
from paro_advise.advisor.ranks.waiting_costs import least_steps
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.core.collective import POINT_TO_POINT
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.core.plural import plural
from paro_advise.policies.strategy import Level
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry
    from paro_advise.advisor.ranks.stragglers import Lateness, Straggler

APPLIES = "applies"
DOES_NOT_APPLY = "does not apply"
NOT_JUDGED = "could not be judged"


def findings(analysis: Analysis, lateness: Lateness, hidden_by_prefetch_us: float | None) -> list[FindingEntry]:
    """Return all findings: those that apply by saving, then the others.

    Args:
        analysis: without findings.
        lateness: which ranks are late.
        hidden_by_prefetch_us: of a step, what gathers may gain by an earlier start; None where nothing tells.
    """
    found = [
        _exposed_state(analysis, "parameter", "PARO010"),
        _exposed_state(analysis, "gradient", "PARO011"),
        _exposed_state(analysis, "optimizer", "PARO012"),
        _exposed_other(analysis),
        _ungated_replicas(analysis),
        _late_gathers(analysis, hidden_by_prefetch_us),
        _small_messages(analysis),
        _one_unit(analysis),
        _straggler(analysis, lateness),
        _slow_link(analysis),
        _parted_ranks(analysis),
        _host(analysis),
        _find_unattributed(analysis),
    ]
    rank = {APPLIES: 0, NOT_JUDGED: 1, DOES_NOT_APPLY: 2}
    # Healing a late rank saves what no change of the job does; it stands where that much would.
    late_us = sum(item.lateness_us for item in lateness.stragglers) or lateness.once_us
    weight = {("PARO030", APPLIES): late_us}
    return sorted(
        found,
        key=lambda item: (
            rank[item.status],
            -(item.saving_us or weight.get((item.code, item.status), 0.0)),
            item.code,
        ),
    )


def _step(analysis: Analysis) -> float:
    return analysis.breakdown_us.step_us


def _finding(code: str, status: str, text: str, saving_us: float | None = None) -> FindingEntry:
    return FindingEntry(code=code, status=status, text=text, saving_us=saving_us)


def _no_times(code: str) -> FindingEntry:
    return _finding(code, NOT_JUDGED, "no input times the steps; record a torch profiler trace")


def _exposed_state(analysis: Analysis, state: str, code: str) -> FindingEntry:
    step = _step(analysis)
    if not step:
        return _no_times(code)
    entry = analysis.states[state]
    exposed = entry.exposed_us or 0.0
    if exposed >= FINDING_SHARE * step:
        saving = _on_path(analysis, state, exposed - _kept_wait(analysis, state))
        return _finding(code, APPLIES, f"{state} communication is exposed: {entry.text}", saving)
    return _finding(code, DOES_NOT_APPLY, f"{state} communication: {entry.text}")


def _kept_wait(analysis: Analysis, state: str) -> float:
    """Return how long a state's exposed collectives wait for ranks that are late by their own doing, us a step.

    Under any strategy the others wait for such a rank once a step. On a CPU another strategy may leave it more cores.
    """
    if analysis.run.collectives_use_cores:
        return 0.0
    # The least, since what is left is said to be the most that can be saved.
    waits = {name: entry.exposed_wait_us or 0.0 for name, entry in analysis.states.items()}
    total = sum(waits.values())
    late = max([analysis.late_once_us, *(item.lateness_us for item in analysis.stragglers)])
    return waits[state] * min(1.0, late / total) if total else 0.0


def _on_path(analysis: Analysis, state: str, saving_us: float) -> float:
    """Return no more of a saving than the state's transfers on the critical path: a step gains no more without them.

    Fast ranks expose transfers while a late one works on. On a CPU that work has more cores without transfers.
    """
    if analysis.critical_path is None or analysis.run.collectives_use_cores:
        return saving_us
    return min(saving_us, analysis.critical_path.transfer_us.get(state, 0.0))


def _exposed_other(analysis: Analysis) -> FindingEntry:
    """Judge communication that moves no model state: embeddings, experts, tensor and pipeline parallelism."""
    code, step = "PARO013", _step(analysis)
    if not step:
        return _no_times(code)
    entry = analysis.states["other"]
    exposed = entry.exposed_us or 0.0
    if exposed >= FINDING_SHARE * step:
        what = operations_text(analysis.collectives, State.OTHER)
        others = [item for item in analysis.collectives if item.state == "other" and item.detail != OF_OPTIMIZER]
        kind = "communication that no sharding changes"
        if sum(item.exposed_us or 0.0 for item in others) < exposed / 2:
            kind = "what the optimizer gathers in its step, over the ranks that share its states,"
        elif not analysis.model_parallel and _is_mostly_sent(others):
            kind = "communication of no known purpose, from rank to rank,"
        # What waits for ranks whose links are slow is theirs.
        awaited = min(
            entry.exposed_wait_us or 0.0, max((group.excess_us for group in analysis.slow_groups), default=0.0)
        )
        saving = _on_path(analysis, "other", exposed - awaited)
        return _finding(code, APPLIES, f"{kind} is exposed: {what}; {entry.text}", saving)
    return _finding(code, DOES_NOT_APPLY, f"communication that moves no model state: {entry.text}")


def _is_mostly_sent(entries: Sequence[CollectiveEntry]) -> bool:
    """Tell whether most of what these expose are sends and receives."""
    sent = sum(item.exposed_us or 0.0 for item in entries if item.op in POINT_TO_POINT)
    return sent > sum(item.exposed_us or 0.0 for item in entries) / 2


# By whether the run is FSDP1's.
_ONCE_A_STEP = {
    True: "FSDP1: no_sync() before it, for more memory",
    False: "FSDP2: set_requires_all_reduce(False) before it",
}
_PREFETCH = {True: "FSDP1: forward_prefetch=True", False: "FSDP2: set_modules_to_forward_prefetch"}


def _ungated_replicas(analysis: Analysis) -> FindingEntry:
    code = "PARO020"
    micro = analysis.run.micro_batches
    if not _step(analysis):
        return _no_times(code)
    replicas = [entry for entry in analysis.collectives if entry.state == "gradient" and entry.detail == "replica"]
    if micro and micro > 1 and _sums_each_pass(analysis, micro):
        return _finding(
            code,
            APPLIES,
            f"gradients are summed in every one of {micro} micro-batches; once at the accumulation boundary is enough "
            "(no_sync() around all micro-batches but the last)",
            (analysis.states["gradient"].exposed_us or 0.0) * (micro - 1) / micro,
        )
    if not replicas or not micro or micro < 2:
        return _finding(code, DOES_NOT_APPLY, "no replica all-reduce with gradient accumulation")
    reduces = sum(e.count for e in analysis.collectives if e.state == "gradient" and e.detail == "reduce")
    calls = sum(entry.count for entry in replicas)
    exposed = sum(entry.exposed_us or 0.0 for entry in replicas)
    computing = analysis.run.strategy.computing
    holds_whole = (
        computing is not None and computing.gradient == Level.N
    )  # until the last micro-batch, which alone reduces
    if reduces and calls > REDUCTION_RATIO * reduces / (1 if holds_whole else micro):
        return _finding(
            code,
            APPLIES,
            f"the replica all-reduce runs in every one of {micro} micro-batches ({calls:.0f} calls a step); once at "
            f"the accumulation boundary is enough ({_ONCE_A_STEP[analysis.run.framework == Framework.FSDP1]})",
            exposed * (micro - 1) / micro,
        )
    return _finding(code, DOES_NOT_APPLY, "the replica all-reduce runs once per step already")


def _sums_each_pass(analysis: Analysis, micro_batches: int) -> bool:
    """Tell whether DDP moves gradients of all parameters about as often as there are micro-batches."""
    count, computing = analysis.run.parameter_count, analysis.run.strategy.computing
    is_whole = computing is not None and computing.gradient == Level.N
    if not analysis.run.framework.is_ddp or not is_whole or not count:
        return False
    moved = 0.0
    for entry in analysis.collectives:
        width = dtype_bytes(entry.dtype) if entry.dtype else None
        if entry.state == "gradient" and entry.bytes and width:
            moved += entry.count * entry.bytes / width
    return moved > (1 + micro_batches) / 2 * count


def _late_gathers(analysis: Analysis, hidden_by_prefetch_us: float | None) -> FindingEntry:
    code = "PARO021"
    if not _step(analysis):
        return _no_times(code)
    gathers = [entry for entry in analysis.collectives if entry.state == "parameter"]
    again = {entry.bytes for entry in gathers if entry.detail.startswith("backward")}
    # What backward does not gather again is the root, the first of a step: nothing runs before it.
    late = [entry for entry in gathers if "prefetched" not in entry.detail and (not again or entry.bytes in again)]
    exposed = sum(entry.exposed_us or 0.0 for entry in late)
    forward = sum(entry.count for entry in gathers if not entry.detail.startswith("backward"))
    if not analysis.run.framework.is_fsdp or not gathers:
        return _finding(code, DOES_NOT_APPLY, "no FSDP all-gathers")
    if forward <= ONE_UNIT_GATHERS * (analysis.run.micro_batches or 1):
        return _finding(code, DOES_NOT_APPLY, "the model is one unit: there is nothing to prefetch during another")
    # Gathered earlier, they would wait for a late rank all the same.
    waits = min(exposed, analysis.states["parameter"].wait_us or 0.0)
    gain = min(exposed - waits, inf if hidden_by_prefetch_us is None else hidden_by_prefetch_us)
    if gain < FINDING_SHARE * _step(analysis) <= exposed - waits:
        why = "they begin when what was sent before them ends, or a step does, which an earlier call does not change"
        return _finding(code, DOES_NOT_APPLY, f"all-gathers are exposed for {time_text(exposed - waits)} a step: {why}")
    if gain >= FINDING_SHARE * _step(analysis):
        beside = f" beside {time_text(waits)} of waiting for other ranks" if waits >= FINDING_SHARE * exposed else ""
        most = f", of which an earlier start hides {time_text(gain)} at most" if gain < exposed - waits else ""
        return _finding(
            code,
            APPLIES,
            f"all-gathers that were not prefetched are exposed for {time_text(exposed - waits)} a step{beside}{most} "
            f"({_PREFETCH[analysis.run.framework == Framework.FSDP1]})",
            gain,
        )
    return _finding(code, DOES_NOT_APPLY, "all-gathers that were not prefetched are overlapped")


def _one_unit(analysis: Analysis) -> FindingEntry:
    code, framework = "PARO023", analysis.run.framework
    if not _step(analysis):
        return _no_times(code)
    if not (framework.is_fsdp or framework.is_ddp):
        return _finding(code, DOES_NOT_APPLY, "neither FSDP nor DDP")
    reductions = [entry for entry in analysis.collectives if entry.state == "gradient" and entry.detail != "replica"]
    largest = max(reductions, key=lambda entry: entry.bytes or 0, default=None)
    width, count = dtype_bytes(largest.dtype) if largest else None, analysis.run.parameter_count
    if largest is None or not largest.bytes or not width or not count:
        return _finding(code, NOT_JUDGED, "the traces do not tell which part of the model is reduced at once")
    pieces = sum(entry.count for entry in reductions) / largest.count
    # Of a model that is frozen but for its first and last layers these alone are reduced.
    forward = [e for e in analysis.collectives if e.state == "parameter" and not e.detail.startswith("backward")]
    pieces = max(pieces, sum(entry.count for entry in forward) / (analysis.run.micro_batches or 1))
    is_part = largest.bytes < ONE_UNIT_BYTES or largest.bytes / width < ONE_UNIT_SHARE * count
    if is_part or pieces > ONE_UNIT_PIECES:
        return _finding(code, DOES_NOT_APPLY, "the model is sent in several pieces, or is small")
    states = [analysis.states[name] for name in ("parameter", "gradient") if name in analysis.states]
    exposed = sum(state.exposed_us or 0.0 for state in states) - sum(state.wait_us or 0.0 for state in states)
    if exposed < FINDING_SHARE * _step(analysis):
        return _finding(code, DOES_NOT_APPLY, "the model is one piece, whose communication is hidden")
    text = (
        "all gradients are one bucket: smaller ones (bucket_cap_mb) would be reduced beside backward"
        if framework.is_ddp
        else "the whole model is one unit: wrapped block by block it would be gathered and reduced beside compute"
    )
    return _finding(code, APPLIES, f"{text}; now {time_text(exposed)} a step are exposed", exposed)


def _small_messages(analysis: Analysis) -> FindingEntry:
    code = "PARO022"
    if not _step(analysis):
        return _no_times(code)
    late = [(name, entry) for name, entry in analysis.states.items() if entry.regime == "latency"]
    if late:
        name, entry = max(late, key=lambda item: item[1].exposed_us or 0.0)
        if entry.count < MANY_CALLS:
            return _finding(
                code,
                APPLIES,
                f"{name} communication is {plural(round(entry.count), 'short message')} a step, which latency rules: "
                "smaller groups or doing without would shorten it, larger buckets would not",
                entry.exposed_us,
            )
        fewer = {
            State.OTHER.value: "summing them at once, as one stack of norms, needs fewer",
            State.UNKNOWN.value: "whatever they are for, fewer of them, or shorter ways inside a node, cost less",
        }.get(name, "larger units or buckets need fewer")
        return _finding(
            code, APPLIES, f"{name} communication is many small messages ({entry.count:.0f} a step): {fewer}",
            entry.exposed_us,
        )  # fmt: skip
    return _finding(code, DOES_NOT_APPLY, "no state is bound by latency")


def _straggler(analysis: Analysis, lateness: Lateness) -> FindingEntry:
    code = "PARO030"
    if not _step(analysis):
        return _no_times(code)
    if analysis.run.world_size == 1 or _is_alone(analysis):
        return _finding(code, DOES_NOT_APPLY, "there is one rank only")
    if len(analysis.ranks) < 2:
        return _finding(code, NOT_JUDGED, "one rank only: add traces of more ranks, best one per node")
    if lateness.stragglers:
        return _finding(code, APPLIES, _late_ranks(lateness.stragglers))
    if analysis.run.ranks_missing:
        return _finding(code, NOT_JUDGED, "no rank with a trace is a straggler, but one without may be")
    # On a CPU ranks are late for want of a core, each in its turn.
    least_us = inf if analysis.run.collectives_use_cores else HOST_CAUSE_SHARE * _step(analysis)
    # Of all ranks together, for one of them is waited for at a time.
    loading_us = analysis.idle_us.loading * len(analysis.ranks) if analysis.idle_us else 0.0
    return _not_late(lateness, least_us, loading_us)


def _late_ranks(stragglers: Sequence[Straggler]) -> str:
    worst, *others = stragglers
    are, it = ("are", "them") if worst.alike else ("is", "it")
    text = (
        f"{worst.text} {are} late in {worst.share_of_steps:.0%} of the steps (cause: {worst.cause}); the "
        f"others wait {time_text(worst.lateness_us)} a step for {it}, overlapped or exposed"
    )
    for other in others:
        text += f"; rank {other.rank} in {other.share_of_steps:.0%} ({other.cause}), {time_text(other.lateness_us)}"
    if worst.chance is None or worst.chance <= RARE_CHANCE:
        return text
    named = "a node" if worst.are_of_one_node else "some" if worst.alike else "two" if others else "one"
    return (
        f"{text}. Chance names {named} of equal ranks in up to {worst.chance:.0%} of such recordings: record more steps"
    )


def _not_late(lateness: Lateness, least_us: float, loading_us: float) -> FindingEntry:
    """Say that no rank is a straggler, and how long the others wait for another one in each step, from so long on."""
    loads = ", mostly while it waits for its DataLoader" if loading_us > lateness.once_us / 2 else ""
    code, num_steps = "PARO030", lateness.num_steps
    steps = plural(num_steps, "step")
    if not num_steps:
        return _finding(code, NOT_JUDGED, "no collective of all ranks of a group could be joined across them")
    if num_steps < (least := least_steps(lateness.num_ranks)):
        return _finding(code, NOT_JUDGED, f"a rank that is late in {steps} may be so by chance: record {least} or more")
    if lateness.undecided:
        ranks = number_ranges(lateness.undecided)
        who = f"rank {ranks} causes" if len(lateness.undecided) == 1 else f"ranks {ranks} cause"
        text = f"{who} most of the waiting, as equal ranks may by chance in {steps}: record more"
        return _finding(code, NOT_JUDGED, text)
    if lateness.once_us >= least_us and lateness.once_at is not None:
        rank, step = lateness.once_at[0], lateness.once_at[1].replace("ProfilerStep#", "step ")
        return _finding(
            code,
            APPLIES,
            f"in one of {steps} ({step}) rank {rank} is late by its own doing; most of what ranks wait for each other "
            f"is there ({time_text(lateness.once_us)} a step on average), as it would be under any strategy",
        )
    if lateness.once_us >= least_us:
        return _finding(
            code,
            APPLIES,
            f"no rank is late in most steps, but again and again one is late by its own doing{loads}, and the others "
            f"wait for it ({time_text(lateness.once_us)} a step on average, overlapped or exposed), as they would "
            "under any strategy",
        )
    return _finding(code, DOES_NOT_APPLY, "no rank causes most of the waiting in more steps than chance explains")


def _slow_link(analysis: Analysis) -> FindingEntry:
    """Judge links by groups that do the same; inside one ring nothing tells which link is slow."""
    code = "PARO032"
    if not _step(analysis):
        return _no_times(code)
    if not analysis.slow_groups:
        return _finding(code, DOES_NOT_APPLY, "no process group is slower than others that do the same")
    worst = analysis.slow_groups[0]
    return _finding(
        code,
        APPLIES,
        worst.text,
        # Of what is overlapped nothing is gained.
        min(worst.excess_us, max((entry.exposed_communication_us or 0.0 for entry in analysis.ranks), default=0.0)),
    )


def _parted_ranks(analysis: Analysis) -> FindingEntry:
    """Judge where ranks are: groups, which all frameworks make of ranks in a row, should lie inside nodes."""
    code, run = "PARO033", analysis.run
    if not analysis.ranks:
        return _no_times(code)
    if run.ranks_follow is None and run.gpus_per_node and run.world_size == run.gpus_per_node:
        return _finding(code, DOES_NOT_APPLY, "all ranks count as one node")
    if run.ranks_follow is None:
        return _finding(code, NOT_JUDGED, "the names of hosts in the traces do not tell which ranks share a node")
    if run.ranks_follow:
        one = run.gpus_per_node and run.world_size and run.world_size <= run.gpus_per_node
        text = "all ranks are on one node" if one else "the ranks of each node follow each other"
        return _finding(code, DOES_NOT_APPLY, text)
    in_order = sorted(analysis.ranks, key=lambda entry: entry.rank)
    runs = [host for host, _ in itertools.groupby(entry.host for entry in in_order)]
    parted = max(dict.fromkeys(runs), key=runs.count)
    ranks = [entry.rank for entry in in_order if entry.host == parted]
    size = f"{run.gpus_per_node} " if run.gpus_per_node else ""
    return _finding(
        code,
        APPLIES,
        f"ranks of a node do not follow each other: {parted} has {number_ranges(ranks)}. Groups of {size}ranks in a "
        "row cross the network",
    )


def _host(analysis: Analysis) -> FindingEntry:
    code = "PARO031"
    step = _step(analysis)
    if not step:
        return _no_times(code)
    idle, other = analysis.breakdown_us.idle or 0.0, analysis.breakdown_us.other or 0.0
    if not analysis.run.collectives_use_cores and other >= HOST_CAUSE_SHARE * step and other > idle:
        text = (
            f"devices only copy memory for {time_text(other)} a step ({other / step:.0%}): batches, activations or "
            "states from the host (pinned memory and non_blocking=True let computing go on)"
        )
        return _finding(code, APPLIES, text, other)
    if idle >= HOST_CAUSE_SHARE * step and analysis.is_cut:
        return _finding(
            code, NOT_JUDGED, "the traces end early or are damaged, and what is missing looks like idle time"
        )
    if idle >= HOST_CAUSE_SHARE * step:
        text = f"devices are idle for {time_text(idle)} a step ({idle / step:.0%}): {_idle_cause(analysis)}"
        return _finding(code, APPLIES, text, idle)
    return _finding(code, DOES_NOT_APPLY, f"devices are idle for {idle / step:.1%} of the step")


def _idle_cause(analysis: Analysis) -> str:
    """Return in words what the idle time of a step consists of."""
    idle, step = analysis.idle_us, _step(analysis)
    if idle is None or idle.queued is None:
        return "the host feeds them too slowly (data loading, Python, small kernels)"
    starved = max(0.0, (analysis.breakdown_us.idle or 0.0) - idle.queued)
    parts = [
        f"{time_text(starved)} because the host had launched nothing",
        f"{time_text(idle.queued)} although the next kernel was launched already",
    ]
    if idle.data_loading > FINDING_SHARE * step:
        parts.append(
            f"the DataLoader holds the training thread for {time_text(idle.data_loading)}, "
            f"{time_text(idle.loading)} of it while devices idle (num_workers)"
        )
    if idle.updating > FINDING_SHARE * step:
        parts.append(f"the host is in the optimizer's step for {time_text(idle.updating)} of it")
    if idle.synchronisation > FINDING_SHARE * step:
        parts.append(f"the host waits {time_text(idle.synchronisation)} for the device (.item(), copies to the host)")
    return "; ".join(parts)


def _is_alone(analysis: Analysis) -> bool:
    """Tell whether nothing in a trace speaks of other ranks."""
    return analysis.run.world_size is None and len(analysis.ranks) == 1 and not analysis.collectives


def _find_unattributed(analysis: Analysis) -> FindingEntry:
    code = "PARO040"
    if not _step(analysis):
        return _no_times(code)
    total = sum(entry.total_us or 0.0 for entry in analysis.states.values())
    unknown = analysis.states["unknown"].total_us or 0.0
    if total and unknown >= FINDING_SHARE * total:
        kinds = {entry.kind for entry in analysis.run.inputs}
        what = "record with_stack=True, and CPU activities where they are missing"
        if any(note.code == REPLAYED_CODE for note in analysis.data_quality):
            what = "record a few steps without CUDA graphs"
        elif SourceKind.NSYS in kinds and SourceKind.KINETO not in kinds:
            what = "reports of Nsight Systems tell none; traces of the PyTorch profiler do"
        return _finding(code, APPLIES, f"{unknown / total:.0%} of the communication time has no known purpose: {what}")
    return _finding(code, DOES_NOT_APPLY, "all communication has a known purpose")
