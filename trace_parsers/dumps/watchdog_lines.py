"""What the watchdog of PyTorch's NCCL groups writes into a job's log when a collective times out.

Two lines tell how far a rank has come in a group; as torch 2.3 and newer write them in ``ProcessGroupNCCL.cpp``:

* ``[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, ...``
* ``[PG ID 1 PG GUID 2(pair) Rank 1] ... at work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6.``
  (torch 2.4: ``[PG 2 (pair) Rank 1]``; torch 2.3: ``[PG 2 Rank 1]``)

The rank in brackets is that of the group; which rank of the job it is, torch's own prefix ``[rank3]:`` tells. Ranks
that waited for nothing have no such lines: how many there are, NCCL's own lines tell where ``NCCL_DEBUG=INFO`` was set
(``... rank 3 nranks 8 cudaDev 3 ...``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.errors import InputError
from paro_advise.trace_parsers.constants import MAX_GROUPS, MAX_RANK
from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.tables import ProcessGroup
from paro_advise.trace_parsers.values import bounded_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable

_RANK = re.compile(r"\[rank(\d{1,7})\]:")
_GROUP_RANK = re.compile(r"\[(?:PG [^\]]{0,200} )?Rank (\d{1,7})\]")
_TIMEOUT = re.compile(
    r"collective operation timeout: WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}))?"
    r"(?:, NumelOut=(\d{1,15}))?"
)
_COUNTERS = re.compile(
    r"\[PG (?:ID \d{1,7} PG GUID (?P<guid>[^\s(]{1,80})(?:\((?P<description>[^)]{0,80})\))?"
    r"|(?P<id>\d{1,7})(?: \((?P<name>[^)]{0,80})\))?) "
    r"Rank (?P<place>\d{1,7})\]"
    r".{0,600}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,19}),.{0,80}? "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,19})",
    re.IGNORECASE,
)
# Of a communicator, of which the largest is the job's or a part of it.
_RANKS = re.compile(r"NCCL INFO .{0,400}? nranks (\d{1,7})\b")
# As the flight recorder names them; what is not listed is named as the watchdog does, in small letters.
_NAMES = {
    "ALLREDUCE": "all_reduce", "_ALLGATHER_BASE": "_all_gather_base", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLGATHER": "all_gather", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
_TRANSFERS = frozenset({"SEND", "RECV", "COALESCED", "UNKNOWN"})  # counted apart, or of unknown ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """What timed out.

    Attributes:
        number: counted by the group.
        name: as the flight recorder names it.
        elements: of the rank's input.
        ranks: of the group, as a gather's or a scatter's two buffers tell; None where they do not.
    """

    number: int
    name: str
    op: Op
    elements: int | None
    ranks: int | None = None


@dataclass(slots=True)
class _Seen:
    """What the lines tell, by rank and group; a rank's time-out comes before the counters of its group.

    Attributes:
        counters: numbers last enqueued and last completed.
        operations: what timed out.
        places: ranks of the group.
        last: a rank's time-out without its group yet.
        descriptions: of groups.
        sizes: of the communicators that were made.
    """

    counters: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    operations: dict[tuple[int, str], _Operation] = field(default_factory=dict)
    places: dict[tuple[int, str], int] = field(default_factory=dict)
    last: dict[int, _Operation] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)
    sizes: set[int] = field(default_factory=set)

    @property
    def world_size(self) -> int:
        """Return how many ranks there are at least, 0 for unknown.

        Where a job was started again on fewer ranks, both sizes stand there; groups of a job divide it, as a rule.
        """
        most = max(self.sizes, default=0)
        return most if all(most % size == 0 for size in self.sizes) else 0


def read_watchdog(data: Readable, path: str) -> list[RankDump]:
    """Return what a log tells of each rank, as a dump of it would; [] where it holds no such lines.

    Raises:
        InputError: the log is of several runs.
    """
    seen = _Seen()
    for line in data.lines():
        if "NCCL" in line or "last completed" in line:
            _feed(seen, line, path)
    members: dict[str, list[int]] = {}
    for rank, group in sorted(seen.counters):
        members.setdefault(group, []).append(rank)
    # Two ranks of the job that are one rank of a group are in two groups of one name.
    for group, ranks in list(members.items()):
        if len({seen.places[rank, group] for rank in ranks}) < len(ranks):
            del members[group]
    told = sorted({rank for rank, group in seen.counters if group in members})
    return [_dump(rank, seen, members, path) for rank in told]


def _feed(seen: _Seen, line: str, path: str) -> None:
    if (size := _RANKS.search(line)) is not None and 0 < int(size[1]) <= MAX_RANK and len(seen.sizes) < MAX_GROUPS:
        seen.sizes.add(int(size[1]))
    named = _RANK.search(line)
    counters = _COUNTERS.search(line)
    group = bounded_text(counters["guid"] or counters["id"]) if counters is not None else "0"
    # Without torch's prefix a rank is known as one of its group only.
    place = _GROUP_RANK.search(line) if group == "0" else None
    rank = int(named[1]) if named else int(place[1]) if place else MAX_RANK + 1
    if rank > MAX_RANK:
        return
    if (timeout := _TIMEOUT.search(line)) is not None and timeout[2] not in _TRANSFERS:
        seen.last[rank] = _Operation(
            number=int(timeout[1]),
            name=_NAMES.get(timeout[2], timeout[2].lower()),
            op=op_of_name(timeout[2]),
            elements=int(timeout[3]) if timeout[3] else None,
            ranks=_ranks_of(op_of_name(timeout[2]), int(timeout[3] or 0), int(timeout[4] or 0)),
        )
    if counters is None or len(seen.counters) >= MAX_GROUPS:
        return
    pair = int(counters["enqueued"]), int(counters["completed"])
    if pair[1] > pair[0]:  # never set
        return
    known = seen.counters.setdefault((rank, group), pair)  # what comes after it, the abort has changed
    if pair[1] > known[0] or pair[1] < known[1]:
        raise InputError(
            "a log must be of one run, in this one a rank's collectives time out in several",
            where=path,
            hint="cut it to the lines of the last run",
        )
    seen.places.setdefault((rank, group), int(counters["place"]))
    seen.descriptions.setdefault(group, bounded_text(counters["description"] or counters["name"] or ""))
    if (last := seen.last.get(rank)) is not None and last.number == _next(known):
        seen.operations.setdefault((rank, group), last)


def _ranks_of(op: Op, inputs: int, outputs: int) -> int | None:
    """Return how many ranks a gather or a scatter joins by the elements of its buffers."""
    part, whole = sorted((inputs, outputs))
    if op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER) or part <= 0 or whole % part or whole == part:
        return None
    return whole // part


def _next(pair: tuple[int, int]) -> int:
    """Return the number of the first collective that is not completed: they are counted from 1 on."""
    return max(pair[1], 0) + 1


def _dump(rank: int, seen: _Seen, members: dict[str, list[int]], path: str) -> RankDump:
    counted = {group: seen.counters[rank, group] for group, ranks in members.items() if rank in ranks}
    issued = []
    for group, pair in sorted(counted.items()):
        known = [seen.operations.get((other, group)) for other in (rank, *members[group])]
        alike = [one for one in known if one is not None and one.number == _next(pair)]
        if pair[0] >= _next(pair):
            unknown = _Operation(number=_next(pair), name="collective", op=Op.UNKNOWN, elements=None)
            size = seen.world_size if _is_of_all(group, seen.descriptions[group]) else 0
            issued.append(_issued(group, seen.descriptions[group], next(iter(alike), unknown), size or None))
    return RankDump(
        path=path,
        rank=rank,
        groups=tuple(_group(group, seen.descriptions[group], members[group]) for group in sorted(counted)),
        issued=tuple(issued),
        group_ids={group: group for group in counted},
        enqueued={group: enqueued for group, (enqueued, _) in counted.items()},
        notices=(),
        is_log=True,
    )


def _group(name: str, description: str, ranks: list[int]) -> ProcessGroup:
    """Return a group of the ranks that have lines of it; of that of all ranks, no rank need have one."""
    known = () if _is_of_all(name, description) else tuple(ranks)
    return ProcessGroup(name=name, description=description, ranks=known, size=len(known))


def _is_of_all(name: str, description: str) -> bool:
    return name == "0" or description == "default_pg"


def _issued(group: str, description: str, operation: _Operation, size: int | None) -> Issued:
    return Issued(
        group=group,
        description=description,
        seq=operation.number,
        name=operation.name,
        op=operation.op,
        peer=None,
        bytes=None,
        dtype="",
        group_size=size or operation.ranks,
        owner="",
        is_backward=False,
        is_done=False,
        created_ns=0,
        elements=operation.elements,
    )
