"""Reduces an analysis to the calibration that the step replay needs."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import FROZEN_RATIO, HOST_CAUSE_SHARE
from paro_advise.advisor.analysis.judgement.verdict import has_unexplained_gaps
from paro_advise.advisor.facts.model import OTHER_STEPS_CODE, SEVERAL_FRAMEWORKS_CODE
from paro_advise.advisor.prediction.calibration import Calibration, Update
from paro_advise.advisor.prediction.constants import (
    ALL_TRAINED_SHARE,
    ASSUMED_UNITS,
    BLOCKING_SHARE,
    COMPUTE_SLOWING,
    COMPUTE_SLOWING_SIGMA,
    FEW_UNITS,
    KERNEL_US,
    LITTLE_UPDATE_SHARE,
)
from paro_advise.advisor.prediction.fitting.data_parallel import DataParallel, data_parallel
from paro_advise.advisor.prediction.fitting.known_run import known_run
from paro_advise.advisor.prediction.fitting.profiler_correction import unprofiled
from paro_advise.advisor.prediction.fitting.step_parts import (
    MODEL_STATE_NAMES,
    arithmetic_note,
    gaps_us,
    gathers_of_optimizer,
    overlapped_us,
    step_parts,
)
from paro_advise.advisor.prediction.fitting.untraced_waits import waits_for_untraced
from paro_advise.advisor.prediction.network_tiers import Estimate, LinkContext, fit_tiers
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes, is_of_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.core.plural import plural
from paro_advise.errors import InputError
from paro_advise.policies.memory import shards
from paro_advise.policies.strategy import Strategy
from paro_advise.policies.traffic import Shape

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry

_ROOT = "of the root's arithmetic nothing, all that its bytes suggest or a part (a prior: embeddings only look rows up)"
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
    job, triple = known_run(analysis)
    at_rest = run.strategy.triple_at_rest or triple
    ranks = data_parallel(analysis, job, job_per_node := _ranks_per_node(analysis, job, notes))
    world, per_node = ranks.world_size, ranks.ranks_per_node
    micro, unclear = run.micro_batches or 1, "one micro-batch a step, since backward passes could not be counted"
    notes += [note for note in (ranks.note, "" if run.micro_batches else unclear) if note]
    model = _model(analysis, world, micro, notes)
    gloo = run.backend == "gloo"
    published, reduced = _published_us(analysis), _reductions(analysis)
    finer = _finer_reductions(model, reduced, 1 if triple[1] == "N" else micro)
    parts = step_parts(analysis, finer, is_gpu=not gloo, own_way=published is not None)
    tiers = fit_tiers(analysis.links, _cluster(analysis, ranks, is_gloo=gloo), nodes_per_pod)
    notes += [*tiers.notes, *arithmetic_note(parts, analysis)]
    notes += _ambiguities(analysis, triple, micro) + ([] if gloo else [_SLOWING, *([_ROOT] if model.root else [])])
    traced = Calibration(
        job_world_size=job,
        job_ranks_per_node=job_per_node,
        unmodelled=ranks.unmodelled or _why_untrusted(analysis),
        is_dealt_out=run.ranks_follow is False and not ranks.is_placed,
        forwards=_forwards(analysis, micro),
        trained_share=_trained_share(analysis, model),
        world_size=world,
        ranks_per_node=per_node,
        micro_batches=micro,
        unit_bytes=model.units,
        root_bytes=model.root,
        bucket_bytes=model.buckets,
        element_bytes=model.element_bytes,
        gather_width=_gather_width(analysis, model),
        reduce_width=_width(analysis, State.GRADIENT) or model.element_bytes,
        compute_us=analysis.breakdown_us.compute or 0.0,
        gaps_us=min(parts.fixed_us - parts.late_us, gaps_us(analysis)),
        host_us_per_byte=0.0,
        **parts._asdict(),
        wait_group_size=max((entry.group_size or 0 for entry in analysis.collectives), default=0) or world,
        step_us=sum(analysis.step_time_us.values) / len(analysis.step_time_us.values),
        traced_error_pct=None,
        is_gpu=not gloo,
        native_reduce_scatter_is_all_reduce=gloo,
        baseline=Strategy.parse(at_rest),
        gathers_once=triple[0] == "N" and at_rest[0] != "N",
        copy_group_size=_copy_size(analysis, world),
        replicates_each_pass=_replicates_each_pass(analysis, model, reduced, micro),
        scatters_by_all_reduce=triple[2] != "N" and all(entry.op == Op.ALL_REDUCE for entry in reduced),
        overlaps_gathers=_overlaps(analysis, State.PARAMETER),
        overlaps_reductions=_overlaps(analysis, State.GRADIENT),
        compute_slowing=_compute_slowing(is_gpu=not gloo),
        update=_update(analysis, world),
        overlapped_us=overlapped_us(analysis),
        seen_share=min(1.0, len(run.ranks) / job),
        num_steps=len(analysis.step_time_us.values),
        published_us=published,
        baseline_group_size=run.strategy.group_size or per_node,
        framework=run.framework,
        assumptions=tuple(notes),
        **{field.name: getattr(tiers, field.name) for field in fields(tiers) if field.name != "notes"},
    )
    return unprofiled(traced, analysis.captured)


def _ambiguities(analysis: Analysis, triple: str, micro: int) -> list[str]:
    """Say what DeepSpeed's traces leave open of its strategy."""
    if analysis.run.framework != Framework.DEEPSPEED:
        return []
    if triple == "NGG" and micro == 1:
        return ["ZeRO-2 is taken to have run: with one micro-batch a step ZeRO-1 sends the same, and holds more"]
    sizes = sorted(
        {entry.group_size for entry in _kinds(analysis, State.PARAMETER, lambda _: True) if entry.group_size}
    )
    if triple[0] == "G" and len(sizes) > 1 and analysis.run.strategy.copy_group_size is None:
        told = " and ".join(map(str, sizes))
        return [
            f"parameters are gathered over {told} ranks: hpZ's second copy seems to be there, its memory is not counted"
        ]
    return []


def _copy_size(analysis: Analysis, world: int) -> int | None:
    """Return the ranks of a group with a second copy, None without one or where they are no part of those that share."""
    size = analysis.run.strategy.copy_group_size
    return size if size and 1 < size < world and world % size == 0 else None


def _why_untrusted(analysis: Analysis) -> str:
    """Return that traces are incomplete or mixed, "" where they are not, or those that are were left out."""
    codes = {notice.code for notice in analysis.data_quality}
    if SEVERAL_FRAMEWORKS_CODE in codes:
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
    found = _on_the_host(analysis) or _across_nodes(analysis) or gathers_of_optimizer(analysis)
    return found or waits_for_untraced(analysis)


def _across_nodes(analysis: Analysis) -> str:
    """Return that shard groups which would fit into nodes cross them, as where a mesh has its dimensions swapped."""
    run, per_node = analysis.run, analysis.run.gpus_per_node
    size = run.strategy.group_size
    if (
        "I" not in (run.strategy.triple or "")
        or not size
        or not per_node
        or per_node % size
        or run.ranks_follow is False
    ):
        return ""
    sharding = [entry for entry in analysis.collectives if entry.group_size == size and entry.detail != "replica"]
    sharding = [entry for entry in sharding if entry.state in MODEL_STATE_NAMES]
    if not sharding or any(entry.span in ("intra", "unknown") for entry in sharding):
        return ""
    return (
        f"its shard groups of {plural(size, 'rank')} cross nodes although they would fit into one; swap the dimensions "
        "of the device mesh, (replicas, shards), and record again"
    )


def _on_the_host(analysis: Analysis) -> str:
    """Return that the optimizer steps on the host, whose work other strategies change by what no trace tells."""
    updating_us = analysis.idle_us.updating if analysis.idle_us else 0.0
    on_devices_us = analysis.update.us if analysis.update else 0.0
    is_long = updating_us > HOST_CAUSE_SHARE * analysis.breakdown_us.step_us
    if analysis.run.backend == "gloo" or not is_long or on_devices_us > LITTLE_UPDATE_SHARE * updating_us:
        return ""
    return (
        f"the optimizer steps on the host, for {time_text(updating_us)} in which devices idle: with larger or smaller "
        "shards of its states it takes more or less time"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What the traces show of the model: see ``unit_bytes``, ``bucket_bytes``, ``element_bytes`` of Calibration."""

    units: tuple[float, ...]
    buckets: tuple[float, ...] | None
    element_bytes: int
    root: float = 0.0  # see ``root_bytes`` there

    @property
    def num_sent(self) -> int:
        """Return how many pieces the run itself sends at once in a pass."""
        return len(self.buckets or self.units)


def _model(analysis: Analysis, world: int, micro: int, notes: list[str]) -> _Model:
    """Return the model's units.

    Raises:
        InputError: no collective tells them.
    """
    run = analysis.run
    units, element_bytes = _units(analysis, world, micro)
    if not units:
        moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATE_NAMES]
        raise InputError(
            "a recommendation must know the model's size, got "
            + ("collectives whose sizes are not recorded" if moved else "no collective of parameters or gradients"),
            hint="record with record_shapes=True" if moved else "record whole forward and backward passes of a step",
        )
    if len(units) >= FEW_UNITS or run.framework.is_fsdp or run.framework == Framework.RUNTIME:
        root = _root_bytes(analysis, units, micro)
        return _Model(units=_root_last(units, root), buckets=None, element_bytes=element_bytes, root=root)
    # Another strategy runs block by block, which costs more calls than a few large buckets.
    notes.append(
        f"the model's blocks are not in the traces, which show {plural(len(units), 'bucket')}: {ASSUMED_UNITS} assumed"
    )
    assumed = (sum(units) / ASSUMED_UNITS,) * ASSUMED_UNITS
    return _Model(units=assumed, buckets=units, element_bytes=element_bytes)


def _width(analysis: Analysis, state: State) -> int | None:
    """Return the bytes of an element of most of a state's traffic, None where no type is recorded."""
    moved: dict[int, float] = {}
    for entry in _kinds(analysis, state, lambda entry: bool(entry.dtype) and not is_of_bytes(entry.dtype)):
        if width := dtype_bytes(entry.dtype):
            moved[width] = moved.get(width, 0.0) + entry.count * float(entry.bytes or 0)
    return max(moved, key=lambda width: moved[width], default=None)


def _gather_width(analysis: Analysis, model: _Model) -> int:
    """Return the bytes of a parameter that is gathered: as seen, else of what matrix products take."""
    seen = _width(analysis, State.PARAMETER) or _width(analysis, State.OPTIMIZER)
    return seen or (2 if analysis.run.computes_16_bit else model.element_bytes)


def _overlaps(analysis: Analysis, state: State) -> bool:
    """Tell whether any of a state's communication ran beside compute."""
    entry = analysis.states.get(state.value)
    if entry is None or not entry.total_us or entry.exposed_us is None:
        return True
    return entry.exposed_us < BLOCKING_SHARE * entry.total_us


def _compute_slowing(*, is_gpu: bool) -> Estimate:
    if not is_gpu:
        return Estimate(value=1.0, sigma=0.0, source="derived")
    return Estimate(value=COMPUTE_SLOWING, sigma=COMPUTE_SLOWING_SIGMA, source="prior")


def _update(analysis: Analysis, world: int) -> Update:
    """Return what the optimizer takes of the device, and what it would take of a rank that held all states."""
    run, seen = analysis.run, analysis.update
    if seen is None:
        return Update()
    triple = run.strategy.triple_at_rest or run.strategy.triple or "NNN"
    members = run.strategy.group_size or world
    shape = Shape(group_size=members, num_groups=max(1, world // members))
    least = min(seen.us, KERNEL_US * seen.num_kernels)
    whole = (seen.us - least) * shards(Strategy.parse(triple).optimizer, shape)
    return Update(measured_us=seen.us, least_us=least, whole_us=whole)


def _finer_reductions(model: _Model, reduced: Sequence[CollectiveEntry], passes: int) -> float:
    """Return how many reductions the replay makes of the run's buckets beyond theirs."""
    return max(0.0, model.num_sent * passes - sum(entry.count for entry in reduced))


def _replicates_each_pass(analysis: Analysis, model: _Model, reduced: Sequence[CollectiveEntry], micro: int) -> bool:
    if micro == 1:  # once a step is each time
        return False
    replicas = _kinds(analysis, State.GRADIENT, lambda entry: entry.detail == "replica")
    if sum(entry.count for entry in replicas) > model.num_sent * (micro - 0.5):
        return True
    whole_gradients = (analysis.run.strategy.triple or "N")[1] == "N"
    return whole_gradients and _passes(analysis, reduced, micro) == micro


def _ranks_per_node(analysis: Analysis, world: int, notes: list[str]) -> int:
    run = analysis.run
    per_node = run.gpus_per_node or world
    if world % per_node:
        per_node = world
        notes.append(f"{run.gpus_per_node} ranks a node do not divide {world}: one node assumed")
    elif run.gpus_per_node_source not in ("metadata", "flag", "hosts"):
        notes.append(
            f"{per_node} ranks a node ({run.gpus_per_node_source or 'guessed'}); --gpus-per-node would state it"
        )
    return per_node


def _concurrent(analysis: Analysis) -> float:
    """Return how many collectives of model states were under way at once, on average while any was.

    They shared the links, so that each alone looks as slow as all of them together.
    """
    moved = [entry for entry in analysis.collectives if entry.state in MODEL_STATE_NAMES]
    alone = sum(entry.count * (entry.p50_us or 0.0) for entry in moved)
    union = sum(entry.total_us or 0.0 for name, entry in analysis.states.items() if name in MODEL_STATE_NAMES)
    return max(1.0, alone / union) if union else 1.0


def _units(analysis: Analysis, world: int, micro: int) -> tuple[tuple[float, ...], int]:
    """Return the bytes of each unit, from gathers in forward, else from reductions of gradients."""
    forward, reductions = _forward_gathers(analysis), _reductions(analysis)
    forwards = _forwards(analysis, micro)
    found = _expand(forward, _gather_passes(analysis, micro) * math.ceil(forwards))
    passes = _passes(analysis, reductions, micro)
    if found and forwards > 1 and analysis.run.total_parameter_count is None:
        # Gathered again and again, but each unit that trains is reduced once.
        found = [size for entry in reductions for size in _as_gathered(analysis, entry, passes)]
    if not found:
        # What was scattered inside groups arrives at the next hop cut in m.
        largest = max((entry.bytes or 0 for entry in reductions), default=0)
        whole = [entry for entry in reductions if entry.group_size == world or (entry.bytes or 0) * 4 > largest]
        found = _expand(whole, passes)
    if not found:
        return (), 4
    recorded = _width(analysis, State.PARAMETER if forward else State.GRADIENT)
    if recorded:
        return tuple(sorted(found)), recorded
    elements = sum(found)
    count = analysis.run.parameter_count
    width = elements / count if count else 4.0
    return tuple(sorted(found)), min((1, 2, 4, 8), key=lambda size: abs(math.log(size / width)))


def _root_bytes(analysis: Analysis, units: Sequence[float], micro: int) -> float:
    """Return the bytes of FSDP's root, which stays gathered for backward where blocks are gathered again; 0 without."""
    backward = _kinds(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("backward"))
    if not analysis.run.framework.is_fsdp or not backward or len(units) < 2:
        return 0.0
    passes = _gather_passes(analysis, micro)
    again = Counter(_expand(backward, passes))
    kept = Counter(_expand(_forward_gathers(analysis), passes)) - again
    kept = kept & _trained_units(analysis, passes) or kept  # frozen units are not gathered again either
    # The last block may stay gathered as well, as torchtitan has it; it is as large as the others.
    roots = [size for size in kept.elements() if size not in again] or list(kept.elements())
    return roots[0] if len(roots) == 1 and roots[0] in units else 0.0


def _trained_units(analysis: Analysis, passes: int) -> Counter[float]:
    """Return the bytes, as gathered, of the units whose gradients are reduced."""
    reductions = _reductions(analysis)
    return Counter(size for entry in reductions for size in _as_gathered(analysis, entry, passes))


def _root_last(units: tuple[float, ...], root: float) -> tuple[float, ...]:
    if not root:
        return units
    place = units.index(root)
    return (*units[:place], *units[place + 1 :], root)


def _as_gathered(analysis: Analysis, reduction: CollectiveEntry, passes: int) -> list[float]:
    """Return the bytes of the units of a kind of reduction in the type of parameters."""
    reduced = dtype_bytes(reduction.dtype)
    scale = (_width(analysis, State.PARAMETER) or reduced) / reduced if reduced else 1.0
    return [scale * size for size in _expand([reduction], passes)]


def _forward_gathers(analysis: Analysis) -> list[CollectiveEntry]:
    return _kinds(analysis, State.PARAMETER, lambda entry: entry.detail.startswith("forward"))


def _reductions(analysis: Analysis) -> list[CollectiveEntry]:
    """Return the reductions of gradients, without those that only bring replicas together."""
    return _kinds(analysis, State.GRADIENT, lambda entry: entry.detail != "replica")


def _forwards(analysis: Analysis, micro: int) -> float:
    """Return how often a micro-batch gathers a parameter for forward, on average; 1 where the model is not known."""
    gathered = _forward_share(analysis) / _gather_passes(analysis, micro)
    return gathered if gathered > FROZEN_RATIO else 1.0


def _forward_share(analysis: Analysis) -> float:
    """Return the parameters that forward passes gather in a step, as a multiple of the model's; 0 where not known."""
    width, run = _width(analysis, State.PARAMETER), analysis.run
    known = run.total_parameter_count or run.parameter_count
    if not width or not known or run.strategy.source == "metadata":
        return 0.0
    return sum(entry.count * float(entry.bytes or 0) for entry in _forward_gathers(analysis)) / width / known


def _gather_passes(analysis: Analysis, micro: int) -> int:
    """Return in how many passes of a step parameters are gathered for forward: in each, or once where they stay whole.

    FSDP2 keeps them over the micro-batches of a step with ``set_reshard_after_backward(False)``.
    """
    gathered = _forward_share(analysis)
    stays = (analysis.run.strategy.triple or "")[:1] == "N" and gathered
    return min((1, micro), key=lambda passes: abs(math.log(gathered / passes))) if stays else micro


def _trained_share(analysis: Analysis, model: _Model) -> float:
    """Return the share of the parameters that have gradients, where gathers show those that have none."""
    count = analysis.run.parameter_count
    if not _forward_gathers(analysis) or not count or analysis.run.strategy.source == "metadata":
        return 1.0
    share = count * model.element_bytes / sum(model.units)
    return share if share < ALL_TRAINED_SHARE else 1.0


def _published_us(analysis: Analysis) -> float | None:
    """Return how long updated parameters took to come back in a framework's own way, None in the usual way.

    ZeroRedundancyOptimizer broadcasts them one by one; DeepSpeed's stage 3 gathers the small ones that it
    keeps whole, although parameters and optimizer states lie at the same level.
    """
    entry = analysis.states.get(State.OPTIMIZER.value)
    triple = analysis.run.strategy.triple_at_rest or analysis.run.strategy.triple
    if entry is None or not entry.count or triple is None or analysis.run.strategy.source == "metadata":
        return None
    one_by_one = _kinds(analysis, State.OPTIMIZER, lambda item: item.op == Op.BROADCAST)
    return entry.exposed_us if one_by_one or triple[0] == triple[2] else None


def _passes(analysis: Analysis, reductions: Sequence[CollectiveEntry], micro: int) -> int:
    """Return how often a step reduces each gradient.

    Gradients that every rank holds whole need it once, but DDP does it on every micro-batch unless
    told otherwise: then the bytes of a step are too many for any element type.
    """
    if (analysis.run.strategy.triple or "N")[1] != "N":
        return micro
    count = analysis.run.parameter_count
    if not count or micro == 1:
        return 1
    moved = sum(entry.count * float(entry.bytes or 0) for entry in reductions)
    if moved <= 0 or count <= 0:
        return 1
    return min((1, micro), key=lambda passes: min(abs(math.log(moved / passes / count / width)) for width in (2, 4)))


def _kinds(analysis: Analysis, state: State, wanted: Callable[[CollectiveEntry], bool]) -> list[CollectiveEntry]:
    return [entry for entry in analysis.collectives if entry.state == state.value and entry.bytes and wanted(entry)]


def _expand(entries: Sequence[CollectiveEntry], passes: int) -> list[float]:
    found: list[float] = []
    for entry in entries:
        found += [float(entry.bytes or 0)] * max(1, round(entry.count / passes))
    return found
