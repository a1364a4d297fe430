"""The figures of an analysis, and of a plan beside it, as metrics: name, unit, labels, value (pure).

Names and base units follow Prometheus' conventions: seconds, bytes, ratios, the unit at the end of the name. What is
not known has no sample, never a zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paro_advise.advisor.analysis.model import Analysis
    from paro_advise.advisor.ranks.links.link import Link
    from paro_advise.policies.plan import Plan

PREFIX = "paro_advise"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledValue:
    """One value with what it is of."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A metric.

    Attributes:
        name: with its unit at the end.
        about: in a sentence.
        unit: as OpenTelemetry writes it (UCUM): "s", "By/s", "1".
        samples: at least one, with equal label names.
    """

    name: str
    about: str
    unit: str
    samples: tuple[LabelledValue, ...]


def measures_of(analysis: Analysis, plan: Plan | None = None) -> tuple[Measure, ...]:
    """Return the metrics of a run, and what a plan made from it predicts; those without a value are left out."""
    found = (*_of_run(analysis), *(_of_plan(plan) if plan is not None else ()))
    return tuple(item for item in found if item.samples)


def measure_of(name: str, about: str, unit: str, *samples: tuple[float | None, Mapping[str, str]]) -> Measure:
    """Return a metric of the values that are known, each with its labels."""
    known = tuple(LabelledValue(value=value, labels=labels) for value, labels in samples if value is not None)
    return Measure(name=f"{PREFIX}_{name}", about=about, unit=unit, samples=known)


def _seconds(value_us: float | None) -> float | None:
    return None if value_us is None else value_us / 1e6


def _link_labels(link: Link) -> dict[str, str]:
    return {
        "op": link.op,
        "span": link.span,
        "group_size": str(link.group_size),
        "num_nodes": str(link.num_nodes or ""),
    }


def _of_run(analysis: Analysis) -> Iterator[Measure]:
    run, parts = analysis.run, analysis.breakdown_us
    strategy = run.strategy
    facts = {
        "framework": str(run.framework), "strategy": strategy.triple or "", "backend": run.backend or "",
        "regime": analysis.verdict.regime, "limiting_state": analysis.verdict.limiting_state or "",
    }  # fmt: skip
    yield measure_of("run_info", "What ran, and what limits it.", "1", (1.0, facts))
    yield measure_of("ranks", "Ranks of the job.", "1", (run.world_size, {}))
    yield measure_of("ranks_seen", "Ranks whose trace was read.", "1", (len(analysis.ranks) or None, {}))
    timed = parts.compute is not None
    yield measure_of(
        "step_seconds", "Mean step time over ranks and steps.", "s", (_seconds(parts.step_us) if timed else None, {})
    )
    named = {
        "compute": parts.compute,
        "exposed_communication": parts.exposed_communication,
        "other": parts.other,
        "idle": parts.idle,
    }
    yield measure_of(
        "step_part_seconds", "Parts of the mean step; they sum to it.", "s",
        *[(_seconds(value), {"part": name}) for name, value in named.items()],
    )  # fmt: skip
    states = [(name, entry) for name, entry in analysis.states.items() if entry.count]
    for name, field_name, about in (
        (
            "state_exposed_seconds",
            "exposed_us",
            "Communication of a model state while nothing computes, per rank and step.",
        ),
        ("state_transfer_seconds", "transfer_us", "Time that a model state's collectives transfer, per rank and step."),
        (
            "state_wait_seconds",
            "wait_us",
            "Time that a model state's collectives wait for other ranks, per rank and step.",
        ),
    ):
        yield measure_of(
            name, about, "s", *[(_seconds(getattr(entry, field_name)), {"state": state}) for state, entry in states]
        )
    yield measure_of(
        "bus_bandwidth_bytes_per_second", "Bus bandwidth by nccl-tests' convention.", "By/s",
        *[
            (link.busbw_gbps * 1e9, _link_labels(link))
            for link in analysis.links if link.busbw_gbps is not None
        ],
    )  # fmt: skip
    hosts = {item.rank: item.host or "" for item in analysis.ranks}
    yield measure_of(
        "straggler_wait_seconds", "What the others wait for a slow rank, per step.", "s",
        *[
            (
                _seconds(item.lateness_us),
                {"rank": str(item.rank), "host": hosts.get(item.rank, ""), "cause": item.cause},
            )
            for item in analysis.stragglers
        ],
    )  # fmt: skip
    yield measure_of(
        "slow_group_excess_seconds", "What a process group's collectives take longer than its peers', per step.", "s",
        *[
            (_seconds(item.excess_us), {"ranks": " ".join(map(str, item.ranks)), "span": item.span})
            for item in analysis.slow_groups
        ],
    )  # fmt: skip


def _of_plan(plan: Plan) -> Iterator[Measure]:
    chosen = plan.chosen
    names = {"plan_id": plan.plan_id, "strategy": chosen.triple, "group_size": str(chosen.group_size or "")}
    speedup = chosen.predicted.speedup
    quantiles = (("0.1", speedup.p10), ("0.5", speedup.p50), ("0.9", speedup.p90))
    yield measure_of(
        "predicted_speedup_ratio", "Predicted step time as it is over that under the plan, as quantiles.", "1",
        *[(value, {**names, "quantile": quantile}) for quantile, value in quantiles],
    )  # fmt: skip
