"""What a plan becomes elsewhere: on more nodes, under other assumptions, within other budgets (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from paro_advise.advisor.replay import LEVELS, Candidate, Links, measured_links, step_us
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
        per_gib = None
        if found:
            more = (choice.redundancy_bytes - found[-1].redundancy_bytes) / _GIB
            if more <= 0:
                found.pop()
                per_gib = (
                    None
                    if not found
                    else (found[-1].step_time_us - step)
                    / max((choice.redundancy_bytes - found[-1].redundancy_bytes) / _GIB, 1e-12)
                )
            else:
                per_gib = (found[-1].step_time_us - step) / more
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


def outlooks(
    calibration: Calibration, links: Links, base: Candidate, chosen: Candidate, seed: int
) -> tuple[Outlook, ...]:
    """Predict baseline and chosen on more nodes with equal work per rank.

    Args:
        calibration: the run.
        links: draws.
        base, chosen: how it runs and how it shall run; groups keep their size.
        seed: of the doubt.
    """
    generator = np.random.default_rng(seed)
    count = len(np.atleast_1d(links.inter_gbps))
    floor = min(calibration.compute_us + calibration.fixed_us, calibration.step_us)
    found = []
    for factor in _FACTORS:
        more = replace(calibration, world_size=calibration.world_size * factor)
        doubt = _DOUBT_PER_DOUBLING * factor.bit_length() - _DOUBT_PER_DOUBLING
        times = []
        for candidate in (base, chosen):
            size = more.world_size if candidate.group_size == calibration.world_size else candidate.group_size
            exposed = np.maximum(step_us(more, replace(candidate, group_size=size), links) - floor, 0.0)
            times.append(floor + exposed * np.exp(generator.normal(0.0, doubt, count)))
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


def sensitivities(
    calibration: Calibration, base: Candidate, chosen: Candidate, fitting: Sequence[Candidate]
) -> tuple[Sensitivity, ...]:
    """Halve and double what the plan rests on, one at a time.

    Args:
        calibration: the run.
        base, chosen: how it runs and how it shall run.
        fitting: all candidates that fit.
    """
    found = []
    units = {"inter_alpha_us": "latency between nodes (us)", "inter_gbps": "bandwidth between nodes (GB/s)",
             "intra_alpha_us": "latency inside nodes (us)", "intra_gbps": "bandwidth inside nodes (GB/s)"}  # fmt: skip
    links = measured_links(calibration)
    for name in LEVELS:
        estimate = getattr(calibration, name)
        ends = [
            _end(calibration, replace(links, **{name: estimate.value * f}), base, chosen, fitting) for f in (0.5, 2.0)
        ]
        found.append(_sensitivity(units[name], estimate.value, estimate.source, ends))
    for what, field in (("arithmetic of a step (us)", "compute_us"), ("waiting in each collective (us)", "wait_us")):
        value = getattr(calibration, field)
        changed = [replace(calibration, **{field: value * factor}) for factor in (0.5, 2.0)]
        ends = [_end(other, links, base, chosen, fitting) for other in changed]
        found.append(_sensitivity(what, value, "measured", ends))
    return tuple(found)


def _end(
    calibration: Calibration, links: Links, base: Candidate, chosen: Candidate, fitting: Sequence[Candidate]
) -> tuple[float, str]:
    """Return the speed-up of the chosen candidate, and the best strategy."""
    now = float(step_us(calibration, base, links))
    best = min(fitting, key=lambda item: float(step_us(calibration, item, links)))
    return now / float(step_us(calibration, chosen, links)), str(best.strategy)


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
        hidden_us=float(_us(plain, apart) - _us(plain, ring)),
        step_us_without=float(step_us(calibration, native, links)),
    )


def _us(links: Links, effort: Effort) -> float:
    return float(links.us((effort,)))
