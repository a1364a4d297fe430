"""How far each rank has come in each process group (pure)."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import number_ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump

# The group of all ranks, by torch's own names.
_DEFAULT = ("default_pg", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """A rank in a group.

    Attributes:
        issued: collectives that its dump still holds, by number.
        first_pending: the earliest of them that is not done; None for none.
        enqueued: the last number that it has issued, None where that is unknown.
        completed: the last that it counts as finished, likewise.
    """

    issued: Mapping[int, Issued]
    first_pending: int | None
    enqueued: int | None
    completed: int | None = None

    def lacks(self, seq: int) -> bool:
        """Tell whether it never issued a collective: nothing shows that it did."""
        return seq not in self.issued and (self.enqueued is None or self.enqueued < seq)

    def has_done(self, seq: int) -> bool:
        """Tell whether it has finished a collective."""
        if self.lacks(seq) or (self.first_pending is not None and self.first_pending <= seq):
            return False
        # What lies behind the last one that the dump holds was issued, as its counter says, and no more is known.
        return seq <= max([*self.issued, *([] if self.completed is None else [self.completed])], default=-1)


@dataclass(slots=True, kw_only=True)
class Group:
    """A process group.

    Attributes:
        name, description: as in the dumps.
        ranks: of the job, in the group's order.
        members: how far each is that left a dump.
        transfers: what each has not finished of transfers between two ranks.
    """

    name: str
    description: str
    ranks: tuple[int, ...]
    members: dict[int, RankProgress] = field(default_factory=dict)
    transfers: dict[int, list[Issued]] = field(default_factory=dict)


def groups_of(dumps: Mapping[int, RankDump]) -> list[Group]:
    """Return all groups that the dumps show, each with the progress of its members.

    Args:
        dumps: by rank.
    """
    listed: dict[str, tuple[str, tuple[int, ...]]] = {}
    shown: defaultdict[str, set[int]] = defaultdict(set)
    for dump in dumps.values():
        for one in dump.groups:
            if one.ranks:
                listed.setdefault(one.name, (one.description, one.ranks))
    for rank, dump in dumps.items():
        for issued in dump.issued:
            shown[issued.group].add(rank)
            listed.setdefault(issued.group, (issued.description, ()))
    sizes = _sizes(dumps)
    known = {*dumps, *(rank for _, ranks in listed.values() for rank in ranks)}
    world_size = max([max(known, default=-1) + 1, *(size for name, size in sizes.items() if name == _DEFAULT[1])])
    everyone = tuple(range(world_size))
    unseen = tuple(rank for rank in everyone if rank not in dumps)
    found = []
    for name, (description, ranks) in sorted(listed.items()):
        is_default = description == _DEFAULT[0] or name == _DEFAULT[1]
        members = ranks or (everyone if is_default else tuple(sorted(shown[name])))
        if unseen and sizes.get(name, 0) == len(members) + len(unseen):
            members = tuple(sorted((*members, *unseen)))
        group = Group(name=name, description=description, ranks=members)
        identity = _identity(name, [dumps[rank] for rank in members if rank in dumps])
        for rank in members:
            if rank in dumps:
                group.members[rank] = _progress(dumps[rank], name, identity)
                pending = [one for one in dumps[rank].issued if one.group == name and one.peer is not None]
                group.transfers[rank] = [one for one in pending if not one.is_done]
        found.append(group)
    return found


def with_own_names(dumps: Mapping[int, RankDump]) -> dict[int, RankDump]:
    """Return dumps in which no two groups have one name: torch may name groups of different ranks alike.

    A rank that does not list the ranks of such a group tells nothing of it.
    """
    listed: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
    for dump in dumps.values():
        for group in dump.groups:
            if group.ranks:
                listed[group.name].add(group.ranks)
    shared = {name for name, ranks in listed.items() if len(ranks) > 1}
    return {rank: _rename_groups(dump, shared) for rank, dump in dumps.items()} if shared else dict(dumps)


def _rename_groups(dump: RankDump, shared: Collection[str]) -> RankDump:
    names = {
        group.name: f"{group.name} of ranks {number_ranges(group.ranks)}" if group.ranks else ""
        for group in dump.groups
        if group.name in shared
    }
    kept = [one for one in dump.issued if one.group not in shared or names.get(one.group)]
    return replace(
        dump,
        groups=tuple(replace(one, name=names.get(one.name) or one.name) for one in dump.groups),
        issued=tuple(replace(one, group=names.get(one.group, one.group)) for one in kept),
        group_ids={names.get(name, name): identity for name, identity in dump.group_ids.items()},
    )


def _sizes(dumps: Mapping[int, RankDump]) -> dict[str, int]:
    """Return the size of each group as its gathers and scatters tell it."""
    found: dict[str, int] = {}
    for dump in dumps.values():
        for one in dump.issued:
            if one.group_size is not None:
                found[one.group] = max(found.get(one.group, 0), one.group_size)
    return found


def _identity(name: str, members: Sequence[RankDump]) -> str | None:
    """Return the id of a group on its ranks; None where they differ, or none tells."""
    ids = Counter(dump.group_ids[name] for dump in members if name in dump.group_ids)
    return next(iter(ids)) if len(ids) == 1 else None


def _progress(dump: RankDump, name: str, identity: str | None) -> RankProgress:
    issued = {one.seq: one for one in dump.issued if one.group == name and one.peer is None and one.seq is not None}
    pending = [seq for seq, one in issued.items() if not one.is_done]
    own = dump.group_ids.get(name, identity)
    counted = dump.enqueued.get(own) if own is not None else None
    known = [*issued, *([counted] if counted is not None else [])]
    return RankProgress(
        issued=issued,
        first_pending=min(pending, default=None),
        enqueued=max(known, default=None),
        completed=dump.completed.get(own) if own is not None else None,
    )
