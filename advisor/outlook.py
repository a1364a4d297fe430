"""What a plan becomes elsewhere: on more nodes, under other assumptions, within other budgets (pure)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from paro_advise.advisor.replay import Candidate, Links, floor_us, measured_links, step_us
from paro_advise.policies.collectives import Algorithm, Effort, Operation, effort_of
from paro_advise.policies.plan import BudgetStep, Choice, HoRingGain, Outlook, Quantiles, Sensitivity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from paro_advise.advisor.calibration import Calibration

_FACTORS = (2, 4, 8)
# Per doubling of the nodes, as the standard deviation of the logarithm (reference prediction 3.5).
_DOUBT_PER_DOUBLING = 0.1
_GIB = 1 << 30
# Times this close count as equal: then the choice with less memory is taken (reference prediction 3.5).
EQUAL = 0.03
_UNITS = {
    "inter_alpha_us": "latency between nodes (us)",
    "inter_gbps": "bandwidth between nodes (GB/s)",
    "intra_alpha_us": "latency inside nodes (us)",
    "intra_gbps": "bandwidth inside nodes (GB/s)",
}
_POD_UNITS = {
    "inter_alpha_us": "latency between pods (us)",
    "inter_gbps": "bandwidth between pods (GB/s)",
    "pod_alpha_us": "latency between nodes of a pod (us)",
    "pod_gbps": "bandwidth between nodes of a pod (GB/s)",
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
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The run, and what a plan rests on.

    Attributes:
        calibration: the run.
        links: draws.
        anchor: by draw, what the measured step corrects exposed time by.
        base, chosen: how it runs and how it shall run.
        bias: what earlier comparisons correct speed-ups by, as a logarithm.
    """

    calibration: Calibration
    links: Links
    anchor: NDArray[np.float64]
    base: Candidate
    chosen: Candidate
    bias: float


def outlooks(now: Now, seed: int) -> tuple[Outlook, ...]:
    """Predict baseline and chosen on more nodes with equal work per rank; groups keep their size.

    Args:
        now: the run and the plan.
        seed: of the doubt.
    """
    generator = np.random.default_rng(seed)
    calibration = now.calibration
    found = []
    for factor in _FACTORS:
        more = replace(calibration, world_size=calibration.world_size * factor)
        doubt = _DOUBT_PER_DOUBLING * (factor.bit_length() - 1)
        times = []
        for candidate in (now.base, now.chosen):
            spans_world = "I" not in str(candidate.strategy) and candidate.group_size == calibration.world_size
            wider = replace(candidate, group_size=more.world_size) if spans_world else candidate
            floor = floor_us(calibration, candidate)
            exposed = np.maximum(step_us(more, wider, now.links) - floor, 0.0) * now.anchor
            noise = np.exp(generator.normal(0.0, doubt, len(now.anchor)))
            times.append((floor + exposed * noise) * math.exp(-now.bias if candidate is now.chosen else 0.0))
        found.append(
            Outlook(
                nodes_factor=factor,
                world_size=more.world_size,
                baseline_step_us=quantiles(times[0]),
                chosen_step_us=quantiles(times[1]),
                speedup=quantiles(times[0] / times[1]),
            )
        )
    return tuple(found)


def quantiles(values: NDArray[np.float64]) -> Quantiles:
    """Return the 10, 50 and 90 % quantiles."""
    low, middle, high = (float(value) for value in np.quantile(values, (0.1, 0.5, 0.9)))
    return Quantiles(p10=low, p50=middle, p90=high)


def sensitivities(now: Now, fitting: Sequence[tuple[Candidate, float]]) -> tuple[Sensitivity, ...]:
    """Halve and double what the plan rests on, one at a time.

    Args:
        now: the run and the plan.
        fitting: all candidates that fit, with the bytes of their model states.
    """
    found = []
    calibration, links = now.calibration, measured_links(now.calibration)
    for name, unit in (_UNITS | _POD_UNITS if calibration.has_pods else _UNITS).items():
        estimate = getattr(calibration, name)
        changed = [replace(links, **{name: estimate.value * factor}) for factor in (0.5, 2.0)]
        ends = [_end(now, calibration, other, fitting) for other in changed]
        found.append(_sensitivity(unit, estimate.value, estimate.source, ends))
    for what, field in (
        ("arithmetic of a step (us)", "compute_us"),
        ("waiting in each collective (us)", "wait_us"),
        ("the cores' part of a byte sent (us)", "host_us_per_byte"),
    ):
        value = getattr(calibration, field)
        if value:
            runs = [replace(calibration, **{field: value * factor}) for factor in (0.5, 2.0)]
            found.append(_sensitivity(what, value, "measured", [_end(now, run, links, fitting) for run in runs]))
    return tuple(found)


def _end(
    now: Now, calibration: Calibration, links: Links, fitting: Sequence[tuple[Candidate, float]]
) -> tuple[float, str]:
    """Return the speed-up of the chosen candidate, and the strategy that would be chosen."""
    times = [float(step_us(calibration, candidate, links)) for candidate, _ in fitting]
    near = [place for place, time in enumerate(times) if time <= min(times) * (1 + EQUAL)]
    best = min(near, key=lambda place: (fitting[place][1], times[place]))
    speedup = float(step_us(calibration, now.base, links)) / float(step_us(calibration, now.chosen, links))
    return speedup, str(fitting[best][0].strategy)


def _sensitivity(what: str, value: float, source: str, ends: Sequence[tuple[float, str]]) -> Sensitivity:
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

    Source: reference prediction, section 3.4: fewer rounds, ports that a flat ring leaves idle, overlap.
    """
    if chosen.collectives != "ho_ring" or calibration.num_nodes == 1:
        return None
    links = measured_links(calibration)
    largest = max(calibration.unit_bytes)
    shape = (calibration.num_nodes, calibration.ranks_per_node)
    flat = effort_of(Algorithm.RING, Operation.ALL_GATHER, largest, *shape)
    ring = effort_of(Algorithm.HO_RING, Operation.ALL_GATHER, largest, *shape)
    plain = replace(links, stretch=1.0)
    apart = replace(ring, overlapped_rounds=0)
    native = replace(chosen, collectives="native", overlaps_reductions=calibration.is_gpu, separate_queues=False)
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
