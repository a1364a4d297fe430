"""Dumps of PyTorch's flight recorder (TORCH_NCCL_DUMP_ON_TIMEOUT, /tmp/nccl_trace_rank_*).

A dump is a ring of the last collectives of one rank. Its times are those at which the watchdog
looked, about once in 100 ms, except ``time_created_ns``; ``duration_ms`` is measured on the device
when TORCH_NCCL_ENABLE_TIMING is set.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError, InputError
from paro_advise.trace_parsers.bytes.constants import MAX_PICKLE_BYTES
from paro_advise.trace_parsers.bytes.safe_pickle import load_plain
from paro_advise.trace_parsers.constants import (
    MAX_DIMENSIONS,
    MAX_DUMP_ENTRIES,
    MAX_FRAMES,
    MAX_GROUPS,
    MAX_LISTED_RANKS,
    MAX_PENDING_TEXT,
    MAX_READ_FRAMES,
    MAX_TENSORS,
    MAX_VISITS,
    MAX_WORLD_SIZE,
)
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.rank_lists import ranks_text
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ProcessGroup, SourceHeader
from paro_advise.trace_parsers.values import bounded_float, bounded_int, bounded_text, parse_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_RANK_IN_NAME = re.compile(r"(?:_dump_|rank[_-]?|trace_)(\d{1,7})(?:\.\w{1,10})?$")
_NUMBER_LAST = re.compile(r"(\d{1,7})(?:\.[a-zA-Z]\w{0,9})?$")
_FROM_TORCH = re.compile(
    r"(?:^|/)torch/(?!distributed/(?:fsdp|optim|_composable)/|nn/parallel/|optim/)|\.(?:cpp|h|cu)$|^<|^\?\?"
)


@dataclass(slots=True)
class _Scan:
    rows: RowBuffer = field(default_factory=lambda: RowBuffer(COLLECTIVE_COLUMNS))
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    group_texts: dict[str, str] = field(default_factory=dict)  # ranks of each group
    states: Counter[str] = field(default_factory=Counter)
    first_open: tuple[int, str] | None = None  # (created, description) of the first one not completed
    num_entries: int = 0
    num_broken: int = 0
    num_watched: int = 0
    num_without_size: int = 0
    _num_visits: int = 0

    def add(self, entry: object) -> None:
        self.num_entries += 1
        if not isinstance(entry, dict):
            self.num_broken += 1
            return
        name = bounded_text(entry.get("profiling_name"), 120)
        created = bounded_int(entry.get("time_created_ns"), 1)
        if not name or self.rows.num_rows >= MAX_DUMP_ENTRIES:
            self.num_broken += 1
            return
        self._add_row(entry, name, created)

    def _add_row(self, entry: dict[str, object], name: str, created: int | None) -> None:
        group, description = group_of(entry.get("process_group"))
        op = Op.BARRIER if "barrier" in name else op_of_name(name.partition(":")[2] or name)
        seq = sequence_number(entry)
        self._note_state(entry, created, f"{name} seq {seq} of group {group or '?'} {description}".strip())
        is_affordable = self._can_afford(entry)
        dtype, num_bytes = size_of(entry, op) if is_affordable else ("", None)
        self.num_without_size += num_bytes is None
        known = self.groups.get(group)
        start_ns, end_ns = self._times(entry)
        thread = entry.get("thread_id")
        self.rows.add(
            start_us=start_ns,
            end_us=end_ns,
            issue_us=created,
            issue_tid=parse_int(thread) if isinstance(thread, str) else bounded_int(thread),
            op=op.value,
            bytes=num_bytes,
            dtype=dtype,
            group_size=known.size if known else None,
            group_name=group,
            group_desc=description,
            group_ranks=self.group_texts.get(group, ""),
            seq=seq,
            name=name,
            owner=owner_of(entry.get("frames")) if is_affordable else "",
            phase="backward" if bounded_text(entry.get("thread_name")).startswith("pt_autograd") else "",
        )

    def _can_afford(self, entry: dict[str, object]) -> bool:
        lists = [entry.get(name) for name in ("frames", "input_sizes", "output_sizes")]
        self._num_visits += sum(min(len(item), MAX_TENSORS) for item in lists if isinstance(item, list | tuple))
        return self._num_visits <= MAX_VISITS

    def _note_state(self, entry: dict[str, object], created: int | None, what: str) -> None:
        state = bounded_text(entry.get("state"), 40) or "unknown"
        self.states[state] += 1
        if state != "completed" and (self.first_open is None or (created or 0) < self.first_open[0]):
            self.first_open = (created or 0, what)

    def _times(self, entry: dict[str, object]) -> tuple[int | None, int | None]:
        """Return (start, end) in ns since the epoch; both or none."""
        start_ns = bounded_int(entry.get("time_discovered_started_ns"), 1)
        end_ns = bounded_int(entry.get("time_discovered_completed_ns"), 1)
        duration_ms = bounded_float(entry.get("duration_ms"), high=1e12)
        if start_ns is None:
            return None, None
        if duration_ms is not None:
            end_ns = start_ns + round(duration_ms * 1e6)
        if end_ns is None or end_ns < start_ns:
            return None, None
        self.num_watched += 1
        return start_ns, end_ns


def sequence_number(entry: dict[str, object]) -> int | None:
    """Return the number within the group; transfers between two ranks are counted apart."""
    name = "p2p_seq_id" if entry.get("is_p2p") is True else "collective_seq_id"
    return bounded_int(entry.get(name, entry.get("seq_id")))


def group_of(value: object) -> tuple[str, str]:
    """Return (name, description) of the pair that an entry holds."""
    if isinstance(value, list | tuple) and len(value) >= 2:
        return bounded_text(value[0], 200), bounded_text(value[1], 200)
    return bounded_text(value, 200), ""


def _tensors_bytes(sizes: object, dtypes: object) -> tuple[str, int | None]:
    """Return (first type, bytes of all tensors together)."""
    if not isinstance(sizes, list | tuple) or not isinstance(dtypes, list | tuple) or not dtypes:
        return "", None
    first = bounded_text(dtypes[0], 40)
    total = 0
    for index, shape in enumerate(sizes[:MAX_TENSORS]):
        size = dtype_bytes(bounded_text(dtypes[min(index, len(dtypes) - 1)], 40))
        is_shape = isinstance(shape, list | tuple) and len(shape) <= MAX_DIMENSIONS
        dims = [bounded_int(dim) for dim in shape] if is_shape else [None]
        if size is None or None in dims:
            return first, None
        total += size * prod(dim for dim in dims if dim is not None)
    return first, bounded_int(total) if sizes else None


def size_of(entry: dict[str, object], op: Op) -> tuple[str, int | None]:
    """Return (type, bytes of the full buffer): the larger side of gathers, else the input."""
    dtype, given = _tensors_bytes(entry.get("input_sizes"), entry.get("input_dtypes"))
    out_dtype, taken = _tensors_bytes(entry.get("output_sizes"), entry.get("output_dtypes"))
    if op in {Op.ALL_GATHER, Op.GATHER, Op.RECV} and taken is not None:
        return out_dtype, taken
    return dtype or out_dtype, taken if given is None else given


def owner_of(frames: object) -> str:
    """Return "file:function" of the innermost frames that are not PyTorch's own, outer first."""
    if not isinstance(frames, list | tuple):
        return ""
    inner: list[str] = []
    for frame in frames[:MAX_READ_FRAMES]:
        if not isinstance(frame, dict):
            continue
        path = bounded_text(frame.get("filename")).replace("\\", "/")
        if path and not _FROM_TORCH.search(path):
            inner.append(f"{PurePosixPath(path).name}:{bounded_text(frame.get('name'), 120)}")
        if len(inner) == MAX_FRAMES:
            break
    return " > ".join(reversed(inner))


def groups_of(config: object) -> dict[str, ProcessGroup]:
    """Return the process groups that a dump lists, by name."""
    groups: dict[str, ProcessGroup] = {}
    if not isinstance(config, dict):
        return groups
    num_ranks = 0
    for key, value in list(config.items())[:MAX_GROUPS]:
        if not isinstance(value, dict):
            continue
        name = bounded_text(value.get("name"), 200) or bounded_text(key, 200)
        listed = value.get("ranks")
        # A pickle can repeat one long list at the cost of two bytes.
        num_ranks += len(listed) if isinstance(listed, str | list | tuple) else 0
        ranks = _ranks(listed) if num_ranks <= MAX_LISTED_RANKS else ()
        groups[name] = ProcessGroup(
            name=name, description=bounded_text(value.get("desc"), 200), ranks=ranks, size=len(ranks)
        )
    return groups


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        texts = value.strip("[] ").split(",")[:MAX_WORLD_SIZE]
        value = [parse_int(text.strip()) for text in texts]
    if not isinstance(value, list | tuple):
        return ()
    return tuple(rank for rank in map(bounded_int, value[:MAX_WORLD_SIZE]) if rank is not None)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB are a pickle or JSON of the flight recorder."""
    is_pickle = head[:1] == b"\x80" and head[1:2] <= b"\x05"
    is_json = head.lstrip()[:1] == b"{" and b'"traceEvents"' not in head and b'"schemaVersion"' not in head
    names = (b"pg_config", b"pg_status", b"collective_seq_id", b"time_created_ns")
    return (is_pickle or is_json) and any(name in head for name in names)


def content_of(data: bytes, path: str) -> dict[str, object]:
    """Return the dump's top level."""
    try:
        value = load_plain(data) if data[:1] == b"\x80" else json.loads(data)
    except InputError as error:
        raise type(error)(error.what, where=path, hint=error.hint) from error
    except (ValueError, RecursionError) as error:
        raise BrokenInputError(f"the JSON of a flight-recorder dump is cut or damaged ({error})", where=path) from error
    if isinstance(value, list):  # before version 1.1 the entries stood alone
        value = {"entries": value}
    if not isinstance(value, dict) or not {"entries", "pg_config"} & value.keys():
        raise BrokenInputError("a flight-recorder dump must hold 'entries' or 'pg_config', got neither", where=path)
    return value


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read the entries of one rank; times are us since ``origin_ns``, sizes bytes of the full buffer.

    Raises:
        HostileInputError: the pickle would run code or is too large.
        BrokenInputError: the dump is cut or something else.
    """
    content = content_of(data.read_all(MAX_PICKLE_BYTES), source.path)
    groups = groups_of(content.get("pg_config"))
    # Every collective of a group repeats its text.
    texts = {name: ranks_text(group.ranks) for name, group in groups.items()}
    scan = _Scan(groups=groups, group_texts=texts)
    entries = content.get("entries")
    for entry in entries if isinstance(entries, list | tuple) else ():
        scan.add(entry)
    origin_ns = _rebase(scan.rows)
    notices = NoticeList()
    header = _header(scan, content, source, origin_ns, notices)
    _add_notices(scan, content, notices)
    return parsed_source(source, header, notices, scan.num_entries, collectives=scan.rows)


def _rebase(rows: RowBuffer) -> int:
    """Turn ns since the epoch into us since the first of them; return that."""
    columns = ("start_us", "end_us", "issue_us")
    origin_ns = min((value for name in columns for value in rows.numbers(name)), default=0)
    for name in columns:
        rows.convert(name, lambda time_ns: (time_ns - origin_ns) / 1e3)
    return int(origin_ns)


def _header(
    scan: _Scan, content: dict[str, object], source: SourceFile, origin_ns: int, notices: NoticeList
) -> SourceHeader:
    rank = rank_of(scan.groups, content, source.path, notices)
    world_size = max((group.size for group in scan.groups.values()), default=0)
    remarks = {"format_version": bounded_text(content.get("version"), 20)}
    remarks.update({f"state_{state}": str(count) for state, count in sorted(scan.states.items())})
    if pending := _pending(content.get("pg_status")):
        remarks["pending"] = pending
    return SourceHeader(
        rank=rank,
        world_size=world_size or None,
        backend=_backend(scan.rows.column("name")),
        nccl_version=bounded_text(content.get("nccl_version"), 60) or None,
        origin_ns=origin_ns,
        groups=tuple(group for _, group in sorted(scan.groups.items())),
        remarks=remarks,
    )


def rank_of(groups: dict[str, ProcessGroup], content: dict[str, object], path: str, notices: NoticeList) -> int | None:
    """Return the rank that a dump is of, by what it holds or else by its name; None where neither tells."""
    rank = bounded_int(content.get("global_rank", content.get("rank")))
    member_sets = [set(group.ranks) for group in groups.values() if group.ranks]
    # A rank lists the groups it belongs to, so it is in all of them.
    common = set.intersection(*member_sets) if member_sets else set()
    if rank is None and len(common) == 1:
        rank = common.pop()
    named = rank_in_dump_name(path)
    if named is None and rank is None:
        # Torch puts the rank behind whatever prefix TORCH_FR_DUMP_TEMP_FILE names.
        last = _NUMBER_LAST.search(path)
        named = int(last[1]) if last and int(last[1]) in set().union(*member_sets) else None
    if named is not None and rank is None:
        rank = named
    elif named is not None and rank != named:
        notices.warn("Q252", f"the file is named after rank {named}, but its groups are those of rank {rank}")
    if rank is None:
        notices.warn(
            "Q253",
            "neither the dump nor its name tells the rank",
            "name the file as PyTorch does: <prefix>_dump_<rank> or nccl_trace_rank_<rank>",
        )
    return rank


def rank_in_dump_name(path: str) -> int | None:
    """Return the rank that a file is named after; None for none."""
    named = _RANK_IN_NAME.search(path)
    return int(named[1]) if named else None


def _backend(names: Sequence[object]) -> str | None:
    """Return what most names of collectives begin with, such as "nccl:all_reduce"."""
    texts = [name for name in names if isinstance(name, str)]
    backends = Counter(name.partition(":")[0] for name in texts if ":" in name)
    return max(backends, key=lambda name: (backends[name], name), default=None)


def _pending(status: object) -> str:
    """Return "id:completed/enqueued" of the groups that still owe collectives."""
    if not isinstance(status, dict):
        return ""
    out: list[str] = []
    for key, value in sorted((bounded_text(key, 40), value) for key, value in list(status.items())[:MAX_GROUPS]):
        counts = value if isinstance(value, dict) else {}
        done, asked = (counter_of(counts.get(f"last_{what}_collective")) for what in ("completed", "enqueued"))
        if done is not None and asked is not None and done < asked:
            out.append(f"{key}:{done}/{asked}")
    return ",".join(out)[:MAX_PENDING_TEXT]


def counter_of(value: object) -> int | None:
    """Return a sequence number of ``pg_status``, -1 for none yet."""
    if isinstance(value, str):
        return -1 if value == "-1" else parse_int(value)
    return bounded_int(value, -1)


def _add_notices(scan: _Scan, content: dict[str, object], notices: NoticeList) -> None:
    notices.warn_of_skipped(scan.num_broken, "flight-recorder entries")
    num_open = sum(count for state, count in scan.states.items() if state != "completed")
    pending = _pending(content.get("pg_status"))
    if scan.first_open is not None:
        notices.warn(
            "Q250",
            f"{num_open:,} of {plural(scan.num_entries, 'collective')} not completed when the dump was taken, "
            f"the first: {scan.first_open[1]}; the run probably hung",
            "let `paro-advise hang` compare the dumps of all ranks",
        )
    elif pending:
        notices.warn(
            "Q254",
            f"groups that were asked for more than they completed (id:completed/asked): {pending}",
        )
    if not scan.num_entries:
        notices.info("Q255", "the dump lists no collectives", "set TORCH_NCCL_TRACE_BUFFER_SIZE=2000 or more")
    if scan.num_watched:
        notices.warn(
            "Q251",
            f"start times of {plural(scan.num_watched, 'collective')} are those at which PyTorch's watchdog looked, "
            "up to some 100 ms late",
            "use a profiler's trace for times",
        )
    notices.warn_of_sizes(scan.num_without_size, "element type or shape")
