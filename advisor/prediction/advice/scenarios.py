"""A grid of other clusters and batches, so that a page can answer without the model (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.prediction.advice.questions import Question, changed_run, nodes_of, step_of
from paro_advise.advisor.prediction.constants import BANDWIDTH_FACTORS, BATCH_FACTORS, NODE_FACTORS
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from paro_advise.advisor.prediction.advice.what_if import Basis
    from paro_advise.policies.plan import Plan, Quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Step times (us) on another cluster; None where a strategy's groups do not fit its nodes."""

    baseline_us: Quantiles | None
    chosen_us: Quantiles | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenarios:
    """Step times for every combination of three quantities, with equal work per rank and micro-batch.

    Attributes:
        nodes, inter_gbps, micro_batches: the values of each quantity, rising; inter-node bandwidth as NCCL's tests
            define it (1e9 bytes/s).
        now: where the run stands in each of the three.
        grid: one for each combination; the last quantity changes fastest.
        baseline, chosen: names of the two ways to run.
    """

    nodes: tuple[int, ...]
    inter_gbps: tuple[float, ...]
    micro_batches: tuple[int, ...]
    now: tuple[int, int, int]
    grid: tuple[Scenario, ...]
    baseline: str
    chosen: str


def scenarios_of(plan: Plan, basis: Basis, seed: int = 0) -> Scenarios:
    """Predict the run as it is and as the plan has it for other nodes, bandwidths and micro-batches.

    Args:
        plan: as recommended.
        basis: the run and the plan.
        seed: of the uncertainty.
    """
    calibration = basis.calibration
    own = nodes_of(calibration)
    # On one node nothing was seen of a network: its bandwidth would be a guess.
    node_factors, rate_factors = (NODE_FACTORS, BANDWIDTH_FACTORS) if own > 1 else ((1,), (1.0,))
    nodes = tuple(own * factor for factor in node_factors)
    rates = tuple(calibration.port_gbps * factor for factor in rate_factors)
    batches = tuple(calibration.micro_batches * factor for factor in BATCH_FACTORS)
    today = Scenario(baseline_us=plan.baseline.predicted.step_time_us, chosen_us=plan.chosen.predicted.step_time_us)
    grid = tuple(
        today
        if (count, factor, batch) == (own, 1.0, calibration.micro_batches)
        else _scenario(basis, seed, {"nodes": count, "micro-batches": batch}, factor)
        for count in nodes
        for factor in rate_factors
        for batch in batches
    )
    return Scenarios(
        nodes=nodes,
        inter_gbps=rates,
        micro_batches=batches,
        now=(node_factors.index(1), rate_factors.index(1.0), BATCH_FACTORS.index(1)),
        grid=grid,
        baseline=basis.base.name,
        chosen=basis.chosen.name,
    )


def _scenario(basis: Basis, seed: int, counts: dict[str, int], factor: float) -> Scenario:
    own = {"nodes": nodes_of(basis.calibration), "micro-batches": basis.calibration.micro_batches}
    changes = tuple((name, float(value)) for name, value in counts.items() if value != own[name])
    try:
        changed, times = changed_run(Question(text="", changes=changes), basis, seed, inter_factor=factor)
    except UsageError:
        return Scenario(baseline_us=None, chosen_us=None)
    return Scenario(
        baseline_us=step_of(basis.base, basis, changed, times),
        chosen_us=step_of(basis.chosen, basis, changed, times),
    )
