"""What each candidate holds in memory, and whether it fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.candidates import Candidate, baseline_candidate, offloaded
from paro_advise.advisor.prediction.constants import CAPACITY_SHARE, HOST_GBPS, HOST_SIGMA, NUM_DRAWS
from paro_advise.advisor.wording.quantities import bytes_text
from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Variant
from paro_advise.policies.memory import (
    StateBytes,
    Widths,
    least_transient_bytes,
    shards,
    state_bytes,
    transient_bytes,
    usual_transient_bytes,
)
from paro_advise.policies.strategy import CollectiveBackend, Level, Strategy
from paro_advise.policies.traffic import Shape, Traffic, step_traffic

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.sampler import Sampler

# Whose scripts replicate by torch's DDP; DeepSpeed, Megatron-LM and FSDP1 (NO_SHARD) have reducers of their own.
_BY_DDP = (Framework.DDP, Framework.DDP_ZERO, Framework.FSDP2, Framework.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must respect.

    Attributes:
        device_memory_bytes: of one device; None when unknown, then nothing is excluded.
        redundancy_budget_bytes: what a rank may hold beyond GGG; None for any.
        other_bytes: activations and the rest, from a measured peak.
        allow_untested: a plan may choose what was never timed on the backend of the run.
        host_gbps: what one device moves to or from its host, 1e9 bytes/s.
        run_bytes: what the run as it is needs at the most, where a device was measured to hold it, up to what that
            has; else 0.
        run: that run; None where its peak was not measured, and for questions about others.
    """

    device_memory_bytes: float | None = None
    redundancy_budget_bytes: float | None = None
    other_bytes: float = 0.0
    host_gbps: float = HOST_GBPS
    allow_untested: bool = False
    run_bytes: float = 0.0
    run: Candidate | None = None

    @property
    def plannable_bytes(self) -> float:
        """Return what may be planned of a device: most of it, and no less than what runs on it today."""
        capacity = self.device_memory_bytes
        return math.inf if capacity is None else max(CAPACITY_SHARE * capacity, self.run_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A candidate with what it should bring and cost.

    Attributes:
        candidate: the way to run.
        times: of a step, by draw (us).
        memory: model states of one rank.
        transient: bytes of one rank beside states and activations, at the most.
        peak: expected bytes of one rank, activations included; None where those are not known.
        redundancy: bytes that one rank holds beyond GGG.
        traffic: bytes that one rank sends in a step.
        exceeds_memory: it needs more of a device's memory than may be planned.
        reason: why it does not fit, "" if it does.
    """

    candidate: Candidate
    times: NDArray[np.float64]
    memory: StateBytes
    transient: float
    peak: float | None
    redundancy: float
    traffic: Traffic | None
    exceeds_memory: bool
    reason: str


def _widths(calibration: Calibration) -> Widths:
    """Return bytes per element: as stated, fp32 training, or 16-bit parameters with fp32 masters."""
    if calibration.widths:
        return calibration.widths
    if calibration.element_bytes >= 4:
        return Widths(parameter_bytes=4.0, gradient_bytes=4.0, optimizer_bytes=8.0)
    return Widths()


def _widths_of(calibration: Calibration, strategy: Strategy, shape: Shape) -> Widths:
    """Return bytes per element under a strategy: gradients that add up whole do so in the type they are reduced in.

    FSDP2 keeps them so between passes that are not reduced (torch, ``FSDPParam.to_accumulated_grad_if_needed``), and so
    does our runtime. Sharded ones are a part of what the usual widths hold for mixed precision in all.
    """
    widths = _widths(calibration)
    is_whole = shards(strategy.gradient, shape) == 1
    return replace(widths, gradient_bytes=_reduced_bytes(calibration)) if is_whole else widths


def _reduced_bytes(calibration: Calibration) -> float:
    """Return the bytes of a gradient's element while it is reduced: as stated, or of the wider of its two types."""
    usual = _widths(calibration).gradient_bytes
    return usual if calibration.widths else max(usual, calibration.reduce_width)


def _shape(calibration: Calibration, group_size: int) -> Shape:
    return Shape(
        group_size=group_size,
        num_groups=max(1, calibration.world_size // group_size),
        micro_batches=calibration.micro_batches,
    )


def score(calibration: Calibration, candidate: Candidate, limits: Limits, times: NDArray[np.float64]) -> Scored:
    """Hold a candidate against the limits.

    Args:
        calibration: the run.
        candidate: how it shall run.
        limits: memory.
        times: of a step, by draw (us).
    """
    shape = _shape(calibration, candidate.group_size)
    widths = _widths_of(calibration, candidate.strategy, shape)
    memory = _drop_frozen(state_bytes(candidate.strategy, shape, calibration.parameters, widths=widths), calibration)
    if candidate.offload:
        memory = replace(
            memory, optimizer=0.0, parameter=0.0 if candidate.offload.moves_parameters else memory.parameter
        )
    if candidate.backward_level == Level.I:
        copy = calibration.parameters * widths.parameter_bytes / candidate.group_size
        memory = replace(memory, parameter=memory.parameter + copy)
    transient = _buffers(transient_bytes, calibration, candidate)
    # Whole parameters that are kept for backward are redundant, too.
    kept = calibration.parameters * widths.parameter_bytes if candidate.variant == Variant.KEPT else 0.0
    redundancy = memory.total + kept - _ggg_bytes(calibration)
    transient += kept
    total = memory.total + transient + limits.other_bytes
    if candidate == limits.run:
        total = min(total, limits.run_bytes)  # it was measured to fit
    peak = None
    if limits.other_bytes:
        # What the run as it is holds beyond the least is in the other bytes.
        buffers = least_transient_bytes if candidate == baseline_candidate(calibration) else usual_transient_bytes
        peak = memory.total + _whole(buffers, calibration, candidate) + limits.other_bytes
    return Scored(
        candidate=candidate,
        times=times,
        memory=memory,
        transient=transient,
        peak=peak,
        redundancy=redundancy,
        traffic=traffic(calibration, candidate),
        exceeds_memory=total > limits.plannable_bytes,
        reason=_reason(candidate, limits, total, redundancy),
    )


def needed_bytes(calibration: Calibration, candidate: Candidate, other_bytes: float) -> float:
    """Return what a rank holds at the most: model states, transients, and what is stated beside them."""
    scored = score(calibration, candidate, Limits(other_bytes=other_bytes), np.ones(1))
    return scored.memory.total + scored.transient + other_bytes


def with_run(limits: Limits, calibration: Calibration) -> Limits:
    """Let plans take as much as the run as it is needs, if its peak was measured and a device holds it."""
    capacity, other = limits.device_memory_bytes, limits.other_bytes
    if not other or capacity is None or least_bytes(calibration) + other > capacity:
        return limits
    needed = min(baseline_bytes(calibration) + other, capacity)
    return replace(limits, run_bytes=needed, run=baseline_candidate(calibration))


def traffic(calibration: Calibration, candidate: Candidate) -> Traffic | None:
    """Return what one rank sends in a step under a candidate, across nodes where it has no groups.

    None for what departs from its triple: a variant, and gradients added up in every micro-batch.
    """
    if candidate.variant or candidate.replicates_each_pass:
        return None
    size = candidate.group_size if candidate.uses_groups else calibration.ranks_per_node
    return step_traffic(
        candidate.strategy,
        _shape(calibration, size),
        # Two gathers a micro-batch are counted: one for each forward pass and one for backward are made.
        calibration.parameters * calibration.gather_width * (calibration.forwards + 1) / 2,
        calibration.parameters * calibration.reduce_width * calibration.trained_share,
    )


def _reason(candidate: Candidate, limits: Limits, total: float, redundancy: float) -> str:
    """Return why a candidate does not fit, "" if it does."""
    capacity, budget = limits.device_memory_bytes, limits.redundancy_budget_bytes
    if capacity is not None and total > limits.plannable_bytes:
        needs = f"needs {bytes_text(total)} of {bytes_text(capacity)}"
        if limits.run_bytes == capacity:
            return f"{needs}, all of which may be planned"
        most = f"{CAPACITY_SHARE:.0%}"
        if limits.run_bytes == limits.plannable_bytes:
            most = f"{bytes_text(limits.run_bytes)}, as the run as it is needs,"
        return f"{needs}; at most {most} may be planned"
    if candidate.variant.changes_numbers:
        return "changes the numbers: it sends quantised parameters and gradients"
    if budget is not None and redundancy > budget:
        return f"holds {bytes_text(redundancy)} beyond GGG, more than the budget of {bytes_text(budget)}"
    return ""


def _buffers(count: Callable[..., float], calibration: Calibration, candidate: Candidate) -> float:
    """Return bytes beside states and activations, as counted by one of the functions of policies/memory.py."""
    widths, shape = _widths(calibration), _shape(calibration, candidate.group_size)
    largest = max(calibration.unit_bytes) / calibration.element_bytes
    reduced = widths.gradient_bytes if count is least_transient_bytes else _reduced_bytes(calibration)
    held = count(candidate.strategy, shape, largest, widths.parameter_bytes, reduced)
    if count is least_transient_bytes and not calibration.copies_buckets:
        return held  # gradients may be views of the buckets
    return max(held, _bucket_bytes(calibration, candidate))


def _bucket_bytes(calibration: Calibration, candidate: Candidate) -> float:
    """Return what the buckets of torch's DDP hold: all gradients once more, unless a script makes them views.

    ``gradient_as_bucket_view`` is off by default, and what it saves is the size of all gradients
    (torch/nn/parallel/distributed.py).
    """
    by_ddp = str(candidate.strategy) == "NNN" and candidate.collectives == CollectiveBackend.NATIVE
    by_ddp = by_ddp and calibration.framework in _BY_DDP
    if not by_ddp and not (calibration.copies_buckets and candidate == baseline_candidate(calibration)):
        return 0.0
    return calibration.parameters * calibration.trained_share * _reduced_bytes(calibration)


def _whole(count: Callable[..., float], calibration: Calibration, candidate: Candidate) -> float:
    """Return the same with units that stay whole for backward; the largest is among what is counted."""
    held = _buffers(count, calibration, candidate)
    if candidate.variant == Variant.KEPT:
        largest = max(calibration.unit_bytes) / calibration.element_bytes
        held += (calibration.parameters - largest) * _widths(calibration).parameter_bytes
    return held


def _ggg_bytes(calibration: Calibration) -> float:
    shape = Shape(group_size=1, num_groups=calibration.world_size)
    states = state_bytes(Strategy.parse("GGG"), shape, calibration.parameters, widths=_widths(calibration))
    return _drop_frozen(states, calibration).total


def _drop_frozen(states: StateBytes, calibration: Calibration) -> StateBytes:
    """Return model states where frozen parameters have neither gradients nor optimizer states."""
    share = calibration.trained_share
    return replace(states, gradient=states.gradient * share, optimizer=states.optimizer * share)


def baseline_bytes(calibration: Calibration) -> float:
    """Return the model states and transients of one rank of the run as it is."""
    scored = score(calibration, baseline_candidate(calibration), Limits(), np.ones(1))
    return scored.memory.total + scored.transient


def least_bytes(calibration: Calibration) -> float:
    """Return what a measured peak of the run as it is must hold: model states, and what is whole while computing."""
    base = baseline_candidate(calibration)
    states = score(calibration, base, Limits(), np.ones(1)).memory.total
    return states + _whole(least_transient_bytes, calibration, base)


def with_offload(
    calibration: Calibration,
    sampler: Sampler,
    limits: Limits,
    scored: list[Scored],
    chooses: Callable[[Candidate], bool],
) -> list[Scored]:
    """Add candidates with states on the host where nothing fits: the optimizer's first, then the parameters."""
    plain = [item for item in scored if not item.candidate.variant]
    found = list(scored)
    for parameters in (False, True):
        if not all(item.reason for item in found if chooses(item.candidate)):
            break
        for item in plain:
            candidate = item.candidate
            if parameters and (str(candidate.strategy), candidate.collectives) != ("GGG", CollectiveBackend.NATIVE):
                continue
            moved = offloaded(calibration, candidate, limits.host_gbps, parameters=parameters)
            extra = moved.host_us * sampler.factors(HOST_SIGMA, NUM_DRAWS)
            found.append(score(calibration, moved, limits, item.times + extra))
    return found
