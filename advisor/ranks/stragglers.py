"""Finds stragglers, and why they are slow.

A rank is late at a collective because it took its time since the last one, or because the last one
ended late on it. Only the first is the rank's own doing: in a ring a slow link makes collectives end
late on the ranks behind it, which then arrive late although they do nothing slowly (docs/traces.md,
stragglers).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    CAUSE_EXCESS_SHARE,
    STRAGGLER_MAX_CHANCE,
    STRAGGLER_STEP_SHARE,
    STRAGGLER_STEPS_SHARE,
    STRAGGLER_WAIT_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from paro_advise.advisor.ranks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source

# A pipeline's neighbours and a broadcast's root wait by design.
_ONE_SIDED = ("broadcast", "send", "recv", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        lateness_us: mean time per step that a typical other rank waits for it, for its own doing.
        share_of_steps: steps in which it causes most of the waiting.
        cause: "late compute", "host" (idle before it arrives) or "unknown".
        chance: that one of equal ranks causes most of it in as many steps; None in documents of older versions.
    """

    rank: int
    lateness_us: float
    share_of_steps: float
    cause: str
    chance: float | None = None


def chance_of_leading(num_led: int, num_steps: int, num_ranks: int) -> float:
    """Return the chance that any of equal ranks leads in so many steps or more.

    At most one rank leads in a step. Were all equal, each would with the same chance, whatever makes a rank late in a
    step: at most the binomial tail times the ranks (Boole's inequality).
    """
    share = 1 / num_ranks
    steps = range(num_led, num_steps + 1)
    tail = sum(comb(num_steps, led) * share**led * (1 - share) ** (num_steps - led) for led in steps)
    return min(1.0, num_ranks * tail)


def least_steps(num_ranks: int) -> int:
    """Return how many steps it takes to tell a straggler from two or more equal ranks, if it leads in all of them."""
    return next(number for number in count(2) if chance_of_leading(number, number, num_ranks) <= STRAGGLER_MAX_CHANCE)


def find_stragglers(aligned: AlignedRun | None, run: Run) -> list[Straggler]:
    """Find the ranks that the others wait for in most steps, the worst first."""
    if aligned is None or run.mean_step_us <= 0:
        return []
    import polars as pl

    joined = aligned.table.filter(pl.col("match").is_not_null() & ~pl.col("op").is_in(_ONE_SIDED))
    if not len(joined):
        return []
    costs = _costs(_delays(joined, aligned.table))
    facts = dict(run.timed)
    found = [
        Straggler(rank=rank, lateness_us=mean, share_of_steps=share, cause=_cause(rank, facts), chance=chance)
        for rank, mean, share, chance in costs.leaders(STRAGGLER_STEP_SHARE * run.mean_step_us, len(facts))
    ]
    return sorted(found, key=lambda item: (-item.lateness_us, item.rank))


def _delays(joined: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
    """Return each collective's last rank, what it costs the others, and how much of that is its own doing.

    Both against a typical one of the other ranks, which is what the last rank alone costs. How late the collective
    before it ended is told from the same collective of the others' program: the one of the same kind and size with the
    same number in the step, so that what overlaps is compared with itself. Where they have none, from whichever ended
    last on them before they arrived.
    """
    import polars as pl

    kind = ["step_label", "op", "bytes", "group_size"]
    numbered = table.sort("arrival_us").with_columns(pl.int_range(pl.len()).over("rank", *kind).alias("number"))
    ends = numbered.select("rank", pl.col("finish_us").alias("free_us"), pl.struct(*kind, "number").alias("before"))
    rows = joined.sort("arrival_us").join_asof(
        ends.sort("free_us"),
        left_on="arrival_us",
        right_on="free_us",
        by="rank",
        strategy="backward",
        coalesce=False,
        check_sortedness=False,  # both are sorted; polars cannot check that within ranks
    )
    rows = rows.sort("match", "arrival_us", "rank").with_columns(pl.col("before").last().over("match").alias("before"))
    same = ends.select("rank", "before", pl.col("free_us").alias("same_us"))
    rows = rows.join(same, on=["rank", "before"], how="left", maintain_order="left")
    others = pl.len() - 1
    late_end = pl.col("free_us").last() - pl.col("same_us").fill_null(pl.col("free_us")).head(others).median()
    return (
        rows.group_by("match", maintain_order=True)
        .agg(
            pl.col("step_label").first(),
            pl.col("rank").last(),
            (pl.col("arrival_us").last() - pl.col("arrival_us").head(others).median()).alias("cost_us"),
            late_end.fill_null(0.0).alias("late_end_us"),
        )
        .with_columns((pl.col("cost_us") - pl.col("late_end_us").clip(0.0, pl.col("cost_us"))).alias("own_us"))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What late ranks cost by their own doing: each rank by step, and all of them by step.

    What a late end carried on is left out of both: it is the cost of a rank that was late before, or of a link.
    """

    own_us: dict[int, dict[str, float]]
    all_us: dict[str, float]

    @property
    def num_steps(self) -> int:
        return len(self.all_us)

    def leaders(self, least_us: float, num_ranks: int) -> list[tuple[int, float, float, float]]:
        """Return (rank, mean cost of a step, share of steps, chance) of those that cause most of it in most steps.

        Args:
            least_us: that a rank must cost in a step beyond what others do on average.
            num_ranks: that could have been late.
        """
        out = []
        total = sum(self.all_us.values())
        leaders = [max(self.own_us, key=lambda rank: self.own_us[rank].get(step, 0.0)) for step in self.all_us]
        for rank, costs in sorted(self.own_us.items()):
            own = sum(costs.values())
            led = sum(
                leader == rank and costs.get(step, 0.0) >= STRAGGLER_WAIT_SHARE * max(whole, 1e-9)
                for leader, (step, whole) in zip(leaders, self.all_us.items(), strict=True)
            )
            share, chance = led / self.num_steps, chance_of_leading(led, self.num_steps, num_ranks)
            excess_us = (own - (total - own) / max(num_ranks - 1, 1)) / self.num_steps
            is_most = own >= STRAGGLER_WAIT_SHARE * total and share >= STRAGGLER_STEPS_SHARE
            if is_most and excess_us >= least_us and chance <= STRAGGLER_MAX_CHANCE:
                out.append((rank, own / self.num_steps, share, chance))
        return out


def _costs(delays: pl.DataFrame) -> _Costs:
    import polars as pl

    own: dict[int, dict[str, float]] = {}
    by_rank = delays.group_by("rank", "step_label").agg(pl.col("own_us").sum()).sort("rank", "step_label")
    for rank, label, cost in by_rank.iter_rows():
        own.setdefault(rank, {})[label] = cost
    by_step = delays.group_by("step_label").agg(pl.col("own_us").sum()).sort("step_label")
    return _Costs(own_us=own, all_us=dict(by_step.iter_rows()))


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
