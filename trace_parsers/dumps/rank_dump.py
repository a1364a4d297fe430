"""What one rank had issued and what it had finished when its flight recorder was dumped: for jobs that hang."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.bytes.blocks import BlockReader
from paro_advise.trace_parsers.bytes.constants import MAX_PICKLE_BYTES
from paro_advise.trace_parsers.bytes.readable import Readable
from paro_advise.trace_parsers.constants import (
    MAX_DIMENSIONS,
    MAX_DUMP_ENTRIES,
    MAX_GROUPS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
)
from paro_advise.trace_parsers.dumps.flight_recorder import (
    content_of,
    counter_of,
    group_of,
    groups_of,
    owner_of,
    rank_of,
    sequence_number,
    size_of,
)
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.values import bounded_int, bounded_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.notice import Notice
    from paro_advise.trace_parsers.tables import ProcessGroup

# As torch names them: own rank in the group, then the other one's.
_TRANSFER = re.compile(r"\b(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective, or a transfer between two ranks, that a rank has issued.

    Attributes:
        group: name of its process group.
        description: of the group.
        seq: its number in the group, counted apart for transfers; None where the dump does not tell.
        name: as torch names it, without the backend.
        op: the same by its standard name.
        peer: the other rank of a transfer, as a rank of the group; None for collectives.
        bytes, dtype: of the full buffer; None and "" where unknown.
        group_size: ranks of the group, as far as the sizes of gathers and scatters tell it.
        owner: "file:function" of the script's frames, outer first.
        is_backward: issued by autograd's thread.
        is_done: finished on this rank's device.
        has_begun: begun there, as far as the recorder timed it.
        created_ns: when it was issued, since the epoch; 0 where unknown.
        elements: of this rank's buffer, where that is all that is told of its size.
    """

    group: str
    description: str
    seq: int | None
    name: str
    op: Op
    peer: int | None
    bytes: int | None
    dtype: str
    group_size: int | None
    owner: str
    is_backward: bool
    is_done: bool
    created_ns: int
    elements: int | None = None
    has_begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDump:
    """The dump of one rank.

    Attributes:
        path: of the file.
        rank: of the job; None where neither the dump nor its name tells.
        groups: that it lists; gloo lists none.
        issued: what its buffer still holds, in order.
        enqueued, completed: the last number that it has issued, and finished, by the group's id on this rank.
        notices: what was noticed while reading.
        is_log: told by the watchdog's lines in a log, which hold the first wait of each group only.
    """

    path: str
    rank: int | None
    groups: tuple[ProcessGroup, ...]
    issued: tuple[Issued, ...]
    group_ids: dict[str, str]
    enqueued: dict[str, int]
    notices: tuple[Notice, ...]
    is_log: bool = False
    completed: dict[str, int] = field(default_factory=dict)

    @property
    def newest_ns(self) -> int:
        """Return when the last of its entries was issued, since the epoch; 0 where none tells."""
        return max((one.created_ns for one in self.issued), default=0)


def read_dump(ref: SourceRef) -> RankDump:
    """Read a dump of the flight recorder.

    Raises:
        HostileInputError: the pickle would run code or is too large.
        BrokenInputError: the dump is cut or something else.
    """
    data = Readable(BlockReader(ref), MAX_TEXT_BYTES).read_all(MAX_PICKLE_BYTES)
    content = content_of(data, ref.label)
    groups = {name: group for name, group in groups_of(content.get("pg_config")).items() if name}
    notices = NoticeList()
    rank = rank_of(groups, content, ref.label, notices)
    entries = content.get("entries")
    listed = list(entries[:MAX_DUMP_ENTRIES]) if isinstance(entries, list | tuple) else []
    named = [(entry, issued) for entry in listed if (issued := _issued(entry)) is not None]
    notices.warn_of_skipped(len(listed) - len(named), "flight-recorder entries")
    return RankDump(
        path=ref.label,
        rank=rank,
        groups=tuple(group for _, group in sorted(groups.items())),
        issued=tuple(issued for _, issued in named),
        group_ids={issued.group: bounded_text(str(entry.get("pg_id")), 40) for entry, issued in named},
        enqueued=_counted(content.get("pg_status"), "last_enqueued_collective"),
        completed=_counted(content.get("pg_status"), "last_completed_collective"),
        notices=notices.in_order(),
    )


def _issued(entry: object) -> Issued | None:
    if not isinstance(entry, dict):
        return None
    full_name = bounded_text(entry.get("profiling_name"), 120)
    if not full_name:
        return None
    backend, _, name = full_name.rpartition(":")
    group, description = group_of(entry.get("process_group"))
    transfer = _TRANSFER.search(name)
    op = Op.BARRIER if "barrier" in name else op_of_name(name)
    if transfer:
        op = Op.SEND if transfer[1] == "send" else Op.RECV
    dtype, num_bytes = size_of(entry, op)
    # gloo says of what is done only that it needs no watching any more.
    is_done = entry.get("state") == "completed" or (backend == "gloo" and entry.get("retired") is True)
    return Issued(
        group=group,
        description=description,
        seq=sequence_number(entry),
        name=name,
        op=op,
        peer=int(transfer[3]) if transfer else None,
        bytes=num_bytes,
        dtype=dtype,
        group_size=_group_size(op, entry),
        owner=owner_of(entry.get("frames")),
        is_backward=bounded_text(entry.get("thread_name")).startswith("pt_autograd"),
        is_done=is_done,
        has_begun=is_done or entry.get("state") == "started",
        created_ns=bounded_int(entry.get("time_created_ns"), 1) or 0,
    )


def _group_size(op: Op, entry: dict[str, object]) -> int | None:
    """Return how many times the smaller side of a gather or scatter goes into the larger one."""
    if op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        return None
    sides = [_elements(entry.get(name)) for name in ("input_sizes", "output_sizes")]
    small, large = min(sides), max(sides)
    return large // small if small and large % small == 0 and large > small else None


def _elements(sizes: object) -> int:
    """Return the elements of all tensors of a side, 0 where they are unknown."""
    shapes = sizes[:MAX_TENSORS] if isinstance(sizes, list | tuple) else []
    total = 0
    for shape in shapes:
        dims = [bounded_int(dim) for dim in shape[:MAX_DIMENSIONS]] if isinstance(shape, list | tuple) else [None]
        if None in dims:
            return 0
        total += prod(dim for dim in dims if dim is not None)
    return total


def _counted(status: object, name: str) -> dict[str, int]:
    found = {}
    for key, value in list(status.items())[:MAX_GROUPS] if isinstance(status, dict) else ():
        count = counter_of(value.get(name)) if isinstance(value, dict) else None
        if count is not None:
            found[bounded_text(str(key), 40)] = count
    return found
