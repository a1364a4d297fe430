"""Who waits for whom (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.collective import EQUALLY_SIZED, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.hangs.progress import Group
    from paro_advise.trace_parsers.dumps.rank_dump import Issued

# None of the ranks can finish these before all have issued them.
_GATHERS = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})
# In names of gathers and scatters whose ranks hold equal parts of one tensor (torch, distributed_c10d.py).
_ONE_TENSOR = ("base", "tensor")
_OF_ALL = frozenset({Op.ALL_REDUCE, Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.BARRIER})


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingCollective:
    """A collective, or a transfer, that ranks wait in, and for whom.

    Attributes:
        group: its process group.
        issued: as one of them issued it.
        waiting: have issued it, and have not finished it.
        absent: never issued it.
        behind: are stuck in an earlier one of the group.
        gone: left no dump.
    """

    group: Group
    issued: Issued
    waiting: frozenset[int]
    absent: frozenset[int] = frozenset()
    behind: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()

    @property
    def awaited(self) -> frozenset[int]:
        """Return for whom they wait."""
        return self.absent | self.behind | self.gone


def pending_collectives(group: Group, *, tells_begins: bool = False) -> list[PendingCollective]:
    """Return what the members of a group wait in, the earliest for each of them.

    Args:
        group: with the progress of its members.
        tells_begins: the dumps tell what has begun on devices. Who has issued a collective that has not begun is held
            by something before it, and those in which it has begun wait for that rank.
    """
    firsts = sorted({one.first_pending for one in group.members.values() if one.first_pending is not None})
    gone = frozenset(group.ranks) - group.members.keys()
    found = []
    for seq in firsts:
        waiting = frozenset(rank for rank, one in group.members.items() if one.first_pending == seq)
        others = {rank: one for rank, one in group.members.items() if rank not in waiting}
        absent = frozenset(rank for rank, one in others.items() if one.lacks(seq))
        behind = frozenset(
            rank for rank, one in others.items() if one.first_pending is not None and one.first_pending < seq
        )
        if tells_begins:
            begun = frozenset(rank for rank in waiting if group.members[rank].issued[seq].has_begun)
            behind, waiting = behind | (waiting - begun), begun
            if not begun:
                continue
        issued = group.members[min(waiting)].issued[seq]
        entry = PendingCollective(
            group=group, issued=issued, waiting=waiting, absent=absent, behind=behind - absent, gone=gone
        )
        found.append(entry)
    return found + _failures(group) + _transfers(group)


def _failures(group: Group) -> list[PendingCollective]:
    """Return collectives that are done on some ranks though others never issued them: they ended with an error there.

    gloo's recorder shows no more of it than that.
    """
    found = []
    for seq in sorted({one.enqueued + 1 for one in group.members.values() if one.enqueued is not None}):
        ended = frozenset(
            rank
            for rank, one in group.members.items()
            if seq in one.issued and one.issued[seq].is_done and one.issued[seq].op in _OF_ALL
        )
        late = {rank for rank, one in group.members.items() if one.enqueued is not None and one.enqueued < seq}
        if ended and late:
            issued = group.members[min(ended)].issued[seq]
            gone = frozenset(group.ranks) - group.members.keys()
            found.append(
                PendingCollective(group=group, issued=issued, waiting=ended, absent=frozenset(late), gone=gone)
            )
    return found


def _transfers(group: Group) -> list[PendingCollective]:
    """Return transfers whose other end was never issued."""
    places = {rank: place for place, rank in enumerate(group.ranks)}
    found = []
    for rank, pending in group.transfers.items():
        for one in pending:
            if one.peer is None or one.peer >= len(group.ranks):
                continue
            other, wanted = group.ranks[one.peer], Op.RECV if one.op == Op.SEND else Op.SEND
            mine = frozenset({rank})
            if other not in group.members:
                found.append(PendingCollective(group=group, issued=one, waiting=mine, gone=frozenset({other})))
            elif not any(back.op == wanted and back.peer == places[rank] for back in group.transfers[other]):
                found.append(PendingCollective(group=group, issued=one, waiting=mine, absent=frozenset({other})))
    return found


def matched_transfers(groups: Sequence[Group], *, tells_begins: bool = False) -> dict[int, set[int]]:
    """Return, by rank, with whom it has transfers under way that both have issued: neither can be told to be late.

    Args:
        groups: with what each rank has not finished.
        tells_begins: the dumps tell what has begun on devices; nobody waits in a transfer that has not.
    """
    found: dict[int, set[int]] = {}
    for group in groups:
        places = {rank: place for place, rank in enumerate(group.ranks)}
        for rank, pending in group.transfers.items():
            for one in pending:
                if tells_begins and not one.has_begun:
                    continue
                other = group.ranks[one.peer] if one.peer is not None and one.peer < len(group.ranks) else None
                backs = group.transfers.get(other, []) if other is not None else []
                if other is not None and any(back.peer == places[rank] and back.op != one.op for back in backs):
                    found.setdefault(rank, set()).add(other)
    return found


def stuck_alone(group: Group) -> dict[int, Issued]:
    """Return the ranks that have not finished what another one of the group has: their devices are stuck."""
    found = {}
    for rank, one in group.members.items():
        seq = one.first_pending
        if seq is not None and any(other.has_done(seq) for name, other in group.members.items() if name != rank):
            found[rank] = one.issued[seq]
    return found


def first_mismatch(group: Group) -> tuple[int, dict[str, list[int]]] | None:
    """Return the earliest number under which ranks issued different collectives, and who issued which."""
    numbers = sorted({seq for one in group.members.values() for seq in one.issued})
    for seq in numbers:
        issued = {rank: one.issued[seq] for rank, one in group.members.items() if seq in one.issued}
        if len(issued) < 2 or all(one.is_done for one in issued.values()):
            continue
        by_kind: dict[str, list[int]] = {}
        # Dumps tell bytes, logs elements.
        is_told_alike = len({one.bytes is None for one in issued.values()}) == 1
        for rank, one in sorted(issued.items()):
            by_kind.setdefault(kind_of(one) if is_told_alike else one.name, []).append(rank)
        if len(by_kind) > 1:
            return seq, by_kind
    return None


def kind_of(issued: Issued) -> str:
    """Return what all ranks of a group issue alike: the operation, and its size where that is equal on all."""
    # Gathers and scatters of one tensor (`_allgather_base`, `..._into_tensor`) are, those of lists need not be.
    is_of_one_tensor = issued.op in _GATHERS and any(part in issued.name.lower() for part in _ONE_TENSOR)
    if issued.op not in EQUALLY_SIZED and not is_of_one_tensor:
        return issued.name
    if issued.bytes is not None:
        return f"{issued.name} of {issued.bytes} B"
    return issued.name if issued.elements is None else f"{issued.name} of {issued.elements} elements"


def in_cycles(awaited: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that wait, over others, for each other.

    Args:
        awaited: by rank, for whom it waits.
    """
    left = set(awaited)
    while True:
        needed = {other for rank in left for other in awaited[rank]}
        kept = {rank for rank in left if rank in needed and awaited[rank] & left}
        if kept == left:
            return left
        left = kept
