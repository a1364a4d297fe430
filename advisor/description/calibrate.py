"""Turns the description of a run into the calibration that the step replay needs.

What a trace measures is solved for: arithmetic takes what the described step has beside the communication that its
strategy needs on its links (docs/prediction.md, descriptions).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from paro_advise.advisor.description.constants import (
    BESIDE_BACKWARD_SIGMA,
    BESIDE_BACKWARD_SLOWING,
    FLOP_PER_FROZEN_PARAMETER_AND_TOKEN,
    FLOP_PER_PARAMETER_AND_TOKEN,
    MEMORY_SHARE,
    UNSURE_ARITHMETIC,
    UPDATE_BYTES,
)
from paro_advise.advisor.description.links import link_rates, shaped_links
from paro_advise.advisor.description.model import ELEMENT_BYTES
from paro_advise.advisor.prediction.advice.wanted import Wanted
from paro_advise.advisor.prediction.calibration import Calibration, Update
from paro_advise.advisor.prediction.candidates import (
    aligned_sizes,
    all_reduces_shards,
    baseline_candidate,
    sums_each_pass,
)
from paro_advise.advisor.prediction.constants import (
    ASSUMED_UNITS,
    BACKWARD_SHARE,
    DEEPSPEED_BUCKET_ELEMENTS,
    MOST_OF_PEAK,
    P90_SIGMAS,
)
from paro_advise.advisor.prediction.network_tiers import LinkContext, fit_tiers
from paro_advise.advisor.prediction.recommend import left_for_passes_us
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.advisor.ranks.devices import device_named
from paro_advise.advisor.wording.quantities import time_text
from paro_advise.core.framework import Framework
from paro_advise.errors import InputError
from paro_advise.policies.memory import Widths, shards
from paro_advise.policies.plan import EstimateSource
from paro_advise.policies.strategy import Level, Strategy, check_kept
from paro_advise.policies.traffic import Shape

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paro_advise.advisor.description.model import Description
    from paro_advise.advisor.prediction.cluster_links import Links

_FRAMEWORKS = {
    "fsdp2": Framework.FSDP2,
    "fsdp1": Framework.FSDP1,
    "ddp": Framework.DDP,
    "deepspeed": Framework.DEEPSPEED,
    "megatron": Framework.MEGATRON,
    "torchtitan": Framework.FSDP2,
    "other": Framework.UNKNOWN,
}

# What only a trace would tell: nothing waited, nothing was idle, gathers run ahead; no rank was seen, for one step.
_NOT_SEEN: Mapping[str, Any] = MappingProxyType(
    {
        "bucket_bytes": None,
        "compute_us": 0.0,
        "fixed_us": 0.0,
        "gaps_us": 0.0,
        "late_us": 0.0,
        "most_late_us": 0.0,
        "wait_us": 0.0,
        "host_us_per_byte": 0.0,
        "transfer_us": None,
        "step_us": 0.0,
        "traced_error_pct": None,
        "is_gpu": True,
        "native_reduce_scatter_is_all_reduce": False,
        "gathers_once": False,
        "replicates_each_pass": False,
        "scatters_by_all_reduce": False,
        "overlaps_gathers": True,
        "published_us": None,
        "update": Update(),
        "overlapped_us": 0.0,
        "seen_share": 0.0,
        "num_steps": 1,
        "is_described": True,
    }
)
_BESIDE_BACKWARD = Estimate(value=BESIDE_BACKWARD_SLOWING, sigma=BESIDE_BACKWARD_SIGMA, source=EstimateSource.PRIOR)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """The data-parallel ranks of a described job.

    Attributes:
        world_size: how many.
        ranks_per_node: of them on a node.
        tensor_spans_nodes: tensor parallelism uses the inter-node links.
    """

    world_size: int
    ranks_per_node: int
    tensor_spans_nodes: bool


def calibrate_described(description: Description, micro_batch_us: float | None = None) -> Calibration:
    """Return what the replay needs.

    Args:
        description: of the run.
        micro_batch_us: arithmetic of one micro-batch, from another run of the same model; then the described speed
            is not used, and the step is what the replay makes of both.

    Raises:
        InputError: parts of the description contradict each other, or too little is said.
        UsageError: the strategy is none.
    """
    run, ranks, notes = description.run, _ranks(description), list[str]()
    _check_pods(description)
    wanted = Wanted.parse(run.strategy)
    cluster = LinkContext(
        world_size=ranks.world_size,
        ranks_per_node=ranks.ranks_per_node,
        is_gloo=False,
        device_name=description.cluster.device or None,
    )
    tiers = fit_tiers((), cluster, description.cluster.nodes_per_pod)
    rates = link_rates(description, tiers, sums_in_network=not ranks.tensor_spans_nodes)
    values: dict[str, Any] = {
        field.name: getattr(tiers, field.name) for field in fields(tiers) if field.name != "notes"
    }
    shaped = None
    if rates:
        nodes = ranks.world_size // ranks.ranks_per_node
        shaped, listed, said = shaped_links(description, rates, tiers, nodes, ranks.ranks_per_node)
        values |= listed
        notes += said
    else:
        notes += tiers.notes
    notes += _notes(description, ranks)
    element_bytes = ELEMENT_BYTES[description.model.parameter_type]
    whole = description.model.parameters / (description.parallel.tensor * description.parallel.pipeline)
    beside = frozenset[str]() if ranks.tensor_spans_nodes else _beside_backward(description)
    described = Calibration(
        job_world_size=description.cluster.nodes * description.cluster.gpus_per_node,
        job_ranks_per_node=description.cluster.gpus_per_node,
        unmodelled=_name_unmodelled(description),
        trained_share=_trained_share(description),
        backward_share=_backward_share(description),
        world_size=ranks.world_size,
        ranks_per_node=ranks.ranks_per_node,
        micro_batches=run.micro_batches,
        unit_bytes=_units(description, whole * element_bytes, notes),
        element_bytes=element_bytes,
        gather_width=element_bytes,
        reduce_width=ELEMENT_BYTES[description.model.gradient_type],
        wait_group_size=ranks.world_size,
        baseline=wanted.strategy,
        baseline_group_size=wanted.group_size or ranks.ranks_per_node,
        overlaps_reductions=beside is None or str(wanted.strategy) in beside,
        framework=_FRAMEWORKS[run.framework],
        compute_slowing=_BESIDE_BACKWARD,
        assumptions=tuple(notes),
        shaped=shaped,
        widths=_widths(description),
        beside_backward=beside,
        **values,
        **_NOT_SEEN,
    )
    _check_groups(described, run.strategy)
    described = replace(_as_its_framework_runs(described), update=_update(description, described, whole))
    if micro_batch_us is not None:
        return _stepping(described, run.micro_batches * micro_batch_us)
    return _with_compute(described, description)


def _as_its_framework_runs(described: Calibration) -> Calibration:
    """Return a run with what its framework does by itself."""
    strategy, framework = described.baseline, described.framework
    bucket_bytes = float(described.element_bytes * DEEPSPEED_BUCKET_ELEMENTS)
    return replace(
        described,
        replicates_each_pass=sums_each_pass(framework, strategy, described.micro_batches),
        scatters_by_all_reduce=all_reduces_shards(framework, strategy),
        reduce_bucket_bytes=bucket_bytes if framework == Framework.DEEPSPEED else None,
    )


def _ranks(description: Description) -> _Ranks:
    cluster, parallel = description.cluster, description.parallel
    world = cluster.nodes * cluster.gpus_per_node
    cut = parallel.tensor * parallel.pipeline
    per_node = cluster.gpus_per_node
    if world % cut or (per_node % parallel.tensor and parallel.tensor % per_node):
        raise InputError(
            f"tensor x pipeline ranks must divide the {world} ranks of the job and align with its nodes of {per_node}, "
            f"got {parallel.tensor} x {parallel.pipeline}"
        )
    size = world // cut
    if size < 2:
        raise InputError(
            "a recommendation must be for a job of two or more data-parallel ranks, got one",
            hint="model states of one rank cannot be sharded among data-parallel ranks",
        )
    local = min(size, max(1, per_node // parallel.tensor))
    return _Ranks(
        world_size=size,
        ranks_per_node=local if size % local == 0 else 1,
        tensor_spans_nodes=parallel.tensor > per_node,
    )


def _notes(description: Description, ranks: _Ranks) -> list[str]:
    """Return what was assumed beside the links."""
    run, parallel = description.run, description.parallel
    share = _backward_share(description)
    forward = "one third" if share is None else f"{1 - share:.0%}"
    notes = [f"no trace was read: the run is as its description says, {forward} of the arithmetic is forward"]
    if run.step_time_ms or run.tokens_per_s or run.mfu_pct:
        notes.append("arithmetic: what the described step leaves beside communication")
    if description.cluster.device and device_named(description.cluster.device) is None:
        notes.append(
            "cluster.device is not known: the optimizer takes no time, intra-node bandwidth is no data sheet's"
        )
    if ranks.tensor_spans_nodes:
        notes.append(
            f"tensor parallelism of {parallel.tensor} ranks spans nodes: nothing else is hidden behind it, and "
            "inter-node all-reduces are as slow as scatter and gather"
        )
    return notes


def _beside_backward(description: Description) -> frozenset[str] | None:
    named = description.run.reductions_beside_backward
    if named is None:
        return None
    for triple in named:
        check_kept(Strategy.parse(triple))
    return frozenset(named)


def _check_pods(description: Description) -> None:
    cluster = description.cluster
    if cluster.nodes_per_pod is None:
        return
    if cluster.nodes % cluster.nodes_per_pod:
        raise InputError(
            f"cluster.nodes_per_pod must divide the {cluster.nodes} nodes, got {cluster.nodes_per_pod}",
            hint="leave it out where all nodes are connected the same way",
        )
    if cluster.links or cluster.inter_gbps or cluster.intra_gbps:
        raise InputError(
            "cluster.nodes_per_pod must come without links, inter_gbps and intra_gbps, got both",
            hint="cluster.links by numbers of nodes say where a pod ends",
        )


def _name_unmodelled(description: Description) -> str:
    if description.parallel.pipeline > 1:
        return "pipeline parallelism is not modelled: its bubbles change with the strategy"
    return ""


def _trained_share(description: Description) -> float:
    model = description.model
    if model.trained_parameters is None:
        return 1.0
    if model.trained_parameters > model.parameters:
        raise InputError("model.trained_parameters must be at most model.parameters, got more")
    return model.trained_parameters / model.parameters


def _units(description: Description, whole_bytes: float, notes: list[str]) -> tuple[float, ...]:
    layers = description.model.layers
    if layers is None:
        notes.append(f"the model's blocks are not described: {ASSUMED_UNITS} of equal size assumed")
    number = max(1, (layers or ASSUMED_UNITS) // description.parallel.pipeline)
    return (whole_bytes / number,) * number


def _widths(description: Description) -> Widths | None:
    stated = description.model.bytes_per_parameter
    if stated is None:
        return None
    return Widths(parameter_bytes=stated.parameter, gradient_bytes=stated.gradient, optimizer_bytes=stated.optimizer)


def _check_groups(described: Calibration, strategy: str) -> None:
    sizes = aligned_sizes(described)
    if Level.I.value in str(described.baseline) and described.baseline_group_size not in sizes:
        raise InputError(
            f"run.strategy must have groups that divide the {described.world_size} data-parallel ranks and align with "
            f"their nodes, got {strategy}",
            hint=f"groups of {', '.join(map(str, sizes))} ranks do",
        )


def _update(description: Description, described: Calibration, parameters: float) -> Update:
    """Return what the optimizer takes of the device: bytes that it moves over the rate of the device's memory."""
    device = device_named(description.cluster.device)
    if device is None or device.memory_gbps is None:
        return Update()
    whole_us = UPDATE_BYTES * parameters * described.trained_share / (MEMORY_SHARE * device.memory_gbps * 1e3)
    shape = Shape(
        group_size=described.baseline_group_size,
        num_groups=max(1, described.world_size // described.baseline_group_size),
    )
    held = shards(described.baseline.optimizer, shape)
    return Update(measured_us=whole_us / held, least_us=0.0, whole_us=whole_us)


def _with_compute(described: Calibration, description: Description) -> Calibration:
    """Return the run with the arithmetic that makes its step as long as described.

    Raises:
        InputError: no arithmetic does, or nothing says how fast the run is.
    """
    measured_us = _measured_step_us(description)
    if measured_us is None:
        return _with_assumed_compute(described, description)

    def at(passes_us: float) -> Calibration:
        return replace(described, compute_us=passes_us + described.update.measured_us, step_us=measured_us)

    quicker = _quicker_links(described, np.array([-P90_SIGMAS, 0.0, P90_SIGMAS]))
    slow_us, passes_us, quick_us = map(float, left_for_passes_us(at(0.0), quicker))
    at_peak_us = _at_peak_us(description)
    if quick_us <= at_peak_us:
        needed = f", the devices need {time_text(at_peak_us)} at their peak" if at_peak_us else ""
        raise InputError(
            "the described step must leave time for arithmetic: on the described links, and on links as much quicker "
            f"as they may well be, its communication leaves {time_text(quick_us)} of {time_text(measured_us)}{needed}",
            hint="check units: rates are 1e9 bytes/s, a node's cards together; step_time_ms is milliseconds; "
            "a stated inter_gbps may be too low; model.gradient_type is what gradients are reduced in; "
            "cluster.peak_tflops is of the type that computes; parameters of a mixture of experts are those that a "
            "token uses",
        )
    likely_us = at_peak_us / MOST_OF_PEAK
    slow_us, passes_us = (min(max(us, likely_us), quick_us) or quick_us for us in (slow_us, passes_us))
    found = replace(at(passes_us), least_passes_us=at_peak_us)
    if quick_us < UNSURE_ARITHMETIC * slow_us:
        return found
    note = (
        f"the step tells little of the arithmetic ({time_text(slow_us)} to {time_text(quick_us)}), for communication "
    )
    return replace(found, assumptions=(*found.assumptions, note + "may take all of it; measured links would tell more"))


def _at_peak_us(description: Description) -> float:
    """Return how long the model's operations take all devices at their peak, 0 where nothing says it."""
    if _peak_tflops(description) is None or description.model.sequence_length is None:
        return 0.0
    return _arithmetic_us(description, 100.0, _flop_per_parameter_and_token(description))


def _quicker_links(described: Calibration, deviations: NDArray[np.float64]) -> Links:
    """Return links that are quicker than those of a run, by so many standard deviations of theirs."""
    links = measured_links(described)
    between, inside = (np.exp(deviations * item.sigma) for item in (described.inter_gbps, described.intra_gbps))
    return replace(
        links,
        inter_gbps=links.inter_gbps * between,
        pod_gbps=links.pod_gbps * between,
        intra_gbps=links.intra_gbps * inside,
    )


def _measured_step_us(description: Description) -> float | None:
    """Return the step as described, in microseconds; None where nothing was measured.

    Raises:
        InputError: it is said twice, or what it depends on is not said.
    """
    run = description.run
    said = [name for name in ("step_time_ms", "tokens_per_s", "mfu_pct") if getattr(run, name) is not None]
    said += ["compute_mfu_pct"] if run.compute_mfu_pct else []
    if len(said) > 1:
        raise InputError(f"a description must say once how long a step takes, got {' and '.join(said)}")
    if run.step_time_ms:
        return run.step_time_ms * 1e3
    if run.tokens_per_s:
        return _tokens(description) / run.tokens_per_s * 1e6
    if run.mfu_pct:
        return _arithmetic_us(description, run.mfu_pct, FLOP_PER_PARAMETER_AND_TOKEN)
    return None


def _tokens(description: Description) -> float:
    """Return the tokens of a step of the whole job."""
    run, length = description.run, description.model.sequence_length
    if length is None:
        raise InputError("model.sequence_length must be described for speeds in tokens/s or MFU, got none")
    return float(length * run.micro_batch_size * run.micro_batches * _ranks(description).world_size)


def _peak_tflops(description: Description) -> float | None:
    """Return a device's peak as described, or of the device as known; None where neither says."""
    device = device_named(description.cluster.device)
    return description.cluster.peak_tflops or (device.peak_tflops if device else None)


def _flop_per_parameter_and_token(description: Description) -> float:
    """Return the operations of a pass: gradients of parameters are computed of those that have some."""
    share = _trained_share(description)
    return share * FLOP_PER_PARAMETER_AND_TOKEN + (1 - share) * FLOP_PER_FROZEN_PARAMETER_AND_TOKEN


def _backward_share(description: Description) -> float | None:
    """Return which part of the arithmetic is backward's where parameters are frozen, None where none is."""
    if _trained_share(description) == 1.0:
        return None
    forward = (1 - BACKWARD_SHARE) * FLOP_PER_PARAMETER_AND_TOKEN
    return 1 - forward / _flop_per_parameter_and_token(description)


def _arithmetic_us(description: Description, mfu_pct: float, flop_per_parameter_and_token: float) -> float:
    """Return how long the model's operations take all devices at a share of their peak.

    Raises:
        InputError: the peak is not known, or the share is below 1 %, as where a fraction was meant.
    """
    if mfu_pct < 1.0:
        raise InputError(
            f"an MFU must be in percent and 1 or more, got {mfu_pct:g}",
            hint=f"write {100 * mfu_pct:g} if {100 * mfu_pct:g} % is meant",
        )
    cluster, peak = description.cluster, _peak_tflops(description)
    if peak is None:
        raise InputError(
            f"cluster.device must be known for speeds in MFU, got {cluster.device!r}", hint="or say cluster.peak_tflops"
        )
    operations = flop_per_parameter_and_token * description.model.parameters * _tokens(description)
    return operations / (cluster.nodes * cluster.gpus_per_node * peak * 1e12 * mfu_pct / 100) * 1e6


def _with_assumed_compute(described: Calibration, description: Description) -> Calibration:
    """Return the run with the arithmetic that a range of MFU gives, and the step that it then has."""
    wanted = description.run.compute_mfu_pct
    if wanted is None:
        raise InputError(
            "a description must say how fast the run is, got neither step_time_ms, tokens_per_s, mfu_pct nor "
            "compute_mfu_pct",
            hint="before anything ran: compute_mfu_pct = [35, 55], what arithmetic alone should reach of the peak",
        )
    per_token = _flop_per_parameter_and_token(description)
    slow, quick = (_arithmetic_us(description, share, per_token) for share in sorted(wanted))
    passes_us = math.sqrt(slow * quick)
    note = f"nothing was measured: arithmetic at {min(wanted):g} to {max(wanted):g} % of the peak"
    spread = math.log(slow / quick) / 2 / P90_SIGMAS
    return _stepping(replace(described, compute_sigma=spread, assumptions=(*described.assumptions, note)), passes_us)


def _stepping(described: Calibration, passes_us: float) -> Calibration:
    """Return a run of known arithmetic with the step that it then has."""
    found = replace(described, compute_us=passes_us + described.update.measured_us, step_us=math.inf)
    return replace(found, step_us=float(step_us(found, baseline_candidate(found), measured_links(found))))
