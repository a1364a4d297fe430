"""What the watchdog of PyTorch's NCCL groups writes into a job's log when a collective times out.

Two lines tell how far a rank has come in a group; as torch 2.3 and newer write them in ``ProcessGroupNCCL.cpp``:

* ``[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=8, ...``
* ``[PG ID 1 PG GUID 2(pair) Rank 1] ... at work: 7, last enqueued NCCL work: 9, last completed NCCL work: 6.``

The rank in brackets is that of the group; which rank of the job it is, torch's own prefix ``[rank3]:`` tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.constants import MAX_GROUPS, MAX_RANK
from paro_advise.trace_parsers.dumps.rank_dump import Issued, RankDump
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.tables import ProcessGroup
from paro_advise.trace_parsers.values import bounded_text

if TYPE_CHECKING:
    from paro_advise.core.collective import Op
    from paro_advise.trace_parsers.bytes.readable import Readable

_RANK = re.compile(r"\[rank(\d{1,7})\]:")
_GROUP_RANK = re.compile(r"\[(?:PG [^\]]{0,200} )?Rank (\d{1,7})\]")
_TIMEOUT = re.compile(
    r"collective operation timeout: WorkNCCL\(SeqNum=(\d{1,15}), OpType=(\w{1,40})(?:, NumelIn=(\d{1,15}))?"
)
_COUNTERS = re.compile(
    r"\[PG (?:ID \d{1,7} PG GUID (?P<guid>[^\s(]{1,80})(?:\((?P<description>[^)]{0,80})\))?|(?P<id>\d{1,7})) "
    r"Rank \d{1,7}\]"
    r".{0,600}?last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,19}), "
    r"last completed (?:NCCL )?work: (?P<completed>-?\d{1,19})",
    re.IGNORECASE,
)
# As the flight recorder names them; what is not listed is named as the watchdog does, in small letters.
_NAMES = {
    "ALLREDUCE": "all_reduce", "_ALLGATHER_BASE": "_all_gather_base", "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLGATHER": "all_gather", "ALLTOALL": "all_to_all", "ALLTOALL_BASE": "all_to_all",
}  # fmt: skip
_TRANSFERS = frozenset({"SEND", "RECV", "COALESCED", "UNKNOWN"})  # counted apart, or of unknown ranks


@dataclass(slots=True)
class _Seen:
    """What the lines tell: by rank and number, what timed out; by rank and group, how far the rank has come."""

    timeouts: dict[tuple[int, int], tuple[str, Op, int | None]] = field(default_factory=dict)
    counters: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    descriptions: dict[str, str] = field(default_factory=dict)


def read_watchdog(data: Readable, path: str) -> list[RankDump]:
    """Return what a log tells of each rank, as a dump of it would; [] where it holds no such lines."""
    seen = _Seen()
    for line in data.lines():
        if "NCCL" in line:
            _feed(seen, line)
    members: dict[str, list[int]] = {}
    for rank, group in sorted(seen.counters):
        members.setdefault(group, []).append(rank)
    return [_dump(rank, seen, members, path) for rank in sorted({rank for rank, _ in seen.counters})]


def _feed(seen: _Seen, line: str) -> None:
    named = _RANK.search(line) or _GROUP_RANK.search(line)
    rank = int(named[1]) if named else MAX_RANK + 1
    if rank > MAX_RANK:
        return
    if (timeout := _TIMEOUT.search(line)) is not None and timeout[2] not in _TRANSFERS:
        name = _NAMES.get(timeout[2], timeout[2].lower())
        elements = int(timeout[3]) if timeout[3] else None
        seen.timeouts.setdefault((rank, int(timeout[1])), (name, op_of_name(timeout[2]), elements))
    if (counters := _COUNTERS.search(line)) is not None:
        group = bounded_text(counters["guid"] or counters["id"])
        pair = int(counters["enqueued"]), int(counters["completed"])
        # A completed number beyond the enqueued one was never set.
        if len(seen.counters) < MAX_GROUPS and pair[1] <= pair[0]:
            seen.counters.setdefault((rank, group), pair)  # what comes after it, the abort has changed
            seen.descriptions.setdefault(group, bounded_text(counters["description"] or ""))


def _dump(rank: int, seen: _Seen, members: dict[str, list[int]], path: str) -> RankDump:
    counted = {group: pair for (other, group), pair in seen.counters.items() if other == rank}
    issued = []
    for group, (enqueued, completed) in sorted(counted.items()):
        number = completed + 1
        known = [seen.timeouts.get((other, number)) for other in (rank, *members[group])]
        if enqueued > completed and (first := next((one for one in known if one), None)) is not None:
            issued.append(_issued(group, seen.descriptions[group], number, *first))
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
    known = () if name == "0" or description == "default_pg" else tuple(ranks)
    return ProcessGroup(name=name, description=description, ranks=known, size=len(known))


def _issued(group: str, description: str, number: int, name: str, op: Op, elements: int | None) -> Issued:
    return Issued(
        group=group,
        description=description,
        seq=number,
        name=name,
        op=op,
        peer=None,
        bytes=None,
        dtype="",
        group_size=None,
        owner="",
        is_backward=False,
        is_done=False,
        created_ns=0,
        elements=elements,
    )
