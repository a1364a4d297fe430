"""Verdicts on a hang in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.facts.attribution import Call, Evidence, RunContext, attribute
from paro_advise.advisor.hangs.words import blame, named_ranks, verb
from paro_advise.advisor.wording.quantities import bytes_text
from paro_advise.core.model_state import MODEL_STATES
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.hangs.model import Culprit
    from paro_advise.advisor.hangs.progress import Group
    from paro_advise.advisor.hangs.waits import PendingCollective
    from paro_advise.trace_parsers.dumps.rank_dump import Issued


def verdict_text(
    culprits: Sequence[Culprit],
    mismatches: Sequence[tuple[Group, int, dict[str, list[int]]]],
    circle: set[int],
    pending: Sequence[PendingCollective],
    alone: PendingCollective | None,
    unseen: Sequence[int],
    missing: Sequence[int],
) -> str:
    """Return who is at fault, or why that cannot be told.

    Args:
        culprits: who is at fault.
        mismatches: by group, the number of its collective in which ranks differ, and what they issued.
        circle: ranks that wait for each other.
        pending: what is issued and not finished.
        alone: a collective of which nobody can tell whether it should have been issued.
        unseen: ranks without a dump, of which others that are stuck may be the victims.
        missing: ranks without a dump.
    """
    if unseen:
        return (
            f"Cannot tell who is at fault: others wait for {named_ranks(unseen)}, of which nothing is here. Give what "
            "they left too."
        )
    if alone is not None:
        return (
            f"Cannot tell who is at fault: {named_ranks(alone.waiting)} {verb(alone.waiting)} in "
            f"{collective_text(alone.group, alone.issued)}, which {named_ranks(alone.absent)} never issued: either "
            "these ranks are stuck, or that collective should not have been issued."
        )
    if culprits:
        return blame(culprits)
    if mismatches:
        group, seq, kinds = mismatches[0]
        issued = ", ".join(f"{named_ranks(ranks)} {kind}" for kind, ranks in kinds.items())
        return f"Cannot tell who is at fault: as number {seq} of {group_text(group)}, {issued} were issued."
    if circle:
        return (
            f"Cannot tell who is at fault: {named_ranks(circle)} wait for each other; they issued collectives in "
            "different orders."
        )
    return _waiting_text(pending, missing)


def _waiting_text(pending: Sequence[PendingCollective], missing: Sequence[int]) -> str:
    unawaited = [entry for entry in pending if entry.issued.peer is None and not entry.awaited]
    if unawaited:
        entry = min(unawaited, key=lambda one: one.issued.created_ns)
        seq = entry.issued.seq or 0
        done = [rank for rank, one in entry.group.members.items() if rank not in entry.waiting and one.has_done(seq)]
        if done:
            have = [("has" if len(ranks) == 1 else "have") for ranks in (entry.waiting, done)]
            return (
                f"Cannot tell who is at fault: {named_ranks(entry.waiting)} {have[0]} not finished "
                f"{collective_text(entry.group, entry.issued)}, which {named_ranks(done)} {have[1]}: a device, or a "
                "rank that left no readable dump, is stuck."
            )
        return (
            f"Cannot tell who is at fault: {named_ranks(entry.waiting)}, all that are known of "
            f"{group_text(entry.group)}, have issued {issued_text(entry.issued)}, and none has finished it: a rank "
            "without a dump, a device or the network between them is stuck."
        )
    late = [entry for entry in pending if entry.awaited]
    if late and missing:
        return (
            f"Cannot tell who is at fault: {named_ranks(late[0].waiting)} {verb(late[0].waiting)} for "
            f"{named_ranks(late[0].awaited)}; that may be because of {named_ranks(missing)}, of which nothing is here."
        )
    if late:
        return (
            f"Cannot tell who is at fault: {named_ranks(late[0].waiting)} {verb(late[0].waiting)} for "
            f"{named_ranks(late[0].awaited)}, ahead of them in another group; they did not issue the same collectives "
            "in one order."
        )
    if pending:
        return "Cannot tell who is at fault: transfers between ranks wait, which both ends have issued."
    if missing:
        return (
            "Cannot tell who is at fault: every collective in these dumps is finished. Give what "
            f"{named_ranks(missing)} left too."
        )
    return "Nothing waits: every collective in these dumps is finished."


def doubt_text(late: Sequence[Culprit], unseen: Sequence[int]) -> str:
    """Return that ranks may be late, or victims of those of which nothing is here."""
    reasons = " ".join(f"Rank {one.rank} {one.why}." for one in late)
    that = "it" if len(late) == 1 else "these"
    return (
        f"Cannot tell who is at fault: {named_ranks(one.rank for one in late)}, or {named_ranks(unseen)}, of which "
        f"nothing is here and whose end may have taken {that} along. {reasons} Give what {named_ranks(unseen)} left "
        "too."
    )


def collective_text(group: Group, issued: Issued) -> str:
    """Return a collective and its group."""
    return f"{issued_text(issued)} of {group_text(group)}"


def issued_text(issued: Issued, *, is_exact: bool = False) -> str:
    """Return "all_gather_base 39406, 40.0 MiB (parameters in backward; model.py:forward)", or with each byte."""
    size = f", {plural(issued.bytes, 'byte') if is_exact else bytes_text(issued.bytes)}" if issued.bytes else ""
    if issued.elements is not None and not is_exact:
        size = f", {plural(issued.elements, 'element')}"
    moved = _state_of_collective(issued)
    about = "; ".join(part for part in (moved, issued.owner) if part)
    number = "" if issued.seq is None else f" {issued.seq}"
    return f"{issued.name}{number}{size}" + (f" ({about})" if about else "")


def group_text(group: Group) -> str:
    """Return a group by its name, and by its description where that tells more."""
    about = f" ({group.description})" if group.description and group.description != "undefined" else ""
    return f"group {group.name}{about}"


def _state_of_collective(issued: Issued) -> str:
    """Return which model state it moves, "" where that is unknown."""
    call = Call(
        op=issued.op,
        bytes=issued.bytes,
        dtype=issued.dtype,
        group=issued.group,
        group_desc=issued.description,
        owner=issued.owner,
        phase="backward" if issued.is_backward else "",
    )
    found = attribute(call, RunContext.of([call], issued.owner))
    # The phase alone is too little for a claim about a single call.
    is_known = found.state in MODEL_STATES and found.evidence in (Evidence.STACK, Evidence.GROUP)
    return f"{found.state.value} {found.detail}".strip() if is_known else ""
