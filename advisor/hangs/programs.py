"""Which rank left the program that all ranks run (pure).

Two ranks issue the collectives of the groups that both are in in one order. Where their orders part, one of the two has
left the program: which one, a third rank tells whose order agrees with one of them only, or the steps before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.advisor.hangs.constants import MIN_REPEATED
from paro_advise.advisor.hangs.waits import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.hangs.progress import Group
    from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump

Key: TypeAlias = tuple[str, str]  # group and kind, which steps repeat


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
    """Return the one rank that left the program; None where none did or nobody can tell which."""
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


def partings_of(dumps: Mapping[int, RankDump], groups: Sequence[Group]) -> list[Parting]:
    """Return where the orders of two ranks part, for all pairs of which one waits there or never came as far."""
    orders = {rank: orders_of(dump) for rank, dump in dumps.items()}
    found = []
    for one, other in combinations(sorted(orders), 2):
        shared = {group.name for group in groups if one in group.ranks and other in group.ranks}
        pair = _aligned([[each for each in orders[rank] if each.group in shared] for rank in (one, other)])
        for mine, theirs in zip(*pair, strict=False):
            if _name(mine) != _name(theirs):
                found.append(Parting(ranks=(one, other), issued=(mine, theirs)))
                break
    return found


def orders_of(dump: RankDump) -> list[Issued]:
    """Return the collectives of a dump, transfers between two ranks left out, as they were issued."""
    collectives = [one for one in dump.issued if one.peer is None and one.seq is not None]
    return sorted(collectives, key=lambda one: one.created_ns)


def _aligned(orders: Sequence[Sequence[Issued]]) -> list[list[Issued]]:
    """Leave out what only one of two ranks' buffers still holds."""
    firsts: list[dict[str, int]] = []
    for order in orders:
        first: dict[str, int] = {}
        for one in order:
            first.setdefault(one.group, one.seq or 0)
        firsts.append(first)
    return [
        [one for one in order if all((one.seq or 0) >= first.get(one.group, 0) for first in firsts)] for order in orders
    ]


def _name(one: Issued) -> tuple[str, int | None, str]:
    return one.group, one.seq, kind_of(one)


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
