"""Finds stragglers, and why they are slow.

A rank is late at a collective because it took its time since the last one, or because the last one
ended late on it. Only the first is the rank's own doing: in a ring a slow link makes collectives end
late on the ranks behind it, which then arrive late although they do nothing slowly (docs/traces.md,
stragglers).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import count
from math import comb, exp, inf, lgamma, log, log1p
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    ALONE_RATIO,
    CAUSE_EXCESS_SHARE,
    STRAGGLER_MAX_CHANCE,
    STRAGGLER_STEP_SHARE,
    STRAGGLER_STEPS_SHARE,
    STRAGGLER_WAIT_SHARE,
)
from paro_advise.advisor.wording.quantities import number_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.advisor.ranks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source

_OWN_FIELDS = ("compute_us", "idle_us", "other_us")  # of a rank, by which it may be late
# A pipeline's neighbours and a broadcast's root wait by design.
_ONE_SIDED = ("broadcast", "send", "recv", "send_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        lateness_us: mean time per step that a typical other rank waits for it, for its own doing.
        share_of_steps: steps in which it causes most of the waiting.
        cause: "late compute", "host" (idle before it arrives) or "unknown".
        chance: at most, that one of equal ranks (or two, where two are named) causes most of it in as many steps; None
            in documents of older versions.
        node_ranks: since 1.2; all ranks of its node with a trace, where these are late alike; () else.
    """

    rank: int
    lateness_us: float
    share_of_steps: float
    cause: str
    chance: float | None = None
    node_ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return "rank 3", or "ranks 8-15 of one node"."""
        if not self.node_ranks:
            return f"rank {self.rank}"
        return f"ranks {number_ranges(self.node_ranks)} of one node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Which ranks are late, and what that was told from.

    Attributes:
        stragglers: one rank, two that are late in turn, or none; the worst first.
        undecided: ranks that are late in so many steps as equal ranks may be by chance.
        num_steps: with collectives that could be joined across ranks.
        num_ranks: with timed steps.
        once_us: mean over steps of what a typical other rank waits for whichever rank is latest in each by its own
            doing. So long ranks wait even where they meet once a step only, as any strategy lets them.
    """

    stragglers: tuple[Straggler, ...] = ()
    undecided: tuple[int, ...] = ()
    num_steps: int = 0
    num_ranks: int = 0
    once_us: float = 0.0


def chance_of_leading(num_led: int, num_steps: int, num_ranks: int, num_leaders: int = 1) -> float:
    """Return at most what the chance is that any so many of equal ranks lead in so many steps or more.

    At most one rank leads in a step. Were all equal, each would with the same chance, whatever makes a rank late in a
    step: at most the binomial tail times the number of sets of so many ranks (Boole's inequality).
    """
    share = num_leaders / num_ranks
    if share >= 1:
        return 1.0

    def chance(led: int) -> float:
        ways = lgamma(num_steps + 1) - lgamma(led + 1) - lgamma(num_steps - led + 1)  # as logarithms: too large else
        return exp(ways + led * log(share) + (num_steps - led) * log1p(-share))

    total = comb(num_ranks, num_leaders) * sum(map(chance, range(num_led, num_steps + 1)))
    return min(1.0, round(total, 12))  # what logarithms lose is less


def least_steps(num_ranks: int) -> int:
    """Return how many steps it takes to tell a straggler from two or more equal ranks, if it leads in all of them."""
    ranks = max(num_ranks, 2)
    return next(number for number in count(2) if chance_of_leading(number, number, ranks) <= STRAGGLER_MAX_CHANCE)


def find_stragglers(aligned: AlignedRun | None, run: Run, node_of: Mapping[int, int] | None = None) -> Lateness:
    """Find the rank that the others wait for in most steps, the two that are late in turn, or a node all of whose are.

    Args:
        aligned: all collectives; None without ranks that time steps.
        run: all ranks.
        node_of: the node of each rank, as far as known.
    """
    facts = dict(run.timed)
    if aligned is None or run.mean_step_us <= 0:
        return Lateness(num_ranks=len(facts))
    import polars as pl

    joined = aligned.table.filter(pl.col("match").is_not_null() & ~pl.col("op").is_in(_ONE_SIDED))
    if not len(joined):
        return Lateness(num_ranks=len(facts))
    costs = _costs(_delays(joined, aligned.table), _excesses(facts))
    least_us = STRAGGLER_STEP_SHARE * run.mean_step_us
    if node := _late_node(costs, facts, node_of or {}, least_us):
        return Lateness(stragglers=(node,), num_steps=costs.num_steps, num_ranks=len(facts), once_us=costs.once_us)
    leaders, chance = costs.leaders(least_us, len(facts))
    is_decided = chance <= STRAGGLER_MAX_CHANCE
    found = [
        Straggler(
            rank=rank,
            lateness_us=costs.bounded_us(rank) / costs.num_steps,
            share_of_steps=costs.led[rank] / costs.num_steps,
            cause=_cause(rank, facts),
            chance=chance,
            node_ranks=_slow_alike(rank, facts, node_of or {}) if len(leaders) == 1 else (),
        )
        for rank in leaders
    ]
    return Lateness(
        stragglers=tuple(sorted(found, key=lambda item: (-item.lateness_us, item.rank))) if is_decided else (),
        undecided=() if is_decided else tuple(sorted(leaders)),
        num_steps=costs.num_steps,
        num_ranks=len(facts),
        once_us=costs.once_us,
    )


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
    found = (
        rows.group_by("match", maintain_order=True)
        .agg(
            pl.col("step_label").first(),
            pl.col("rank").last(),
            pl.len().alias("num_ranks"),
            pl.col("rank").min().alias("first_rank"),
            (pl.col("arrival_us").last() - pl.col("arrival_us").head(others).median()).alias("cost_us"),
            late_end.fill_null(0.0).alias("late_end_us"),
            pl.col("arrival_us").last().alias("end_us"),
        )
        .with_columns((pl.col("cost_us") - pl.col("late_end_us").clip(0.0, pl.col("cost_us"))).alias("own_us"))
    )
    return _once(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """What late ranks cost by their own doing: each rank by step, and all of them by step.

    What a late end carried on is left out of both: it is the cost of a rank that was late before, or of a link.

    Attributes:
        led: in how many steps a rank causes most of it, and so much of it that it counts.
        met: the first and the number of the ranks at the collectives at which a rank costs most.
        excess_us: by how much a rank's own time in a step is longer than the others' median, at least 0. It cannot be
            late by more, however often ranks that run ahead of it find it late by the same.
    """

    own_us: dict[int, dict[str, float]]
    all_us: dict[str, float]
    led: Counter[int]
    met: dict[int, tuple[int, int]]
    excess_us: dict[int, dict[str, float]]

    @property
    def num_steps(self) -> int:
        return len(self.all_us)

    @property
    def once_us(self) -> float:
        latest = [max(self._bounded_us(rank, label) for rank in self.own_us) for label in self.all_us]
        return sum(latest) / len(latest) if latest else 0.0

    def own(self, rank: int) -> float:
        return sum(self.own_us[rank].values())

    def bounded_us(self, rank: int) -> float:
        """Return what a rank costs in all steps, at most by what it takes longer itself."""
        return sum(self._bounded_us(rank, label) for label in self.own_us[rank])

    def _bounded_us(self, rank: int, label: str) -> float:
        cost = self.own_us[rank].get(label, 0.0)
        return min(cost, self.excess_us.get(rank, {}).get(label, cost))

    def steps_slowest(self, rank: int) -> int:
        """Return in how many steps a rank takes longer itself than any other."""
        return sum(
            max(self.excess_us, key=lambda one: self.excess_us[one].get(label, 0.0)) == rank for label in self.all_us
        )

    def steps_led(self, group_of: Mapping[int, int]) -> Counter[int]:
        """Return in how many steps each group of ranks causes more than any other one, and so much that it counts."""
        by_step: dict[str, dict[int, float]] = {}
        for rank, steps in self.own_us.items():
            for label, cost in steps.items():
                group, of_groups = group_of.get(rank, -1), by_step.setdefault(label, {})
                of_groups[group] = of_groups.get(group, 0.0) + cost
        led: Counter[int] = Counter()
        for label, of_groups in by_step.items():
            group, cost = max(of_groups.items(), key=lambda item: item[1])
            led[group] += cost >= STRAGGLER_WAIT_SHARE * max(self.all_us[label], 1e-9)
        return led

    def leaders(self, least_us: float, num_ranks: int) -> tuple[tuple[int, ...], float]:
        """Return the rank, or the two, that cause most in most steps, and the chance of that among equal ranks.

        Ranks are compared with those that they meet where they are late: a pair that alone communicates leads in
        every step, one of the two in every second.

        Args:
            least_us: that a rank must cost in a step beyond what others do on average.
            num_ranks: that could have been late.
        """
        found: tuple[tuple[int, ...], float] = (), 1.0
        most = [rank for rank, _ in self.led.most_common(2)]
        for leaders in (most[:1], most):
            if leaders and len(leaders) < num_ranks and self._lead(leaders, least_us, num_ranks):
                groups = {self.met[rank] for rank in leaders}
                equals = min(num_ranks, sum(size for _, size in groups))
                led = sum(self.led[rank] for rank in leaders)
                chance = chance_of_leading(led, self.num_steps, equals, len(leaders))
                if not found[0] or chance <= STRAGGLER_MAX_CHANCE < found[1]:
                    found = tuple(leaders), chance
        return found

    def _lead(self, leaders: Sequence[int], least_us: float, num_ranks: int) -> bool:
        """Tell whether each of these ranks has its part of most steps, and costs more than what is usual."""
        total = sum(self.all_us.values())
        costs, led = [self.own(rank) for rank in leaders], [self.led[rank] for rank in leaders]
        usual_us = (total - sum(costs)) / (num_ranks - len(leaders))
        return (
            sum(costs) >= STRAGGLER_WAIT_SHARE * total
            and sum(led) >= STRAGGLER_STEPS_SHARE * self.num_steps
            and min(led) >= STRAGGLER_STEPS_SHARE * self.num_steps / len(leaders)
            and min(costs) - usual_us >= least_us * self.num_steps
        )


def _once(delays: pl.DataFrame) -> pl.DataFrame:
    """Leave to each collective what the same rank did not cost by another one at the same time, as buckets overlap."""
    import polars as pl

    begin, of_rank = pl.col("end_us") - pl.col("own_us"), ("rank", "step_label")
    before = pl.col("end_us").cum_max().shift(1).over(*of_rank)
    return (
        delays.sort(*of_rank, begin, "end_us")
        .with_columns(pl.max_horizontal(begin, before.fill_null(-inf)).alias("begin_us"))
        .with_columns((pl.col("end_us") - pl.col("begin_us")).clip(0.0).alias("own_us"))
    )


def _excesses(facts: Mapping[int, Source]) -> dict[int, dict[str, float]]:
    """Return how much longer than that of the others' median each rank's own time is, by rank and step, at least 0."""
    of_step: dict[str, list[tuple[int, float]]] = {}
    for rank, source in facts.items():
        for step in source.steps:
            own_us = sum(getattr(step, field) for field in _OWN_FIELDS)
            of_step.setdefault(step.label, []).append((rank, own_us))
    found: dict[int, dict[str, float]] = {}
    for label, known in of_step.items():
        times = np.array([time for _, time in known])
        for (rank, time), others in zip(known, _medians_of_others(times).tolist(), strict=True):
            found.setdefault(rank, {})[label] = max(0.0, time - others)
    return found


def _medians_of_others(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return for each value the median of all others, the value itself where there are none."""
    count = len(values)
    if count < 2:
        return values
    order = np.argsort(values, kind="stable")
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)

    def nth(number: int) -> NDArray[np.float64]:
        return values[order[np.where(number < place, number, number + 1)]]

    return (nth((count - 2) // 2) + nth((count - 1) // 2)) / 2


def _costs(delays: pl.DataFrame, excess_us: dict[int, dict[str, float]]) -> _Costs:
    import polars as pl

    own: dict[int, dict[str, float]] = {}
    by_rank = delays.group_by("rank", "step_label").agg(pl.col("own_us").sum()).sort("rank", "step_label")
    for rank, label, cost in by_rank.iter_rows():
        own.setdefault(rank, {})[label] = cost
    by_step = delays.group_by("step_label").agg(pl.col("own_us").sum()).sort("step_label")
    whole: dict[str, float] = dict(by_step.iter_rows())
    worst = by_rank.sort("own_us", "rank", descending=[True, False]).group_by("step_label", maintain_order=True).first()
    by_group = delays.group_by("rank", "first_rank", "num_ranks").agg(pl.col("own_us").sum())
    by_group = by_group.sort("own_us", "num_ranks", "first_rank")
    return _Costs(
        own_us=own,
        all_us=whole,
        led=Counter(
            rank
            for label, rank, cost in worst.select("step_label", "rank", "own_us").iter_rows()
            if cost >= STRAGGLER_WAIT_SHARE * max(whole[label], 1e-9)
        ),
        met={rank: (first, size) for rank, first, size, _ in by_group.iter_rows()},
        excess_us=excess_us,
    )


def _late_node(
    costs: _Costs, facts: Mapping[int, Source], node_of: Mapping[int, int], least_us: float
) -> Straggler | None:
    """Return the worst rank of a node that the others wait for in most steps, and whose ranks are all slower alike.

    Or the one rank of it that is slower.
    """
    members: dict[int, list[int]] = {}
    for rank in facts:
        members.setdefault(node_of.get(rank, -1), []).append(rank)
    if -1 in members or len(members) < 2 or costs.num_steps < least_steps(len(facts)):
        return None
    total, steps_led = sum(costs.all_us.values()), costs.steps_led(node_of)
    for node, ranks in members.items():
        own = [rank for rank in ranks if rank in costs.own_us]
        cost, led = sum(map(costs.own, own)), steps_led[node]
        leads = cost >= STRAGGLER_WAIT_SHARE * total and led >= STRAGGLER_STEPS_SHARE * costs.num_steps
        if len(ranks) < 2 or not leads:
            continue
        typical = _typical([item for rank, item in facts.items() if rank not in ranks])
        slower = [_excess(facts[rank], typical) for rank in ranks]
        if alone := _late_alone(costs, dict(zip(ranks, slower, strict=True)), len(facts), least_us):
            return replace(alone, share_of_steps=led / costs.num_steps)
        chance = chance_of_leading(led, costs.num_steps, len(members))
        if min(excess for _, excess in slower) > max(_excess(facts[o], typical)[1] for o in facts if o not in ranks):
            # That the slowest share a node; the better one of two chances counts twice.
            chance = 2 * min(chance, len(members) / comb(len(facts), len(ranks)))
        if chance > STRAGGLER_MAX_CHANCE:
            continue
        causes = {cause for cause, _ in slower}
        # They are late one after the other, so what each of them costs is not to be added up.
        excess_us = float(np.mean([excess for _, excess in slower]))
        if excess_us >= least_us and len(causes) == 1 and "unknown" not in causes:
            return Straggler(
                rank=max(own, key=lambda rank: (costs.own(rank), -rank)),
                lateness_us=excess_us,
                share_of_steps=led / costs.num_steps,
                cause=causes.pop(),
                chance=chance,
                node_ranks=tuple(sorted(ranks)),
            )
    return None


def _late_alone(
    costs: _Costs, slower: Mapping[int, tuple[str, float]], num_ranks: int, least_us: float
) -> Straggler | None:
    """Return the one rank of a node that is slower: it makes the others of its node late where these meet other nodes.

    Args:
        costs: of late ranks.
        slower: what each rank of the node spends more on than those of other nodes, and how much a step (us).
        num_ranks: with timed steps.
        least_us: that it must spend more in a step.
    """
    rank = max(slower, key=lambda item: slower[item][1])
    cause, excess_us = slower[rank]
    others_us = float(np.median([excess for other, (_, excess) in slower.items() if other != rank]))
    if excess_us < max(least_us, ALONE_RATIO * others_us) or cause == "unknown":
        return None
    chance = chance_of_leading(costs.steps_slowest(rank), costs.num_steps, num_ranks)
    if chance > STRAGGLER_MAX_CHANCE:
        return None
    return Straggler(rank=rank, lateness_us=excess_us, share_of_steps=1.0, cause=cause, chance=chance)


def _slow_alike(rank: int, facts: Mapping[int, Source], node_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return all ranks of a late rank's node if each is slower than other nodes' for its reason and as much, () else.

    Of ranks that are slow alike, which one the others wait for is chance.
    """
    mates = tuple(sorted(other for other in facts if node_of.get(other, -1) == node_of.get(rank, -2)))
    typical = _typical([item for other, item in facts.items() if other not in mates])
    cause, excess_us = _excess(facts[rank], typical) if rank in facts else ("unknown", 0.0)
    slower = [_excess(facts[other], typical) for other in mates]
    alike = all(why == cause and us * ALONE_RATIO >= excess_us for why, us in slower)
    return mates if len(mates) > 1 and cause != "unknown" and alike else ()


def _cause(rank: int, facts: Mapping[int, Source]) -> str:
    if rank not in facts:
        return "unknown"
    return _excess(facts[rank], _typical([item for other, item in facts.items() if other != rank]))[0]


def _mean(source: Source, field: str) -> float:
    return float(np.mean([getattr(step, field) for step in source.steps])) if source.steps else 0.0


def _typical(sources: Sequence[Source]) -> dict[str, float]:
    """Return the median over ranks of where a step's time goes, {} without timed steps."""
    timed = [source for source in sources if source.steps]
    fields = (*_OWN_FIELDS, "wall_us") if timed else ()
    return {field: float(np.median([_mean(source, field) for source in timed])) for field in fields}


def _excess(source: Source, typical: Mapping[str, float]) -> tuple[str, float]:
    """Compare a rank's own time with that of others: return what it spends more on, and how much a step (us)."""
    if not typical:
        return "unknown", 0.0
    excess = {field: _mean(source, field) - typical[field] for field in _OWN_FIELDS}
    largest = max(excess, key=lambda field: excess[field])
    if excess[largest] < CAUSE_EXCESS_SHARE * typical["wall_us"]:
        return "unknown", 0.0
    return ("late compute" if largest == "compute_us" else "host"), excess[largest]
