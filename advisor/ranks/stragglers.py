"""Finds stragglers, and why they are slow.

A rank is late at a collective because it took its time since the last one, or because the last one
ended late on it. Only the first is the rank's own doing: in a ring a slow link makes collectives end
late on the ranks behind it, which then arrive late although they do nothing slowly (docs/traces.md,
stragglers).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    ALONE_RATIO,
    CAUSE_EXCESS_SHARE,
    STRAGGLER_LEAST_SHARE,
    STRAGGLER_MAX_CHANCE,
    STRAGGLER_STEP_SHARE,
    STRAGGLER_STEPS_SHARE,
    STRAGGLER_WAIT_SHARE,
)
from paro_advise.advisor.ranks.waiting_costs import (
    OWN_FIELDS,
    Costs,
    chance_of_being_slowest,
    chance_of_leading,
    costs_of,
    delays_of,
    excesses_of,
    least_steps,
    num_late,
)
from paro_advise.advisor.wording.quantities import number_ranges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source

# A pipeline's neighbours and a broadcast's root wait by design.
_ONE_SIDED = ("broadcast", "send", "recv", "send_recv")
_LOADING, _QUEUED = "idle_loading_us", "queued_us"  # of a step's times; parts of what is idle


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that others wait for.

    Attributes:
        lateness_us: mean time per step that a typical other rank waits for it, for its own doing.
        share_of_steps: steps in which it causes most of the waiting.
        cause: "late compute", "data loading" (idle while its DataLoader is waited for), "queued kernels" (idle although
            the next one has been launched), "host" (idle otherwise before it arrives) or "unknown".
        chance: at most, that one of equal ranks (or two, where two are named) causes most of it in as many steps, or
            that those that are late alike are the slowest; None in documents of older versions.
        alike: since 1.2; all ranks that are late alike, it among them; () where it is late alone.
        are_of_one_node: since 1.2; they are all ranks of a node that have a trace.
    """

    rank: int
    lateness_us: float
    share_of_steps: float
    cause: str
    chance: float | None = None
    alike: tuple[int, ...] = ()
    are_of_one_node: bool = False

    @property
    def text(self) -> str:
        """Return "rank 3", "ranks 3, 12" or "ranks 8-15 of one node"."""
        if not self.alike:
            return f"rank {self.rank}"
        return f"ranks {number_ranges(self.alike)}{' of one node' if self.are_of_one_node else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Which ranks are late, and what that was told from.

    Attributes:
        stragglers: one rank, several that are late alike, two that are late in turn, or none; the worst first.
        undecided: ranks that are late in so many steps as equal ranks may be by chance.
        num_steps: with collectives that could be joined across ranks.
        num_ranks: with timed steps.
        once_us: mean over steps of what a typical other rank waits for whichever rank is latest in each by its own
            doing. So long ranks wait even where they meet once a step only, as any strategy lets them.
        once_at: the rank and the step that make most of that, None where no single step does.
    """

    stragglers: tuple[Straggler, ...] = ()
    undecided: tuple[int, ...] = ()
    num_steps: int = 0
    num_ranks: int = 0
    once_us: float = 0.0
    once_at: tuple[int, str] | None = None


def find_stragglers(aligned: AlignedRun | None, run: Run, node_of: Mapping[int, int] | None = None) -> Lateness:
    """Find the rank that the others wait for in most steps, two that are late in turn, or several that are late alike.

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
    least_us = STRAGGLER_STEP_SHARE * run.mean_step_us
    costs = costs_of(delays_of(joined, aligned.table), excesses_of(facts), least_us)
    late = _slow_set(costs, facts, node_of or {}, least_us) or _late_node(costs, facts, node_of or {}, least_us)
    if late:
        return Lateness(stragglers=(late,), num_steps=costs.num_steps, num_ranks=len(facts), once_us=costs.once_us)
    leaders = costs.leaders(least_us, len(facts))
    is_decided = leaders.chance <= STRAGGLER_MAX_CHANCE
    found = [
        Straggler(
            rank=rank,
            lateness_us=costs.bounded_us(rank),
            share_of_steps=num_late(costs.led_us(rank), leaders.led[rank]) / len(costs.steps_with(rank)),
            cause=_cause(rank, facts),
            chance=leaders.chance,
            alike=(mates := _slow_mates(rank, facts, node_of or {}) if len(leaders.ranks) == 1 else ()),
            are_of_one_node=bool(mates),
        )
        for rank in leaders.ranks
    ]
    return Lateness(
        stragglers=tuple(sorted(found, key=lambda item: (-item.lateness_us, item.rank))) if is_decided else (),
        undecided=() if is_decided else tuple(sorted(leaders.ranks)),
        num_steps=costs.num_steps,
        num_ranks=len(facts),
        once_us=costs.once_us,
        once_at=costs.once_at,
    )


def _late_node(
    costs: Costs, facts: Mapping[int, Source], node_of: Mapping[int, int], least_us: float
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
        lateness_us = costs.bounded_us(*ranks)
        if lateness_us < least_us:  # the others do not wait, whoever is the last by a little
            continue
        if alone := _late_alone(costs, dict(zip(ranks, slower, strict=True)), len(facts), least_us):
            return alone
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
                lateness_us=lateness_us,
                share_of_steps=led / max(1, len(costs.steps_with(*ranks))),
                cause=causes.pop(),
                chance=chance,
                alike=tuple(sorted(ranks)),
                are_of_one_node=True,
            )
    return None


def _late_alone(
    costs: Costs, slower: Mapping[int, tuple[str, float]], num_ranks: int, least_us: float
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
    # In other steps another rank of the node may be the one that is slower.
    caused_us = costs.caused_us(rank, slower)
    recorded = costs.steps_with(rank)
    num_steps = max(1, len(recorded))
    lateness_us = sum(caused_us.values()) / num_steps
    if lateness_us < least_us:
        return None
    for number, waited in enumerate(costs.waited):
        labels = waited & recorded
        led = sum(caused_us.get(label, 0.0) >= STRAGGLER_WAIT_SHARE * costs.all_us[label] for label in labels)
        chance = costs.chance_of_choice(number, chance_of_leading(led, len(labels), num_ranks))
        leads = led >= max(STRAGGLER_STEPS_SHARE * len(labels), STRAGGLER_LEAST_SHARE * num_steps)
        if leads and chance <= STRAGGLER_MAX_CHANCE:
            share = num_late(caused_us.values(), led) / num_steps
            return Straggler(rank=rank, lateness_us=lateness_us, share_of_steps=share, cause=cause, chance=chance)
    return None


def _slow_set(
    costs: Costs, facts: Mapping[int, Source], node_of: Mapping[int, int], least_us: float
) -> Straggler | None:
    """Return ranks that are slower than most others in the same steps and alike, None for fewer than two.

    None of them may be last in most steps: which of slow ranks the others wait for is chance. What is told of them is
    told by how long they take themselves; that others wait for them is asked besides.
    """
    typical = _typical(list(facts.values()))
    slower = {rank: _excess(source, typical) for rank, source in facts.items()}
    most_us = max((us for _, us in slower.values()), default=0.0)
    slow = [rank for rank, (_, us) in slower.items() if us * ALONE_RATIO >= most_us]
    if most_us < least_us or not 1 < len(slow) < len(facts) / 2:
        return None
    cost, lateness_us = sum(costs.own(rank) for rank in slow if rank in costs.own_us), costs.bounded_us(*slow)
    seen = costs.steps_slowest(*slow)
    chance = chance_of_being_slowest(costs.num_steps, seen, len(facts), len(slow))
    is_part = cost < STRAGGLER_WAIT_SHARE * sum(costs.all_us.values())
    if is_part or lateness_us < least_us or chance > STRAGGLER_MAX_CHANCE:
        return None
    worst = max(slow, key=lambda rank: (slower[rank][1], -rank))
    nodes = {node_of.get(rank, -1) for rank in slow}
    num_mates = sum(node_of.get(rank, -1) in nodes for rank in facts)
    causes = {slower[rank][0] for rank in slow}
    return Straggler(
        rank=worst,
        lateness_us=lateness_us,
        share_of_steps=seen / max(1, len(costs.steps_with(*slow))),
        cause=causes.pop() if len(causes) == 1 else "unknown",
        chance=chance,
        alike=tuple(sorted(slow)),
        are_of_one_node=len(nodes) == 1 and -1 not in nodes and num_mates == len(slow),
    )


def _slow_mates(rank: int, facts: Mapping[int, Source], node_of: Mapping[int, int]) -> tuple[int, ...]:
    """Return all ranks of a late rank's node if each is slower than other nodes' for its reason and as much, () else.

    Of ranks that are slow alike, which one the others wait for is chance.
    """
    mates = tuple(sorted(other for other in facts if node_of.get(other, -1) == node_of.get(rank, -2)))
    if len(mates) < 2 or rank not in mates:
        return ()
    slower = dict(zip(mates, _beyond_others(mates, facts), strict=True))
    cause, excess_us = slower[rank]
    alike = all(why == cause and us * ALONE_RATIO >= excess_us for why, us in slower.values())
    return mates if cause != "unknown" and alike else ()


def _beyond_others(ranks: Sequence[int], facts: Mapping[int, Source]) -> list[tuple[str, float]]:
    """Return what each of some ranks spends more on than all other ranks, and how much a step (us)."""
    typical = _typical([item for rank, item in facts.items() if rank not in ranks])
    return [_excess(facts[rank], typical) for rank in ranks]


def _cause(rank: int, facts: Mapping[int, Source]) -> str:
    return _beyond_others([rank], facts)[0][0] if rank in facts else "unknown"


def _mean(source: Source, field: str) -> float:
    times = [getattr(step, field) for step in source.steps]
    return float(np.mean(times)) if times and None not in times else 0.0


def _typical(sources: Sequence[Source]) -> dict[str, float]:
    """Return the median over ranks of where a step's time goes, {} without timed steps."""
    timed = [source for source in sources if source.steps]
    fields = (*OWN_FIELDS, _LOADING, _QUEUED, "wall_us") if timed else ()
    return {field: float(np.median([_mean(source, field) for source in timed])) for field in fields}


def _excess(source: Source, typical: Mapping[str, float]) -> tuple[str, float]:
    """Compare a rank's own time with that of others: return what it spends more on, and how much a step (us)."""
    if not typical:
        return "unknown", 0.0
    excess = {field: _mean(source, field) - typical[field] for field in OWN_FIELDS}
    largest = max(excess, key=lambda field: excess[field])
    if excess[largest] < CAUSE_EXCESS_SHARE * typical["wall_us"]:
        return "unknown", 0.0
    if largest == "compute_us":
        return "late compute", excess[largest]
    for field, cause in ((_LOADING, "data loading"), (_QUEUED, "queued kernels")):
        if _mean(source, field) - typical[field] > excess[largest] / 2:
            return cause, excess[largest]
    return "host", excess[largest]
