"""From the dumps of all ranks to who is likely at fault (pure).

A rank is at fault if others wait for it and it waits for nobody and in nothing. Waiting is a graph: from a rank that
has issued a collective and has not finished it, to the ranks of the group that never issued it or are stuck in an
earlier one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paro_advise.advisor.hangs.model import FORMAT, Cause, Culprit, Hang, Mismatch, Wait
from paro_advise.advisor.hangs.programs import deviation, deviation_in_cycle
from paro_advise.advisor.hangs.progress import groups_of, with_own_names
from paro_advise.advisor.hangs.sentences import collective_text, doubt_text, group_text, issued_text, verdict_text
from paro_advise.advisor.hangs.waits import (
    first_mismatch,
    in_cycles,
    matched_transfers,
    pending_collectives,
    stuck_alone,
)
from paro_advise.advisor.hangs.words import named_ranks, verb

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from paro_advise.advisor.hangs.programs import Deviation
    from paro_advise.advisor.hangs.progress import Group
    from paro_advise.advisor.hangs.waits import PendingCollective
    from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump


def diagnose(dumps: Mapping[int, RankDump], unread: Collection[int] = ()) -> Hang:
    """Return who waits for whom, and who is at fault.

    Args:
        dumps: by rank of the job.
        unread: ranks whose dumps are there and cannot be read: they lived to write them, and did nobody knows what.
    """
    unread = set(unread) - dumps.keys()
    dumps = with_own_names(dumps)
    groups = groups_of(dumps)
    tells_begins = any(one.has_begun and not one.is_done for dump in dumps.values() for one in dump.issued)
    pending = [entry for group in groups for entry in pending_collectives(group, tells_begins=tells_begins)]
    mismatches = [(group, *found) for group in groups if (found := first_mismatch(group)) is not None]
    late = [(issued.created_ns, rank, group, issued) for group in groups for rank, issued in stuck_alone(group).items()]
    # The earliest of each rank stands last.
    ordered = sorted(late, key=lambda one: one[:2], reverse=True)
    stuck = {rank: (group, issued) for _, rank, group, issued in ordered}
    awaited = _find_awaited(pending, matched_transfers(groups, tells_begins=tells_begins))
    left = deviation(dumps, groups)
    culprits = [_deviating(left, dumps)] if left is not None else _of_mismatches(mismatches, dumps)
    circle: set[int] = set()
    unread_ends: set[int] = set()
    late_or_victims: list[Culprit] = []
    if not mismatches and left is None:
        ends = {other for others in awaited.values() for other in others if not awaited.get(other)}
        # What is waited in and nobody is known to be late for, something else holds up: a network, a rank unknown.
        unexplained = {rank for entry in pending if not entry.awaited for rank in entry.waiting} - stuck.keys()
        if ends & unexplained:
            ends = set()
        ends = {rank for rank in ends if rank in stuck or not _contradicts_its_waiters(rank, pending, groups)}
        unread_ends = ends & unread
        suspects = [_culprit(rank, pending, stuck, dumps) for rank in sorted(ends - unread)]
        culprits = _without_victims(suspects, groups, dumps.keys() | unread, dumps)
        late_or_victims = [one for one in suspects if one.cause == Cause.HOST and one not in culprits]
        if not culprits and not awaited:
            culprits = [_culprit(rank, pending, stuck, dumps) for rank in sorted(stuck)]
        circle = in_cycles(awaited) if not culprits and not unexplained else set()
        if circle and (odd := deviation_in_cycle(dumps, circle)) is not None:
            culprits = [_deviating(odd, dumps)]
    alone = _alone(culprits, pending)
    unseen = [one.rank for one in culprits if one.cause == Cause.GONE]
    unknown = sorted({*unseen, *unread_ends})
    is_part = bool(unseen) and _are_rather_missing(unknown, dumps)
    # One rank that died takes others with it; several of which nothing is here may as well be left out by whoever asks,
    # and so may one where another rank waits in nothing and is stuck.
    doubtful = late_or_victims if len(unseen) == len(culprits) > 1 else []
    if len(unseen) == len(culprits) == 1:
        waiting = {rank for entry in pending for rank in entry.waiting}
        doubtful = [one for one in late_or_victims if _stands_alone(dumps[one.rank], waiting, groups)]
    if alone is not None or is_part or doubtful:
        culprits = []
    # What others have finished, all ranks had begun; a broadcast's root may finish first.
    are_silent = is_part or (bool(unseen) and len(unseen) == len(culprits))
    if are_silent and _are_logs(dumps) and 0 < 2 * len(stuck) < len(dumps):
        culprits, is_part = [_culprit(rank, pending, stuck, dumps) for rank in sorted(stuck)], False
    missing = tuple(sorted({rank for group in groups for rank in group.ranks} - dumps.keys()))
    text = verdict_text(culprits, mismatches, circle, pending, alone, unknown if is_part else (), missing)
    text = doubt_text(doubtful, unseen) if doubtful else text
    also = f" The {'dump' if len(unread) == 1 else 'dumps'} of {named_ranks(unread)} cannot be read." if unread else ""
    return Hang(
        format=FORMAT.name,
        format_version=FORMAT.version,
        text=text + also,
        culprits=tuple(culprits),
        ranks=tuple(sorted(dumps)),
        ranks_missing=missing,
        waits=tuple(_wait(entry) for entry in pending),
        mismatches=tuple(_mismatch(*found) for found in mismatches),
        circle=tuple(sorted(circle)),
    )


def _are_rather_missing(unknown: Sequence[int], dumps: Mapping[int, RankDump]) -> bool:
    """Tell whether ranks are rather left out of what was given than gone: so many hardly are.

    In a log, ranks are also silent if the launcher ended them before their own wait was over, or if it was cut.
    """
    if _are_logs(dumps):
        return len(unknown) > 1 or len(dumps) == 1
    return len(unknown) > 1 and len(unknown) >= len(dumps)


def _are_logs(dumps: Mapping[int, RankDump]) -> bool:
    return all(dump.is_log for dump in dumps.values())


def _find_awaited(pending: Sequence[PendingCollective], transfers: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """Return, by rank that waits for some, for whom.

    Args:
        pending: what ranks wait in.
        transfers: with whom each has some under way that both have issued.
    """
    found: dict[int, set[int]] = {}
    for entry in pending:
        for rank in entry.waiting if entry.awaited else ():
            found.setdefault(rank, set()).update(entry.awaited)
    # A transfer that both ends have issued blames neither, but who is in one with a rank that is waited for may wait
    # for that one.
    blamed = {other for others in found.values() for other in others}
    for rank, others in transfers.items():
        if others & blamed:
            found.setdefault(rank, set()).update(others & blamed)
    return found


def _culprit(
    rank: int,
    pending: Sequence[PendingCollective],
    stuck: Mapping[int, tuple[Group, Issued]],
    dumps: Mapping[int, RankDump],
) -> Culprit:
    mine = [entry for entry in pending if rank in entry.awaited]
    waiting = {other for entry in mine for other in entry.waiting}
    if rank not in dumps:
        why = f"left no dump here, and {named_ranks(waiting)} {verb(waiting)} for it: it died, or its dump is elsewhere"
        if any(dump.is_log for dump in dumps.values()):
            what = collective_text(mine[0].group, mine[0].issued)
            why = (
                f"wrote no line of its watchdog here, and {named_ranks(waiting)} {verb(waiting)} for it in {what}: it "
                "never issued it, died, or wrote elsewhere"
            )
        return Culprit(rank=rank, cause=Cause.GONE, why=why, last="")
    last = max(dumps[rank].issued, key=lambda one: one.created_ns, default=None)
    shown = issued_text(last) if last is not None else ""
    if rank in stuck:
        group, issued = stuck[rank]
        seq = issued.seq or 0
        done = [other for other, one in group.members.items() if other != rank and one.has_done(seq)]
        have = "has" if len(done) == 1 else "have"
        why = f"has a device that has not finished {collective_text(group, issued)}, which {named_ranks(done)} {have}"
        return Culprit(rank=rank, cause=Cause.DEVICE, why=why, last=shown)
    never = [entry for entry in mine if rank in entry.absent]
    if never:
        entry = min(never, key=lambda one: one.issued.created_ns)
        what = collective_text(entry.group, entry.issued)
        what = what if entry.issued.peer is None else f"its end of {what}"
        why = f"never issued {what}, in which {named_ranks(entry.waiting)} {verb(entry.waiting)}"
        return Culprit(rank=rank, cause=Cause.HOST, why=why, last=shown)
    entry = mine[0]
    own = entry.group.members[rank]
    first = own.issued[own.first_pending] if own.first_pending is not None else entry.issued
    if first.seq == entry.issued.seq:
        what = collective_text(entry.group, first)
        why = f"has a device that has not begun {what}, in which {named_ranks(waiting)} {verb(waiting)}"
        return Culprit(rank=rank, cause=Cause.DEVICE, why=why, last=shown)
    why = (
        f"has a device that has not finished {collective_text(entry.group, first)}, and {named_ranks(waiting)} "
        f"{verb(waiting)} in later ones"
    )
    return Culprit(rank=rank, cause=Cause.DEVICE, why=why, last=shown)


def _alone(culprits: Sequence[Culprit], pending: Sequence[PendingCollective]) -> PendingCollective | None:
    """Return what fewer ranks wait in than never issued it, where nothing else speaks against these."""
    blamed = {one.rank for one in culprits}
    if any(one.cause != Cause.HOST for one in culprits):
        return None
    few = [entry for entry in pending if len(entry.waiting) < len(entry.absent) and entry.absent <= blamed]
    return next(iter(few), None)


def _without_victims(
    culprits: list[Culprit], groups: Sequence[Group], alive: Collection[int], dumps: Mapping[int, RankDump]
) -> list[Culprit]:
    """Leave out ranks that may only be late, or have ended with an error, because of another one.

    An error, where one without a dump, of their last group, died.
    """
    members = {group.name: set(group.ranks) for group in groups}
    # Also where nothing shows that others wait for it: gloo's recorder leaves reduce-scatters out.
    gone = {rank for ranks in members.values() for rank in ranks}.difference(alive)

    def may_be_victim(one: Culprit) -> bool:
        issued = dumps[one.rank].issued if one.cause == Cause.HOST else ()
        return bool(issued) and bool(gone & members[max(issued, key=lambda each: each.created_ns).group])

    left = [one for one in culprits if not may_be_victim(one)]
    # Who has come further than another one in a group of both may wait for it in what no dump shows.
    return [
        one
        for one in left
        if one.cause != Cause.HOST or not any(_is_ahead(one.rank, other.rank, groups) for other in left)
    ]


def _contradicts_its_waiters(rank: int, pending: Sequence[PendingCollective], groups: Sequence[Group]) -> bool:
    """Tell whether a rank has come further, in any group, than one that waits for it.

    Where all run one program in one order, who is waited for is ahead of its waiters in nothing.
    """
    waiters = {other for entry in pending if rank in entry.absent for other in entry.waiting}
    for group in groups:
        mine = group.members[rank].enqueued if rank in group.members else None
        for other in waiters & group.members.keys():
            theirs = group.members[other].enqueued
            if mine is not None and theirs is not None and mine > theirs:
                return True
    return False


def _stands_alone(dump: RankDump, waiting: Collection[int], groups: Sequence[Group]) -> bool:
    """Tell whether all that a rank has issued is done, and others of its last group have gone on to wait.

    What ended it, had it been another one's death, would have ended them; gloo, which lists no groups, ends some first.
    """
    if not dump.groups or not dump.issued or not all(issued.is_done for issued in dump.issued):
        return False
    last = max(dump.issued, key=lambda each: each.created_ns).group
    return any(group.name == last and set(group.ranks) & set(waiting) for group in groups)


def _is_ahead(rank: int, other: int, groups: Sequence[Group]) -> bool:
    """Tell whether a rank has issued more than another one in a group of both, and in none of them less."""
    shared = [group.members for group in groups if rank in group.members and other in group.members]
    pairs = [(members[rank].enqueued, members[other].enqueued) for members in shared]
    steps = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
    return any(step > 0 for step in steps) and all(step >= 0 for step in steps)


def _of_mismatches(
    mismatches: Sequence[tuple[Group, int, dict[str, list[int]]]], dumps: Mapping[int, RankDump]
) -> list[Culprit]:
    """Return the ranks that issued something else than most of their group did."""
    found: dict[int, Culprit] = {}
    for group, seq, kinds in mismatches:
        most = max(kinds.values(), key=len)
        if 2 * len(most) <= sum(map(len, kinds.values())):
            continue
        usual = next(kind for kind, ranks in kinds.items() if ranks is most)
        for kind, ranks in kinds.items():
            for rank in ranks if ranks is not most else ():
                last = max(dumps[rank].issued, key=lambda one: one.created_ns)
                why = f"issued {kind} as number {seq} of {group_text(group)}, where {named_ranks(most)} issued {usual}"
                found.setdefault(rank, Culprit(rank=rank, cause=Cause.MISMATCH, why=why, last=issued_text(last)))
    return [found[rank] for rank in sorted(found)]


def _deviating(left: Deviation, dumps: Mapping[int, RankDump]) -> Culprit:
    """Return the rank that left the program that the others run."""
    before = ["its own steps before"] if left.is_by_history else []
    who = " and ".join([named_ranks(left.others)] * bool(left.others) + before)
    expected = left.usual if left.others else replace(left.usual, seq=None)
    texts = [issued_text(one) for one in (left.issued, expected)]
    if texts[0] == texts[1]:
        texts = [issued_text(one, is_exact=True) for one in (left.issued, expected)]
    issued, usual = texts
    why = f"issued {issued} of group {left.issued.group} where {who} issued {usual} of group {left.usual.group}"
    last = max(dumps[left.rank].issued, key=lambda one: one.created_ns)
    return Culprit(rank=left.rank, cause=Cause.MISMATCH, why=why, last=issued_text(last))


def _mismatch(group: Group, seq: int, kinds: dict[str, list[int]]) -> Mismatch:
    issued = {kind: tuple(ranks) for kind, ranks in kinds.items()}
    return Mismatch(group=group.name, description=group.description, seq=seq, issued=issued)


def _wait(entry: PendingCollective) -> Wait:
    return Wait(
        group=entry.group.name,
        description=entry.group.description,
        ranks=entry.group.ranks,
        seq=entry.issued.seq or 0,
        operation=issued_text(entry.issued),
        waiting=tuple(sorted(entry.waiting)),
        absent=tuple(sorted(entry.absent)),
        behind=tuple(sorted(entry.behind)),
        without_dump=tuple(sorted(entry.gone)),
    )
