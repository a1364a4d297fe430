"""What-ifs of a plan: on more nodes, under other assumptions, within other budgets (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.constants import EQUAL_SHARE, NODE_FACTORS, REPEAT_SIGMA, SCALING_SIGMA
from paro_advise.advisor.prediction.sampler import Sampler, with_waits
from paro_advise.advisor.prediction.step_replay import arithmetic_us, demand_us, measured_links, step_us
from paro_advise.core.collective import Op
from paro_advise.policies.collective_cost import Draws, Effort, RingAlgorithm, effort_of
from paro_advise.policies.plan import (
    BudgetStep,
    Choice,
    EstimateSource,
    HoRingGain,
    NodesWhatIf,
    Quantiles,
    Sensitivity,
)
from paro_advise.policies.strategy import CollectiveBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate
    from paro_advise.advisor.prediction.cluster_links import Links

_GIB = 1 << 30
_UNITS = {
    "inter_alpha_us": "inter-node latency (us)",
    "inter_gbps": "inter-node bandwidth (GB/s)",
    "intra_alpha_us": "intra-node latency (us)",
    "intra_gbps": "intra-node bandwidth (GB/s)",
}
_POD_UNITS = {
    "inter_alpha_us": "latency between pods (us)",
    "inter_gbps": "bandwidth between pods (GB/s)",
    "pod_alpha_us": "inter-node latency within a pod (us)",
    "pod_gbps": "inter-node bandwidth within a pod (GB/s)",
}


def budget_steps(choices: Sequence[Choice]) -> tuple[BudgetStep, ...]:
    """Return the front of memory against time: each next choice holds more and is faster.

    Args:
        choices: all candidates.
    """
    found: list[BudgetStep] = []
    for choice in sorted(choices, key=lambda item: (item.redundancy_bytes, item.predicted.step_time_us.p50)):
        step = choice.predicted.step_time_us.p50
        if found and step >= found[-1].step_time_us:
            continue
        # Of equal memory the fastest comes first, so that each step kept holds more than the one before.
        more = (choice.redundancy_bytes - found[-1].redundancy_bytes) / _GIB if found else None
        per_gib = (found[-1].step_time_us - step) / more if more else None
        found.append(
            BudgetStep(
                redundancy_bytes=choice.redundancy_bytes,
                triple=choice.triple,
                group_size=choice.group_size,
                collectives=choice.collectives,
                step_time_us=step,
                saved_us_per_gib=per_gib,
                variant=choice.variant,
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """The run, and what a plan is based on.

    Attributes:
        calibration: the run.
        links: draws.
        anchor: by draw, what the measured step corrects exposed time by; beside a GPU whole steps.
        arithmetic: by draw, of arithmetic that nobody measured to its median.
        waits_us: by draw, what of the run's transfers is waiting for ranks without a trace.
        base, chosen: how it runs and how it shall run.
        bias: what earlier comparisons correct speed-ups by, as a logarithm.
    """

    calibration: Calibration
    links: Links
    anchor: NDArray[np.float64]
    arithmetic: NDArray[np.float64]
    base: Candidate
    chosen: Candidate
    bias: float
    waits_us: NDArray[np.float64] | float = 0.0


def on_more_nodes(basis: Basis, seed: int) -> tuple[NodesWhatIf, ...]:
    """Predict baseline and chosen on more nodes with equal work per rank; groups keep their size.

    Args:
        basis: the run and the plan.
        seed: of the uncertainty.
    """
    sampler = Sampler(seed)
    calibration = basis.calibration
    found = []
    for factor in NODE_FACTORS[1:]:
        more = replace(calibration, world_size=calibration.world_size * factor)
        sigma = SCALING_SIGMA * (factor.bit_length() - 1)
        repeats = sampler.factors(REPEAT_SIGMA, len(basis.anchor))
        times = []
        for candidate in (basis.base, basis.chosen):
            noise = sampler.factors(sigma, len(basis.anchor))
            reached = anchored_us(basis, more, wider(candidate, calibration, more), noise=noise, repeats=repeats)
            times.append(reached * math.exp(-basis.bias if candidate is basis.chosen else 0.0))
        found.append(
            NodesWhatIf(
                nodes_factor=factor,
                world_size=more.world_size,
                baseline_step_us=quantiles(times[0]),
                chosen_step_us=quantiles(times[1]),
                speedup=quantiles(times[0] / times[1]),
            )
        )
    return tuple(found)


def anchored_us(
    basis: Basis,
    calibration: Calibration,
    candidate: Candidate,
    links: Links | None = None,
    noise: NDArray[np.float64] | float = 1.0,
    repeats: NDArray[np.float64] | float = 1.0,
) -> NDArray[np.float64]:
    """Return draws of a step (us), corrected by what the measured step says of the replay.

    Args:
        basis: the run and the plan.
        calibration: the run, or the run as it is changed.
        candidate: how it shall run.
        links: draws; None for those of the plan.
        noise: by draw, on exposed time.
        repeats: by draw, of another run's step to that of the measured one were it repeated.
    """
    drawn = links or basis.links
    step = step_us(calibration, candidate, drawn)
    floor = np.asarray(arithmetic_us(calibration, candidate, drawn))
    if basis.calibration.is_gpu:
        exposed = np.maximum(step * basis.anchor - floor, 0.0)
    else:
        exposed = np.maximum(step - floor, 0.0) * basis.anchor
    times: NDArray[np.float64] = (floor * basis.arithmetic + exposed * noise) * repeats
    if basis.calibration.is_gpu and not basis.calibration.compute_sigma:
        times = np.maximum(times, demand_us(calibration, candidate, drawn))
    is_as_now = calibration is basis.calibration and candidate == basis.base
    return times if is_as_now else with_waits(times, basis.calibration.step_us, basis.waits_us)


def wider(candidate: Candidate, calibration: Calibration, more: Calibration) -> Candidate:
    """Return a candidate on other nodes: a group of all ranks stays one, others keep their size."""
    spans_world = "I" not in str(candidate.strategy) and candidate.group_size == calibration.world_size
    return replace(candidate, group_size=more.world_size) if spans_world else candidate


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    """Return the 10, 50 and 90 % quantiles."""
    low, middle, high = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
    return Quantiles(p10=low, p50=middle, p90=high)


def sensitivities(basis: Basis, fitting: Sequence[tuple[Candidate, float]]) -> tuple[Sensitivity, ...]:
    """Halve and double what the plan is based on, one quantity at a time.

    Args:
        basis: the run and the plan.
        fitting: all candidates that fit, with the bytes of their model states.
    """
    calibration, links = basis.calibration, basis.links.typical()
    now = [(float(step_us(calibration, candidate, links)), candidate, held) for candidate, held in fitting]
    now.sort(key=lambda item: item[0])
    found = _of_links(basis, now)
    for what, field in (
        ("arithmetic of a step (us)", "compute_us"),
        ("waiting in each collective (us)", "wait_us"),
        ("CPU time per byte sent (us)", "host_us_per_byte"),
    ):
        value = getattr(calibration, field)
        if value:
            runs = [replace(calibration, **{field: value * factor}) for factor in (0.5, 2.0)]
            source = EstimateSource.DERIVED if calibration.is_described else EstimateSource.MEASURED
            ends = [
                _end(basis, partial(step_us, run, links=links), now, eases=eases)
                for run, eases in zip(runs, (True, False), strict=True)
            ]
            found.append(_sensitivity(what, value, source, ends))
    return tuple(found)


def _of_links(basis: Basis, now: Sequence[tuple[float, Candidate, float]]) -> list[Sensitivity]:
    """Halve and double latencies and bandwidths; a candidate is replayed under all of them at once.

    Args:
        basis: the run and the plan.
        now: steps as they are (us), candidates, and the bytes of their model states; the quickest first.
    """
    calibration, links = basis.calibration, basis.links.typical()
    units = {
        name: unit
        for name, unit in (_UNITS | _POD_UNITS if calibration.has_pods else _UNITS).items()
        # Half and double of nothing are nothing.
        if getattr(calibration, name).value and not (calibration.num_nodes == 1 and name.startswith("inter"))
    }
    changed = {name: np.full(2 * len(units), getattr(links, name)) for name in units}
    for place, name in enumerate(units):
        changed[name][2 * place : 2 * place + 2] = np.array([0.5, 2.0]) * getattr(calibration, name).value
    by_nodes, shaped = links.sums_by_nodes, links.shaped
    varied = replace(links, **changed, slowdown=links.slowdown, sums_by_nodes=by_nodes, shaped=shaped)

    @cache
    def steps_us(candidate: Candidate) -> NDArray[np.float64]:
        return np.broadcast_to(step_us(calibration, candidate, varied), 2 * len(units))

    def step_at(end: int, candidate: Candidate) -> float:
        return float(steps_us(candidate)[end])

    found = []
    for place, (name, unit) in enumerate(units.items()):
        estimate = getattr(calibration, name)
        is_rate = name.endswith("gbps")
        ends = [
            _end(basis, partial(step_at, end), now, eases=is_rate == bool(end % 2))
            for end in (2 * place, 2 * place + 1)
        ]
        found.append(_sensitivity(unit, estimate.value, estimate.source, ends))
    return found


def _end(
    basis: Basis,
    changed_us: Callable[[Candidate], Draws],
    now: Sequence[tuple[float, Candidate, float]],
    *,
    eases: bool,
) -> tuple[float, str]:
    """Return the speed-up of the chosen candidate, and the one that would be chosen: itself, if none is quicker.

    Args:
        basis: the run and the plan.
        changed_us: a candidate's step (us) with one quantity halved or doubled.
        now: steps as they are (us), candidates, and the bytes of their model states; the quickest first.
        eases: the change makes no step longer.
    """
    least = 0.5 if eases else 1.0  # what may become of a step that shrinks, or grows, with the quantity
    found: list[tuple[float, Candidate, float]] = []
    best_us = math.inf
    for step, candidate, held in now:
        if least * step > best_us * (1 + EQUAL_SHARE):
            break
        found.append((float(changed_us(candidate)), candidate, held))
        best_us = min(best_us, found[-1][0])
    near = [item for item in found if item[0] <= best_us * (1 + EQUAL_SHARE)]
    _, best, _ = min(near, key=lambda item: (item[1] != basis.chosen, item[2], item[0]))
    return float(changed_us(basis.base)) / float(changed_us(basis.chosen)), best.name


def _sensitivity(what: str, value: float, source: EstimateSource, ends: Sequence[tuple[float, str]]) -> Sensitivity:
    return Sensitivity(
        what=what,
        value=float(value),
        source=source,
        speedup_if_half=ends[0][0],
        speedup_if_double=ends[1][0],
        best_if_half=ends[0][1],
        best_if_double=ends[1][1],
    )


def ho_ring_gain(calibration: Calibration, chosen: Candidate) -> HoRingGain | None:
    """Take apart what HO-Ring brings; None where it is not chosen or there is one node.

    Source: docs/prediction.md, HO-Ring: fewer rounds, ports that a flat ring leaves idle, overlap.
    """
    if chosen.collectives != CollectiveBackend.HO_RING or calibration.num_nodes == 1:
        return None
    links = measured_links(calibration)
    largest = max(calibration.unit_bytes)
    shape = (calibration.num_nodes, calibration.ranks_per_node)
    flat = effort_of(RingAlgorithm.RING, Op.ALL_GATHER, largest, *shape, is_streamed=calibration.is_gpu)
    ring = effort_of(RingAlgorithm.HO_RING, Op.ALL_GATHER, largest, *shape)
    plain = replace(links, slowdown=1.0)
    apart = replace(ring, overlapped_rounds=0)
    native = replace(
        chosen, collectives=CollectiveBackend.NATIVE, overlaps_reductions=calibration.is_gpu, separate_queues=False
    )
    return HoRingGain(
        unit_bytes=float(largest),
        rounds_before=float(flat.inter_messages),
        rounds_after=float(ring.inter_messages),
        port_bytes_before=float(flat.inter_bytes),
        port_bytes_after=float(ring.inter_bytes),
        hidden_us=_us(plain, apart) - _us(plain, ring),
        step_us_without=float(step_us(calibration, native, links)),
    )


def _us(links: Links, effort: Effort) -> float:
    return float(effort.us(links.inter_alpha_us, links.inter_gbps, links.intra_alpha_us, links.intra_gbps))
