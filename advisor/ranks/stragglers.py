"""Finds stragglers, and why they are slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    CAUSE_EXCESS_SHARE,
    STRAGGLER_MIN_STEPS,
    STRAGGLER_STEP_SHARE,
    STRAGGLER_STEPS_SHARE,
    STRAGGLER_WAIT_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paro_advise.advisor.ranks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source

# A pipeline's neighbours and a broadcast's root wait by design.
_ONE_SIDED = ("broadcast", "send", "recv", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        lateness_us: mean time per step that a typical other rank waits for it.
        share_of_steps: steps in which it causes most of the waiting.
        cause: "late compute", "host" (idle before it arrives), "slow link" or "unknown".
    """

    rank: int
    lateness_us: float
    share_of_steps: float
    cause: str


def find_stragglers(aligned: AlignedRun | None, run: Run) -> list[Straggler]:
    """Find the ranks that the others wait for in most steps, the worst first."""
    if aligned is None:
        return []
    table, ranks, step_time_us = aligned.table, run.timed, run.mean_step_us
    import polars as pl

    joined = table.filter(pl.col("match").is_not_null() & ~pl.col("op").is_in(_ONE_SIDED))
    if len(joined) == 0 or step_time_us <= 0:
        return []
    blamed = (
        joined.sort("match", "arrival_us", "rank")
        .group_by("match", maintain_order=True)
        .agg(
            pl.col("step_label").first(),
            pl.col("rank").last().alias("late"),
            # What the straggler alone costs, against a typical arrival of the others.
            (pl.col("arrival_us").last() - pl.col("arrival_us").head(pl.len() - 1).median()).alias("cost_us"),
        )
    )
    per_step = blamed.group_by("step_label", "late").agg(pl.col("cost_us").sum())
    steps = sorted(set(per_step["step_label"].to_list()))
    if len(steps) < STRAGGLER_MIN_STEPS:
        return []
    totals: dict[int, dict[str, float]] = {}
    for label, rank, cost in per_step.sort("step_label", "late").iter_rows():
        totals.setdefault(rank, {})[label] = cost
    all_by_step = {label: sum(costs.get(label, 0.0) for costs in totals.values()) for label in steps}
    out = []
    for rank, costs in sorted(totals.items()):
        mean = sum(costs.values()) / len(steps)
        leading = [s for s in steps if costs.get(s, 0.0) >= STRAGGLER_WAIT_SHARE * max(all_by_step[s], 1e-9)]
        share = len(leading) / len(steps)
        if (
            mean >= STRAGGLER_STEP_SHARE * step_time_us
            and share >= STRAGGLER_STEPS_SHARE
            and mean * len(steps) >= STRAGGLER_WAIT_SHARE * sum(all_by_step.values())
        ):
            out.append(
                Straggler(
                    rank=rank,
                    lateness_us=mean,
                    share_of_steps=share,
                    cause=_cause(rank, dict(ranks)),
                )
            )
    return sorted(out, key=lambda item: (-item.lateness_us, item.rank))


def _cause(rank: int, facts: Mapping[int, Source]) -> str:
    """Compare the rank's own time with that of the others."""

    def mean(field: str, number: int) -> float:
        steps = facts[number].steps
        return float(np.mean([getattr(step, field) for step in steps])) if steps else 0.0

    others = [number for number in facts if number != rank and facts[number].steps]
    if rank not in facts or not others:
        return "unknown"
    excess = {
        field: mean(field, rank) - float(np.median([mean(field, number) for number in others]))
        for field in ("compute_us", "idle_us", "other_us")
    }
    largest = max(excess, key=lambda field: excess[field])
    wall = float(np.median([mean("wall_us", number) for number in others]))
    if excess[largest] < CAUSE_EXCESS_SHARE * wall:
        return "unknown"
    return "late compute" if largest == "compute_us" else "host"
