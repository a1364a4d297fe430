"""Reduces an analysis to the calibration that the step replay needs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.judgement.verdict import has_unexplained_gaps
from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.facts.model import OTHER_STEPS_CODE, SEVERAL_FRAMEWORKS_CODE, SEVERAL_JOBS_CODE
from paro_advise.advisor.prediction.calibration import Calibration, Update
from paro_advise.advisor.prediction.candidates import baseline_candidate, longer_us
from paro_advise.advisor.prediction.constants import (
    COMPUTE_SLOWING,
    COMPUTE_SLOWING_SIGMA,
    COPY_MEMORY_SHARE,
    FLOAT_BYTES,
    KERNEL_US,
    LEAST_NORM_SHARE,
    UNEVEN_SHARE,
)
from paro_advise.advisor.prediction.fitting.data_parallel import DataParallel, data_parallel
from paro_advise.advisor.prediction.fitting.known_run import known_run
from paro_advise.advisor.prediction.fitting.model_units import (
    Pieces,
    forwards_of,
    gather_width,
    kinds_of,
    model_of,
    reductions_of,
    reductions_per_step,
    trained_share,
    width_of,
)
from paro_advise.advisor.prediction.fitting.observed_queues import ObservedQueues, observed_queues, queue_notes
from paro_advise.advisor.prediction.fitting.profiler_correction import unprofiled
from paro_advise.advisor.prediction.fitting.step_parts import (
    arithmetic_note,
    gaps_us,
    gathers_of_optimizer,
    norms_us,
    overlapped_us,
    step_parts,
    updates_on_host_us,
)
from paro_advise.advisor.prediction.fitting.untraced_waits import may_wait_us, waits_for_untraced
from paro_advise.advisor.prediction.network_tiers import LinkContext, fit_tiers
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.ranks.devices import device_named
from paro_advise.advisor.ranks.links.link import has_unknown_placement
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.collective import Op
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import MODEL_STATES, State
from paro_advise.core.plural import plural
from paro_advise.core.span import GroupSpan
from paro_advise.policies.memory import shards
from paro_advise.policies.plan import EstimateSource
from paro_advise.policies.strategy import Level, Strategy
from paro_advise.policies.traffic import Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry

_ROOT = "of the root's arithmetic nothing, all that its bytes suggest or a part (a prior: embeddings only look rows up)"
_COPIES = (
    f"FSDP2's copies of parameters and gradients, which this run has not, take what their bytes do at "
    f"{COPY_MEMORY_SHARE:.0%} of the rate of the devices' memory (a prior, 60 % to 90 %)"
)
_SLOWING = f"arithmetic takes {COMPUTE_SLOWING} times as long while a collective runs beside it (a prior, 1.0 to 1.3)"


def calibrate(analysis: Analysis, nodes_per_pod: int | None = None) -> Calibration:
    """Reduce an analysis to what the replay needs.

    Args:
        analysis: the run.
        nodes_per_pod: as the user says, None to see whether the links tell.

    Raises:
        InputError: the run does not tell enough: ranks, steps, strategy or model size.
    """
    run, notes = analysis.run, list[str]()
    job, computing = known_run(analysis)
    at_rest = run.strategy.at_rest or computing
    ranks = data_parallel(analysis, job, job_per_node := _ranks_per_node(analysis, job, notes))
    world, per_node, gloo = ranks.world_size, ranks.ranks_per_node, run.collectives_use_cores
    micro, unclear = run.micro_batches or 1, "one micro-batch a step, since backward passes could not be counted"
    notes += [note for note in (ranks.note, "" if run.micro_batches else unclear) if note]
    model = model_of(analysis, world, micro, notes)
    published, reduced = _published_us(analysis), reductions_of(analysis)
    queues = observed_queues(analysis, model, reduced, micro, own_way=published is not None)
    passes = 1 if computing.gradient == Level.N else micro
    finer = _finer_reductions(model, queues, reduced, passes)
    parts = step_parts(analysis, finer, is_gpu=not gloo, own_way=published is not None)
    tiers = fit_tiers(analysis.links, _cluster(analysis, ranks, is_gloo=gloo), nodes_per_pod)
    notes += [*tiers.notes, *arithmetic_note(parts, analysis), *queue_notes(analysis, queues)]
    notes += [*_ambiguities(analysis, computing, micro), *([] if gloo else _priors(analysis, model, at_rest))]
    traced = Calibration(
        job_world_size=job,
        job_ranks_per_node=job_per_node,
        unmodelled=ranks.unmodelled or _why_untrusted(analysis),
        is_dealt_out=run.ranks_follow is False and not ranks.is_placed,
        forwards=forwards_of(analysis, micro),
        trained_share=trained_share(analysis, model),
        world_size=world,
        ranks_per_node=per_node,
        micro_batches=micro,
        **model._asdict(),
        gather_width=gather_width(analysis, model),
        reduce_width=width_of(analysis, State.GRADIENT) or model.element_bytes,
        compute_us=analysis.breakdown_us.compute or 0.0,
        host_update_us=updates_on_host_us(analysis),
        copied_out_us=0.0 if gloo or at_rest.parameter == Level.N else analysis.copied_out_us,
        copied_in_us=0.0 if gloo else analysis.copied_in_us,
        copy_us_per_byte=0.0 if gloo else _copy_us_per_byte(analysis, at_rest),
        gaps_us=min(parts.fixed_us - parts.late_us, gaps_us(analysis)),
        host_us_per_byte=0.0,
        **parts._asdict(),
        wait_group_size=max((entry.group_size or 0 for entry in analysis.collectives), default=0) or world,
        step_us=sum(analysis.step_time_us.values) / len(analysis.step_time_us.values),
        is_gpu=not gloo,
        native_reduce_scatter_is_all_reduce=gloo,
        baseline=at_rest,
        gathers_once=computing.parameter == Level.N and at_rest.parameter != Level.N,
        copy_group_size=_copy_size(analysis, world),
        replicates_each_pass=_replicates_each_pass(analysis, model, reduced, micro),
        scatters_by_all_reduce=computing.optimizer != Level.N and all(entry.op == Op.ALL_REDUCE for entry in reduced),
        **queues._asdict(),
        compute_slowing=_compute_slowing(is_gpu=not gloo),
        update=_update(analysis, world),
        overlapped_us=overlapped_us(analysis),
        seen_share=min(1.0, len(run.ranks) / job),
        num_steps=len(analysis.step_time_us.values),
        published_us=published,
        baseline_group_size=run.strategy.group_size or per_node,
        framework=run.framework,
        copies_buckets=run.copies_buckets,
        assumptions=tuple(notes),
        **{field.name: getattr(tiers, field.name) for field in fields(tiers) if field.name != "notes"},
    )
    return unprofiled(_with_untraced(_at_the_slowest(traced, analysis), analysis), analysis.captured)


def _ambiguities(analysis: Analysis, computing: Strategy, micro: int) -> list[str]:
    """Say what DeepSpeed's traces leave open of its strategy."""
    if analysis.run.framework != Framework.DEEPSPEED:
        return []
    if str(computing) == "NGG" and micro == 1:
        return ["ZeRO-2 is taken to have run: with one micro-batch a step ZeRO-1 sends the same, and holds more"]
    sizes = sorted(
        {entry.group_size for entry in kinds_of(analysis, State.PARAMETER, lambda _: True) if entry.group_size}
    )
    if computing.parameter == Level.G and len(sizes) > 1 and analysis.run.strategy.copy_group_size is None:
        told = " and ".join(map(str, sizes))
        return [
            f"parameters are gathered over {told} ranks: hpZ's second copy seems to be there, its memory is not counted"
        ]
    return []


def _copy_size(analysis: Analysis, world: int) -> int | None:
    """Return the ranks of a group with a second copy, None without one or where groups do not divide all."""
    size = analysis.run.strategy.copy_group_size
    return size if size and 1 < size < world and world % size == 0 else None


def _at_the_slowest(traced: Calibration, analysis: Analysis) -> Calibration:
    """Return a run as the rank sees it that computes longer than the others by its own doing, which sets the pace.

    It hides more communication than they do, so that less of it is left to save: their mean and its lateness as a
    constant would promise too much.
    """
    late = [straggler for straggler in analysis.stragglers if "compute" in straggler.cause]
    slow = {rank for straggler in late for rank in (straggler.rank, *straggler.alike)}
    entry = max((e for e in analysis.ranks if e.rank in slow), key=lambda e: e.compute_us, default=None)
    if entry is None or not traced.is_gpu or traced.late_us <= 0 or entry.compute_us <= traced.compute_us:
        return _at_the_longest(traced, analysis)
    others_us = max((e.compute_us for e in analysis.ranks if e.rank not in slow), default=traced.compute_us)
    mean_exposed_us = analysis.breakdown_us.exposed_communication or 0.0
    hidden_us = traced.overlapped_us + mean_exposed_us - traced.late_us - entry.exposed_communication_us
    return replace(
        traced,
        compute_us=entry.compute_us,
        slower_us=max(0.0, entry.compute_us - others_us),
        overlapped_us=max(traced.overlapped_us, hidden_us),
        fixed_us=traced.fixed_us - traced.late_us,
        late_us=0.0,
        most_late_us=0.0,
    )


def _with_untraced(traced: Calibration, analysis: Analysis) -> Calibration:
    """Return a run with what of its transfers may be waiting for ranks without a trace."""
    untraced_us, times_as_slow = may_wait_us(analysis)
    if not untraced_us:
        return traced
    note = (
        f"{time_text(untraced_us)} of a step is in collectives that move up to {times_as_slow:.1f} times as slowly as "
        "others like them: between none and all of that is taken to be waiting for ranks without a trace"
    )
    return replace(traced, untraced_us=untraced_us, assumptions=(*traced.assumptions, note))


def _at_the_longest(traced: Calibration, analysis: Analysis) -> Calibration:
    """Return a run whose ranks compute unlike amounts, as of sequences of unlike length.

    That is hidden while communication takes longer; as a constant of what was seen of it too little would be left.
    Stages of a pipeline do so by design, and do not meet.
    """
    uneven_us, anew_us = analysis.uneven_us, analysis.uneven_anew_us
    is_even = uneven_us < UNEVEN_SHARE * traced.compute_us
    if not traced.is_gpu or is_even or "pipeline" in analysis.model_parallel:
        return traced
    note = (
        f"ranks compute unlike amounts, the one that does most in a step {time_text(uneven_us)} more than on average; "
        f"of that {time_text(anew_us)} are taken to be another rank's in each micro-batch"
    )
    found = replace(traced, uneven_us=uneven_us, uneven_anew_us=anew_us, assumptions=(*traced.assumptions, note))
    seen_us = min(traced.late_us, longer_us(found, baseline_candidate(found)))
    return replace(
        found,
        fixed_us=traced.fixed_us - seen_us,
        late_us=traced.late_us - seen_us,
        most_late_us=max(0.0, traced.most_late_us - seen_us),
    )


def _why_untrusted(analysis: Analysis) -> str:
    """Return that traces are incomplete or mixed, "" where they are not, or those that are were left out."""
    codes = {notice.code for notice in analysis.data_quality}
    if codes & {SEVERAL_FRAMEWORKS_CODE, SEVERAL_JOBS_CODE}:
        return "the traces are of several jobs"
    if OTHER_STEPS_CODE in codes:
        return "steps as the script marks them are not those of its optimizer"
    if analysis.is_cut:
        return "the traces end early or are damaged, and what is missing looks like idle time"
    parts, idle = analysis.breakdown_us, analysis.idle_us
    queued_us = idle.queued if idle else None
    if has_unexplained_gaps(parts.step_us, parts.exposed_communication or 0.0, parts.idle or 0.0, queued_us):
        return (
            f"for {time_text(queued_us)} of each step no recorded kernel runs although the next one was launched, and "
            "what is done then would be taken for idle time"
        )
    found = _lacks_reductions(analysis) or _on_the_host(analysis)
    found = found or _on_unknown_nodes(analysis) or _across_nodes(analysis) or _hidden_groups(analysis)
    return found or gathers_of_optimizer(analysis) or waits_for_untraced(analysis)


def _lacks_reductions(analysis: Analysis) -> str:
    """Return that sharded parameters are trained whose gradients nothing known reduces."""
    states, at_rest = analysis.states, analysis.run.strategy.at_rest
    sharded = at_rest is not None and at_rest.parameter != Level.N
    if not sharded or states[State.GRADIENT.value].count or analysis.run.strategy.source == StrategySource.METADATA:
        return ""
    return (
        "no reduction of gradients is seen, as where ZeRO++ sends them quantised by all-to-alls, and what other "
        "strategies send of them would be missing"
    )


def _on_unknown_nodes(analysis: Analysis) -> str:
    """Return that traces name several hosts, and neither they nor anything else how many ranks each has."""
    run = analysis.run
    if run.gpus_per_node or not run.num_nodes or run.num_nodes < 2 or (run.world_size or 0) < 2:
        return ""
    return f"its ranks are on {run.num_nodes} hosts or more, and how many a node has is not known; pass --gpus-per-node"


def _across_nodes(analysis: Analysis) -> str:
    """Return that shard groups which would fit into nodes cross them, as where a mesh has its dimensions swapped."""
    run, per_node = analysis.run, analysis.run.gpus_per_node
    size = run.strategy.group_size
    if (
        not (run.strategy.computing is not None and run.strategy.computing.uses_groups)
        or not size
        or not per_node
        or per_node % size
        or run.ranks_follow is False
    ):
        return ""
    sharding = [entry for entry in analysis.collectives if entry.group_size == size and entry.detail != "replica"]
    sharding = [entry for entry in sharding if entry.state in MODEL_STATES]
    if not sharding or any(entry.span in (GroupSpan.INTRA, GroupSpan.UNKNOWN) for entry in sharding):
        return ""
    return (
        f"its shard groups of {plural(size, 'rank')} cross nodes although they would fit into one; swap the dimensions "
        "of the device mesh, (replicas, shards), and record again"
    )


def _hidden_groups(analysis: Analysis) -> str:
    """Return that nothing tells on which nodes smaller groups lie that move model states."""
    world, nodes = analysis.run.world_size or 0, analysis.run.num_nodes or 1
    moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATES]
    sizes = sorted({e.group_size or 0 for e in moved if has_unknown_placement(e.span, e.group_size, world, nodes)})
    if not sizes:
        return ""
    listed = " and ".join(map(str, sizes))
    return (
        f"the ranks of its groups of {listed} are not recorded, so whether their traffic crosses nodes is not known; "
        "later versions of torch record them"
    )


def _on_the_host(analysis: Analysis) -> str:
    """Return that the optimizer steps on the host, whose work other strategies change by what no trace tells."""
    if not (updating_us := updates_on_host_us(analysis)):
        return ""
    return (
        f"the optimizer steps on the host, for {time_text(updating_us)} in which devices idle: with larger or smaller "
        "shards of its states it is taken to need more or less time in proportion, which no trace tells"
    )


def _cluster(analysis: Analysis, ranks: DataParallel, *, is_gloo: bool) -> LinkContext:
    known = {} if is_gloo else analysis.efficiency.concurrent
    concurrent = _concurrent(analysis)  # of both tiers together
    return LinkContext(
        world_size=ranks.world_size,
        ranks_per_node=ranks.ranks_per_node,
        is_gloo=is_gloo,
        concurrent_intra=known.get("intra", concurrent),
        concurrent_inter=known.get("inter", concurrent),
        cores_per_rank=analysis.captured.cores_per_rank if analysis.captured else None,
        device_name=analysis.run.device_name,
    )


def _compute_slowing(*, is_gpu: bool) -> Estimate:
    if not is_gpu:
        return Estimate(value=1.0, sigma=0.0, source=EstimateSource.DERIVED)
    return Estimate(value=COMPUTE_SLOWING, sigma=COMPUTE_SLOWING_SIGMA, source=EstimateSource.PRIOR)


def _update(analysis: Analysis, world: int) -> Update:
    """Return what the optimizer takes of the device, and what it would take of a rank that held all states."""
    run, seen = analysis.run, analysis.update
    if seen is None:
        return Update()
    strategy = run.strategy.at_rest or run.strategy.computing
    members = run.strategy.group_size or world
    shape = Shape(group_size=members, num_groups=max(1, world // members))
    held = shards(strategy.optimizer if strategy else Level.N, shape)
    norm_us = norms_us(analysis)
    whole_norm_us = min(norm_us * held, _slowest_norm_us(analysis))
    least = min(seen.us, KERNEL_US * seen.num_kernels)
    return Update(
        measured_us=seen.us + norm_us,
        least_us=least + norm_us - whole_norm_us / held,
        whole_us=(seen.us - least) * held + whole_norm_us,
    )


def _slowest_norm_us(analysis: Analysis) -> float:
    """Return the longest that norms of all gradients can be expected to take of a device; 0 where it is not known."""
    device, elements = device_named(analysis.run.device_name), analysis.run.parameter_count
    if device is None or device.memory_gbps is None or not elements:
        return 0.0
    return FLOAT_BYTES * elements / (LEAST_NORM_SHARE * device.memory_gbps * 1e3)


def _finer_reductions(model: Pieces, queues: ObservedQueues, reduced: Sequence[CollectiveEntry], passes: int) -> float:
    """Return how many reductions the replay makes of the run's buckets beyond theirs."""
    if queues.reduce_bucket_bytes:
        return 0.0
    return max(0.0, model.num_sent * passes - sum(entry.count for entry in reduced))


def _replicates_each_pass(analysis: Analysis, model: Pieces, reduced: Sequence[CollectiveEntry], micro: int) -> bool:
    if micro == 1:  # once a step is each time
        return False
    replicas = kinds_of(analysis, State.GRADIENT, lambda entry: entry.detail == "replica")
    if sum(entry.count for entry in replicas) > model.num_sent * (micro - 0.5):
        return True
    computing = analysis.run.strategy.computing
    whole_gradients = computing is None or computing.gradient == Level.N
    return whole_gradients and reductions_per_step(analysis, reduced, micro) == micro


def _ranks_per_node(analysis: Analysis, world: int, notes: list[str]) -> int:
    run = analysis.run
    per_node = run.gpus_per_node or world
    if world % per_node:
        per_node = world
        notes.append(f"{run.gpus_per_node} ranks a node do not divide {world}: one node assumed")
    elif not run.gpus_per_node or run.gpus_per_node_source not in ("metadata", "flag", "hosts"):
        source = run.gpus_per_node_source if run.gpus_per_node else "guessed"
        notes.append(f"{per_node} ranks a node ({source}); --gpus-per-node would state it")
    return per_node


def _concurrent(analysis: Analysis) -> float:
    """Return how many collectives of model states were under way at once, on average while any was.

    They shared the links, so that each alone looks as slow as all of them together.
    """
    moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATES]
    alone = sum(entry.count * (entry.p50_us or 0.0) for entry in moved)
    union = sum(entry.total_us or 0.0 for name, entry in analysis.states.items() if name in MODEL_STATES)
    return max(1.0, alone / union) if union else 1.0


def _priors(analysis: Analysis, model: Pieces, at_rest: Strategy) -> list[str]:
    """Say what is taken to be so of every run on devices."""
    copies = [_COPIES] if _copy_us_per_byte(analysis, at_rest) else []
    return [_SLOWING, *copies, *([_ROOT] if model.root_bytes or model.front_bytes else [])]


def _copy_us_per_byte(analysis: Analysis, at_rest: Strategy) -> float:
    """Return what a byte of FSDP2's copies would take, of a run of another framework that has no such copies."""
    device = device_named(analysis.run.device_name)
    has_none = at_rest.parameter == Level.N or (
        analysis.run.framework == Framework.FSDP1 and not analysis.copied_out_us
    )
    if not has_none or analysis.copied_in_us or device is None or device.memory_gbps is None:
        return 0.0
    return 2 / (COPY_MEMORY_SHARE * device.memory_gbps * 1e3)


def _published_us(analysis: Analysis) -> float | None:
    """Return how long updated parameters took to come back in a framework's own way, None in the usual way.

    ZeroRedundancyOptimizer broadcasts them one by one; DeepSpeed's stage 3 gathers the small ones that it
    keeps whole, although parameters and optimizer states lie at the same level.
    """
    entry = analysis.states.get(State.OPTIMIZER.value)
    strategy = analysis.run.strategy.at_rest or analysis.run.strategy.computing
    if entry is None or not entry.count or strategy is None or analysis.run.strategy.source == StrategySource.METADATA:
        return None
    one_by_one = kinds_of(analysis, State.OPTIMIZER, lambda item: item.op == Op.BROADCAST)
    return entry.exposed_us if one_by_one or strategy.parameter == strategy.optimizer else None
