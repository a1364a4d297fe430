"""Which rank left the program that all ranks run (pure).

Two ranks issue the collectives of the groups that both are in in one order. Where their orders part, one of the two has
left the program: which one, a third rank tells whose order agrees with one of them only, or the steps before. Orders
that part and meet again part by design: several threads of a rank issue collectives of different groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.advisor.hangs.constants import MIN_REPEATED
from paro_advise.advisor.hangs.waits import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from paro_advise.advisor.hangs.progress import Group
    from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump

Key: TypeAlias = tuple[str, str]  # group and kind, which steps repeat
Name: TypeAlias = tuple[str, int, str]  # group, number and kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """Where the orders of two ranks part.

    Attributes:
        ranks: the two.
        issued: by each of them there, in place of what the other one issued.
    """

    ranks: tuple[int, int]
    issued: tuple[Issued, Issued]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """A rank that left the program.

    Attributes:
        rank: it.
        issued: what it issued.
        usual: what others issued there.
        others: who did.
        is_by_history: its own steps before tell; else that the others agree.
    """

    rank: int
    issued: Issued
    usual: Issued
    others: tuple[int, ...]
    is_by_history: bool


def deviation(dumps: Mapping[int, RankDump], groups: Sequence[Group]) -> Deviation | None:
    """Return the one rank that left the program; None where none did or nobody can tell which.

    Args:
        dumps: by rank; those told by logs, which hold no order, are left out.
        groups: that the dumps show.
    """
    partings = partings_of(dumps, groups)
    if not partings:
        return None
    suspects = set.intersection(*(set(one.ranks) for one in partings))
    is_by_history = len(suspects) > 1
    if is_by_history:
        (parting,) = partings
        suspects = {
            rank
            for rank, issued in zip(parting.ranks, parting.issued, strict=True)
            if _is_unusual(issued, orders_of(dumps[rank]))
        }
    if len(suspects) != 1:
        return None
    (rank,) = suspects
    mine = [(one, one.ranks.index(rank)) for one in partings]
    first, place = min(mine, key=lambda item: item[0].issued[item[1]].created_ns)
    return Deviation(
        rank=rank,
        issued=first.issued[place],
        usual=first.issued[1 - place],
        others=tuple(sorted(one.ranks[1 - index] for one, index in mine)),
        is_by_history=is_by_history,
    )


def deviation_in_cycle(dumps: Mapping[int, RankDump], circle: AbstractSet[int]) -> Deviation | None:
    """Return the one rank that waits in something else than its steps before had there; None where not one does.

    Ranks can wait for each other over a third group without any two orders that part.

    Args:
        dumps: by rank.
        circle: ranks that wait for each other.
    """
    found = []
    for rank in sorted(circle & dumps.keys()):
        order = orders_of(dumps[rank])
        if dumps[rank].is_log or not order or order[-1].is_done:
            continue
        key = expected([(one.group, kind_of(one)) for one in order[:-1]])
        usual = next((one for one in reversed(order) if (one.group, kind_of(one)) == key), None)
        if usual is not None and key != (order[-1].group, kind_of(order[-1])):
            found.append(Deviation(rank=rank, issued=order[-1], usual=usual, others=(), is_by_history=True))
    return found[0] if len(found) == 1 else None


def partings_of(dumps: Mapping[int, RankDump], groups: Sequence[Group]) -> list[Parting]:
    """Return where the orders of two ranks part and do not meet again, for all pairs.

    Ranks with equal orders are compared once, so that this takes little more than the pairs themselves.
    """
    orders = {rank: orders_of(dump) for rank, dump in dumps.items() if not dump.is_log}
    names = {rank: [_name(one) for one in order] for rank, order in orders.items()}
    members: dict[int, set[str]] = {rank: set() for rank in orders}
    for group in groups:
        for rank in group.ranks:
            if rank in members:
                members[rank].add(group.name)
    seen: dict[tuple[int, frozenset[str]], tuple[int, list[int]]] = {}
    kinds: dict[tuple[Name, ...], int] = {}
    known: dict[tuple[int, int], tuple[int, int] | None] = {}
    found = []
    for pair in combinations(sorted(orders), 2):
        shared = frozenset(members[pair[0]] & members[pair[1]])
        sides = []
        for rank in pair:
            if (rank, shared) not in seen:
                places = [place for place, name in enumerate(names[rank]) if name[0] in shared]
                kind = kinds.setdefault(tuple(names[rank][place] for place in places), len(kinds))
                seen[rank, shared] = kind, places
            sides.append(seen[rank, shared])
        (one, places), (other, other_places) = sides
        if one == other:
            continue
        if (one, other) not in known:
            mine = [names[pair[0]][place] for place in places]
            known[one, other] = _parting(mine, [names[pair[1]][place] for place in other_places])
        if (at := known[one, other]) is not None:
            issued = orders[pair[0]][places[at[0]]], orders[pair[1]][other_places[at[1]]]
            found.append(Parting(ranks=pair, issued=issued))
    return found


def orders_of(dump: RankDump) -> list[Issued]:
    """Return the collectives of a dump, transfers between two ranks left out, as they were issued."""
    collectives = [one for one in dump.issued if one.peer is None and one.seq is not None]
    return sorted(collectives, key=lambda one: one.created_ns)


def _parting(mine: Sequence[Name], theirs: Sequence[Name]) -> tuple[int, int] | None:
    """Return the places at which two orders part, None where one is the other's begin or they meet again."""
    sides = [_align(own, other) for own, other in ((mine, theirs), (theirs, mine))]
    for one, other in zip(*sides, strict=False):
        if mine[one] != theirs[other]:
            both = {mine[place] for place in sides[0]} & {theirs[place] for place in sides[1]}
            return None if {mine[one], theirs[other]} <= both else (one, other)
    return None


def _align(own: Sequence[Name], other: Sequence[Name]) -> list[int]:
    """Return the places of what the other rank's buffer can hold too: of its groups, from its first number on."""
    first: dict[str, int] = {}
    for group, number, _ in other:
        first.setdefault(group, number)
    return [place for place, (group, number, _) in enumerate(own) if group in first and number >= first[group]]


def _name(one: Issued) -> Name:
    return one.group, one.seq or 0, kind_of(one)


def _is_unusual(issued: Issued, order: Sequence[Issued]) -> bool:
    """Tell whether a rank's steps before had something else in this place."""
    keys: list[Key] = [(one.group, kind_of(one)) for one in order]
    usual = expected(keys[: order.index(issued)])
    return usual is not None and usual != (issued.group, kind_of(issued))


def expected(keys: Sequence[Key]) -> Key | None:
    """Return what comes next where the last steps are repeated; None where they do not repeat.

    What followed the longest repeat of the end: it must be at least as long as the time between the two.
    """
    behind = keys[::-1]
    lengths = _repeats(behind)
    longest = max(lengths[1:], default=0)
    lags = [lag for lag, length in enumerate(lengths) if lag and length == longest >= max(lag, MIN_REPEATED)]
    found = {behind[lag - 1] for lag in lags}
    return next(iter(found)) if len(found) == 1 else None


def _repeats(keys: Sequence[Key]) -> list[int]:
    """Return how many keys from each place on are those from the start on (Z-algorithm, linear)."""
    found = [0] * len(keys)
    left = right = 0
    for place in range(1, len(keys)):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < len(keys) and keys[length] == keys[place + length]:
            length += 1
        found[place] = length
        if place + length > right:
            left, right = place, place + length
    return found
