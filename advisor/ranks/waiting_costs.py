"""What late ranks cost the others at collectives, by rank and step, and what chance makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from math import comb, exp, inf, lgamma, log, log1p
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    LATE_SHARE,
    STRAGGLER_LEAST_SHARE,
    STRAGGLER_MAX_CHANCE,
    STRAGGLER_STEPS_SHARE,
    STRAGGLER_WAIT_SHARE,
    WAITED_SHARE,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.advisor.ranks.source import Source

OWN_FIELDS = ("compute_us", "idle_us", "other_us")  # of a rank, by which it may be late


def chance_of_leading(num_led: int, num_steps: int, num_ranks: int, num_leaders: int = 1) -> float:
    """Return at most what the chance is that any so many of equal ranks lead in so many steps or more.

    At most one rank leads in a step. Were all equal, each would with the same chance, whatever makes a rank late in a
    step: at most the binomial tail times the number of sets of so many ranks (Boole's inequality).
    """
    share = num_leaders / num_ranks
    if share >= 1:
        return 1.0

    def chance(led: int) -> float:
        return exp(_log_comb(num_steps, led) + led * log(share) + (num_steps - led) * log1p(-share))

    total = comb(num_ranks, num_leaders) * sum(map(chance, range(num_led, num_steps + 1)))
    return min(1.0, round(total, 12))  # what logarithms lose is less


def chance_of_being_slowest(num_steps: int, num_steps_slowest: int, num_ranks: int, num_slow: int) -> float:
    """Return at most what the chance is that any so many of equal ranks are the slowest ones in so many steps.

    Each set of so many ranks is as likely as any other in a step: at most the binomial tail times the number of sets
    (Boole's inequality), of all sizes up to half of the ranks.
    """
    log_sets = _log_comb(num_ranks, num_slow)
    if num_slow == num_ranks:
        return 1.0

    def chance(seen: int) -> float:
        other = (num_steps - seen) * log1p(-exp(-log_sets))
        return exp(min(0.0, log_sets + _log_comb(num_steps, seen) - seen * log_sets + other))

    total = max(1, num_ranks // 2) * sum(map(chance, range(num_steps_slowest, num_steps + 1)))
    return min(1.0, total)


def _log_comb(number: int, chosen: int) -> float:
    """Return the logarithm of the number of ways to choose; as a float such numbers overflow."""
    return lgamma(number + 1) - lgamma(chosen + 1) - lgamma(number - chosen + 1)


def least_steps(num_ranks: int) -> int:
    """Return how many steps it takes to tell a straggler from two or more equal ranks, if it leads in all of them."""
    ranks = max(num_ranks, 2)
    return next(number for number in count(2) if chance_of_leading(number, number, ranks) <= STRAGGLER_MAX_CHANCE)


def delays_of(joined: pl.DataFrame, table: pl.DataFrame) -> pl.DataFrame:
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
class Leaders:
    """Ranks that cause most of the waiting.

    Attributes:
        ranks: one, or two in turn; () where none leads.
        chance: at most, that equal ranks would lead so.
        led: in how many steps each rank causes most of the waiting.
    """

    ranks: tuple[int, ...] = ()
    chance: float = 1.0
    led: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What late ranks cost by their own doing: each rank by step, and all of them by step.

    What a late end carried on is left out of both: it is the cost of a rank that was late before, or of a link.

    Attributes:
        worst: of each step, the rank that causes most of the waiting, if so much of it that it counts.
        waited: labels of the steps in which ranks wait: in others one is the last by what clocks differ. Behind these
            the labels of those in which they wait twice as long or longer, four times, and so on while the steps are
            several: what ranks are late by chance in each step hides one that is late by more in some.
        met: the first and the number of the ranks at the collectives at which a rank costs most.
        excess_us: by how much a rank's own time in a step is longer than the others' median, at least 0.
        most_us: by how much a rank can be late in a step by its own doing, however often ranks that run ahead of it
            find it late by the same: its excess there, and what of its excess in the step before nobody has waited
            for, as behind the last collective of that one.
    """

    own_us: dict[int, dict[str, float]]
    all_us: dict[str, float]
    worst: dict[str, int]
    waited: tuple[frozenset[str], ...]
    met: dict[int, tuple[int, int]]
    excess_us: dict[int, dict[str, float]]
    most_us: dict[int, dict[str, float]]

    @property
    def num_steps(self) -> int:
        """Return how many steps hold collectives that could be joined across ranks."""
        return len(self.all_us)

    @property
    def once_us(self) -> float:
        """Return the mean over steps of what whichever rank is latest costs in each by its own doing."""
        latest = [cost for cost, _, _ in self._latest()]
        return sum(latest) / len(latest) if latest else 0.0

    @property
    def once_at(self) -> tuple[int, str] | None:
        """Return the rank and the step that make most of that, None where no single step does."""
        latest = self._latest()
        cost, label, rank = max(latest, default=(0.0, "", -1))
        return (rank, label) if len(latest) > 2 and 2 * cost > sum(each for each, _, _ in latest) else None

    def _latest(self) -> list[tuple[float, str, int]]:
        """Return for each step what the rank that is latest by its own doing costs, the step, and that rank."""
        return [max((self._bounded_us(label, rank), label, rank) for rank in self.own_us) for label in self.all_us]

    def own(self, rank: int) -> float:
        """Return what a rank costs in all steps."""
        return sum(self.own_us[rank].values())

    def led_us(self, rank: int) -> list[float]:
        """Return what a rank costs in each step in which it causes most of the waiting."""
        return [us for label, us in self.own_us[rank].items() if self.worst.get(label) == rank]

    def bounded_us(self, *ranks: int) -> float:
        """Return what ranks cost a step (mean, us), in each at most by what the slowest of them takes longer itself.

        Several are late one after the other, and each collective is the cost of one of them.
        """
        return sum(self._bounded_us(label, *ranks) for label in self.all_us) / max(1, len(self.steps_with(*ranks)))

    def steps_with(self, *ranks: int) -> frozenset[str]:
        """Return the labels of the steps that any of these ranks has recorded: in others it can be no straggler."""
        known = (self.excess_us.get(rank, {}).keys() | self.own_us.get(rank, {}).keys() for rank in ranks)
        return frozenset().union(*known) & self.all_us.keys()

    def caused_us(self, rank: int, mates: Iterable[int]) -> dict[str, float]:
        """Return what a rank costs in steps by making mates late that meet others (us), where it is slower than these.

        What it does behind the last collective of a step is waited for in the next one.
        """
        mates, left_us = tuple(mates), 0.0
        found: dict[str, float] = {}
        for label in self.all_us:
            known = {mate: self.excess_us.get(mate, {}).get(label, 0.0) for mate in mates}
            is_slowest = known[rank] > max((us for mate, us in known.items() if mate != rank), default=0.0)
            excess_us = known[rank] if is_slowest else 0.0
            found[label] = min(self._bounded_us(label, *mates), excess_us + left_us)
            left_us = min(excess_us, excess_us + left_us - found[label])
        return found

    def _bounded_us(self, label: str, *ranks: int) -> float:
        cost = sum(self.own_us[rank].get(label, 0.0) for rank in ranks if rank in self.own_us)
        known = [self.most_us[rank].get(label, cost) for rank in ranks if rank in self.most_us]
        return min(cost, max(known, default=cost))

    def steps_slowest(self, *ranks: int) -> int:
        """Return in how many steps each of these ranks takes longer itself than any other one."""

        def are_slowest(label: str) -> bool:
            known = {rank: steps.get(label, 0.0) for rank, steps in self.excess_us.items()}
            others = [time for rank, time in known.items() if rank not in ranks]
            return min(known.get(rank, 0.0) for rank in ranks) > max(others, default=0.0)

        return sum(map(are_slowest, self.all_us))

    def steps_led(self, group_of: Mapping[int, int]) -> Counter[int]:
        """Return in how many steps each group of ranks causes more than any other one, and so much that it counts."""
        by_step: dict[str, dict[int, float]] = {}
        for rank, steps in self.own_us.items():
            for label, cost in steps.items():
                group, of_groups = group_of.get(rank, -1), by_step.setdefault(label, {})
                of_groups[group] = of_groups.get(group, 0.0) + cost
        led: Counter[int] = Counter()
        for label in self.waited[0] & by_step.keys():
            of_groups = by_step[label]
            group, cost = max(of_groups.items(), key=lambda item: item[1])
            led[group] += cost >= STRAGGLER_WAIT_SHARE * self.all_us[label]
        return led

    def leaders(self, least_us: float, num_ranks: int) -> Leaders:
        """Return the rank, or the two, that cause most in most steps, or in most of those in which ranks wait longest.

        Ranks are compared with those that they meet where they are late: a pair that alone communicates leads in
        every step, one of the two in every second.

        Args:
            least_us: that a rank must cost in a step beyond what others do on average.
            num_ranks: that could have been late.
        """
        undecided = Leaders()
        for number, labels in enumerate(self.waited):
            if len(labels) < least_steps(num_ranks):
                break
            found = self._leaders_in(labels, least_us, num_ranks)
            found = replace(found, chance=self.chance_of_choice(number, found.chance))
            if found.ranks and found.chance <= STRAGGLER_MAX_CHANCE:
                return found
            # Of few steps one or the other rank leads most by chance, which leaves nothing open.
            undecided = undecided if number else found
        return undecided

    def chance_of_choice(self, number: int, chance: float) -> float:
        """Return the chance of what has such a chance in one choice of steps in which ranks wait.

        Which steps are the worst says nothing of who is late in them, so that the chance holds for each choice. All
        choices but the first share one chance (Boole's inequality).
        """
        return min(1.0, len(self.waited) * chance) if number else chance

    def _leaders_in(self, labels: frozenset[str], least_us: float, num_ranks: int) -> Leaders:
        """Return the rank, or the two, that cause most in most of these steps."""
        led = Counter(self.worst[label] for label in labels & self.worst.keys())
        found = Leaders(led=led)
        most = [rank for rank, _ in led.most_common(2)]
        for leaders in (most[:1], most):
            num_steps = len(labels & self.steps_with(*leaders))
            if leaders and len(leaders) < num_ranks and self._lead(leaders, led, num_steps, least_us, num_ranks):
                groups = {self.met[rank] for rank in leaders}
                equals = min(num_ranks, sum(size for _, size in groups))
                num_led = sum(led[rank] for rank in leaders)
                chance = chance_of_leading(num_led, num_steps, equals, len(leaders))
                if not found.ranks or chance <= STRAGGLER_MAX_CHANCE < found.chance:
                    found = Leaders(ranks=tuple(leaders), chance=chance, led=led)
        return found

    def _lead(
        self, leaders: Sequence[int], num_led: Counter[int], num_steps: int, least_us: float, num_ranks: int
    ) -> bool:
        """Tell whether each of these ranks has its part of most of so many steps, and costs more than what is usual."""
        recorded = self.steps_with(*leaders)
        total = sum(self.all_us[label] for label in recorded)
        costs, led = [self.own(rank) for rank in leaders], [num_led[rank] for rank in leaders]
        usual_us = (total - sum(costs)) / (num_ranks - len(leaders))
        return (
            sum(costs) >= STRAGGLER_WAIT_SHARE * total
            and sum(led) >= STRAGGLER_STEPS_SHARE * num_steps
            and min(led) >= STRAGGLER_STEPS_SHARE * num_steps / len(leaders)
            and sum(led) >= STRAGGLER_LEAST_SHARE * len(recorded)
            and min(costs) - usual_us >= least_us * len(recorded)
        )


def num_late(costs_us: Iterable[float], num_led: int) -> int:
    """Return in how many steps a rank is late: in those in which it leads, and in others that cost a part of these.

    A rank that slows down little by little is late in all of them, although others wait longest in the last ones.

    Args:
        costs_us: what the rank costs, in each step in which it is the slowest.
        num_led: in how many it leads.
    """
    costs = sorted(costs_us, reverse=True)
    least_us = LATE_SHARE * sum(costs[:num_led]) / max(1, num_led)
    return max(num_led, sum(us >= least_us for us in costs if us))


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


def excesses_of(facts: Mapping[int, Source]) -> dict[int, dict[str, float]]:
    """Return how much longer than that of the others' median each rank's own time is, by rank and step, at least 0."""
    of_step: dict[str, list[tuple[int, float]]] = {}
    for rank, source in facts.items():
        for step in source.steps:
            own_us = sum(getattr(step, field) for field in OWN_FIELDS)
            of_step.setdefault(step.label, []).append((rank, own_us))
    found: dict[int, dict[str, float]] = {}
    for label, known in of_step.items():
        times = np.array([time for _, time in known])
        for (rank, time), others in zip(known, _medians_of_others(times).tolist(), strict=True):
            found.setdefault(rank, {})[label] = max(0.0, time - others)
    return found


def _most_us(own_us: Mapping[str, float], excess_us: Mapping[str, float]) -> dict[str, float]:
    """Return by how much a rank can be late in each step, from what it costs and by how much it takes longer there."""
    found, left_us = dict[str, float](), 0.0
    for label, excess in excess_us.items():
        found[label] = excess + left_us
        left_us = min(excess, max(0.0, found[label] - own_us.get(label, 0.0)))
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


def _waited(all_us: Mapping[str, float], least_us: float) -> tuple[frozenset[str], ...]:
    """Return the steps in which ranks wait so long (us), then those of twice that and more while there are several."""
    found = [frozenset(label for label, cost in all_us.items() if cost >= least_us)]
    while least_us > 0 and len(found[-1]) > 1:
        least_us *= 2
        labels = frozenset(label for label in found[-1] if all_us[label] >= least_us)
        if labels != found[-1] and len(labels) > 1:
            found.append(labels)
        elif not labels:
            break
    return tuple(found)


def costs_of(delays: pl.DataFrame, excess_us: dict[int, dict[str, float]], least_us: float) -> Costs:
    """Sum up delays (``delays_of``) by rank and step, beside how much longer ranks take (``excesses_of``).

    Args:
        delays: what the last rank of each collective costs.
        excess_us: of each rank and step.
        least_us: that a straggler must cost in a step.
    """
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
    return Costs(
        own_us=own,
        all_us=whole,
        worst={
            label: rank
            for label, rank, cost in worst.select("step_label", "rank", "own_us").iter_rows()
            if cost >= STRAGGLER_WAIT_SHARE * whole[label]
        },
        waited=_waited(whole, WAITED_SHARE * least_us),
        met={rank: (first, size) for rank, first, size, _ in by_group.iter_rows()},
        excess_us=excess_us,
        most_us={rank: _most_us(own.get(rank, {}), steps) for rank, steps in excess_us.items()},
    )
