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
from typing import TYPE_CHECKING, Any

from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.errors import BrokenInputError, InputError
from paro_advise.trace_parsers.bytes.safe_pickle import MAX_BYTES, load_plain
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.side_rows import (
    NoticeList,
    RowBuffer,
    integer,
    parsed_source,
    real,
    short,
    whole,
)
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ProcessGroup, SourceHeader

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_RANK_IN_NAME = re.compile(r"(?:_dump_|rank[_-]?|trace_)(\d{1,7})(?:\.\w{1,10})?$")
_FROM_TORCH = re.compile(
    r"(?:^|/)torch/(?!distributed/(?:fsdp|optim|_composable)/|nn/parallel/|optim/)|\.(?:cpp|h|cu)$|^<|^\?\?"
)
_MAX_FRAMES = 6
_MAX_TENSORS = 4096
_MAX_ENTRIES = 200_000
# A pickle can repeat one long list of shapes or frames at the price of two bytes.
_MAX_VISITS = 3_000_000
_MAX_GROUPS = 65536
_MAX_WORLD = 1 << 20


@dataclass(slots=True)
class _Scan:
    rows: RowBuffer = field(default_factory=lambda: RowBuffer(COLLECTIVE_COLUMNS))
    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    states: Counter[str] = field(default_factory=Counter)
    first_open: tuple[int, str] | None = None  # (created, description) of the first one not completed
    num_entries: int = 0
    num_broken: int = 0
    num_watched: int = 0
    num_without_size: int = 0
    _num_visits: int = 0

    def entry(self, entry: object) -> None:
        self.num_entries += 1
        if not isinstance(entry, dict):
            self.num_broken += 1
            return
        name = short(entry.get("profiling_name"), 120)
        created = whole(entry.get("time_created_ns"), 1)
        if not name or self.rows.num_rows >= _MAX_ENTRIES:
            self.num_broken += 1
            return
        group, description = _group_of(entry.get("process_group"))
        op = Op.BARRIER if "barrier" in name else op_of_name(name.partition(":")[2] or name)
        is_p2p = entry.get("is_p2p") is True
        seq = whole(entry.get("p2p_seq_id" if is_p2p else "collective_seq_id", entry.get("seq_id")))
        self._state(entry, created, f"{name} seq {seq} of group {group or '?'} {description}".strip())
        is_affordable = self._affords(entry)
        dtype, num_bytes = _size(entry, op) if is_affordable else ("", None)
        self.num_without_size += num_bytes is None
        known = self.groups.get(group)
        start_ns, end_ns = self._times(entry)
        thread = entry.get("thread_id")
        self.rows.add(
            start_us=start_ns,
            end_us=end_ns,
            issue_us=created,
            issue_tid=integer(thread) if isinstance(thread, str) else whole(thread),
            op=op.value,
            bytes=num_bytes,
            dtype=dtype,
            group_size=known.size if known else None,
            group_name=group,
            group_desc=description,
            group_ranks=",".join(map(str, known.ranks)) if known else "",
            seq=seq,
            name=name,
            owner=_owner(entry.get("frames")) if is_affordable else "",
            phase="backward" if short(entry.get("thread_name")).startswith("pt_autograd") else "",
        )

    def _affords(self, entry: dict[str, Any]) -> bool:
        lists = [entry.get(name) for name in ("frames", "input_sizes", "output_sizes")]
        self._num_visits += sum(min(len(item), _MAX_TENSORS) for item in lists if isinstance(item, list | tuple))
        return self._num_visits <= _MAX_VISITS

    def _state(self, entry: dict[str, Any], created: int | None, what: str) -> None:
        state = short(entry.get("state"), 40) or "unknown"
        self.states[state] += 1
        if state != "completed" and (self.first_open is None or (created or 0) < self.first_open[0]):
            self.first_open = (created or 0, what)

    def _times(self, entry: dict[str, Any]) -> tuple[int | None, int | None]:
        """Return (start, end) in ns since the epoch; both or none."""
        start_ns = whole(entry.get("time_discovered_started_ns"), 1)
        end_ns = whole(entry.get("time_discovered_completed_ns"), 1)
        duration_ms = real(entry.get("duration_ms"), high=1e12)
        if start_ns is None:
            return None, None
        if duration_ms is not None:
            end_ns = start_ns + round(duration_ms * 1e6)
        if end_ns is None or end_ns < start_ns:
            return None, None
        self.num_watched += 1
        return start_ns, end_ns


def _group_of(value: object) -> tuple[str, str]:
    """Return (name, description) of the pair that an entry holds."""
    if isinstance(value, list | tuple) and len(value) >= 2:
        return short(value[0], 200), short(value[1], 200)
    return short(value, 200), ""


def _tensors_bytes(sizes: object, dtypes: object) -> tuple[str, int | None]:
    """Return (first type, bytes of all tensors together)."""
    if not isinstance(sizes, list | tuple) or not isinstance(dtypes, list | tuple) or not dtypes:
        return "", None
    first = short(dtypes[0], 40)
    total = 0
    for index, shape in enumerate(sizes[:_MAX_TENSORS]):
        size = dtype_bytes(short(dtypes[min(index, len(dtypes) - 1)], 40))
        is_shape = isinstance(shape, list | tuple) and len(shape) <= 16
        dims = [whole(dim) for dim in shape] if is_shape else [None]
        if size is None or None in dims:
            return first, None
        total += size * prod(dim for dim in dims if dim is not None)
    return first, whole(total) if sizes else None


def _size(entry: dict[str, Any], op: Op) -> tuple[str, int | None]:
    """Return (type, bytes of the full buffer): the larger side of gathers, else the input."""
    dtype, given = _tensors_bytes(entry.get("input_sizes"), entry.get("input_dtypes"))
    out_dtype, taken = _tensors_bytes(entry.get("output_sizes"), entry.get("output_dtypes"))
    if op in {Op.ALL_GATHER, Op.GATHER, Op.RECV} and taken is not None:
        return out_dtype, taken
    return dtype or out_dtype, taken if given is None else given


def _owner(frames: object) -> str:
    """Return "file:function" of the innermost frames that are not PyTorch's own, outer first."""
    if not isinstance(frames, list | tuple):
        return ""
    inner: list[str] = []
    for frame in frames[:256]:
        if not isinstance(frame, dict):
            continue
        path = short(frame.get("filename")).replace("\\", "/")
        if path and not _FROM_TORCH.search(path):
            inner.append(f"{PurePosixPath(path).name}:{short(frame.get('name'), 120)}")
        if len(inner) == _MAX_FRAMES:
            break
    return " > ".join(reversed(inner))


def _groups(config: object) -> dict[str, ProcessGroup]:
    groups: dict[str, ProcessGroup] = {}
    if not isinstance(config, dict):
        return groups
    for key, value in list(config.items())[:_MAX_GROUPS]:
        if not isinstance(value, dict):
            continue
        name = short(value.get("name"), 200) or short(key, 200)
        ranks = _ranks(value.get("ranks"))
        groups[name] = ProcessGroup(name=name, description=short(value.get("desc"), 200), ranks=ranks, size=len(ranks))
    return groups


def _ranks(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        texts = value.strip("[] ").split(",")[:_MAX_WORLD]
        value = [integer(text.strip()) for text in texts]
    if not isinstance(value, list | tuple):
        return ()
    return tuple(rank for rank in map(whole, value[:_MAX_WORLD]) if rank is not None)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB are a pickle or JSON of the flight recorder."""
    is_pickle = head[:1] == b"\x80" and head[1:2] <= b"\x05"
    is_json = head.lstrip()[:1] == b"{" and b'"traceEvents"' not in head and b'"schemaVersion"' not in head
    names = (b"pg_config", b"pg_status", b"collective_seq_id", b"time_created_ns")
    return (is_pickle or is_json) and any(name in head for name in names)


def _content(data: bytes, path: str) -> dict[str, Any]:
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
    content = _content(data.read_all(MAX_BYTES), source.path)
    scan = _Scan(groups=_groups(content.get("pg_config")))
    entries = content.get("entries")
    for entry in entries if isinstance(entries, list | tuple) else ():
        scan.entry(entry)
    origin_ns = _rebase(scan.rows)
    notices = NoticeList()
    header = _header(scan, content, source, origin_ns, notices)
    _notices(scan, content, notices)
    return parsed_source(source, header, notices, scan.num_entries, collectives=scan.rows)


def _rebase(rows: RowBuffer) -> int:
    """Turn ns since the epoch into us since the first of them; return that."""
    columns = [rows.column(name) for name in ("start_us", "end_us", "issue_us")]
    origin_ns = min((value for column in columns for value in column if value is not None), default=0)
    for column in columns:
        column[:] = [None if value is None else (value - origin_ns) / 1e3 for value in column]
    return int(origin_ns)


def _header(
    scan: _Scan, content: dict[str, Any], source: SourceFile, origin_ns: int, notices: NoticeList
) -> SourceHeader:
    rank = whole(content.get("global_rank", content.get("rank")))
    member_sets = [set(group.ranks) for group in scan.groups.values() if group.ranks]
    # A rank lists the groups it belongs to, so it is in all of them.
    common = set.intersection(*member_sets) if member_sets else set()
    if rank is None and len(common) == 1:
        rank = common.pop()
    named = _RANK_IN_NAME.search(source.path)
    rank_source = "" if rank is None else "content"
    if named and rank is None:
        rank, rank_source = int(named[1]), "name"
    elif named and rank != int(named[1]):
        notices.warn("Q252", f"the file is named after rank {named[1]}, but its groups are those of rank {rank}")
    if rank is None:
        notices.warn(
            "Q253",
            "neither the dump nor its name tells the rank",
            "name the file as PyTorch does: <prefix>_dump_<rank> or nccl_trace_rank_<rank>",
        )
    world = max((group.size for group in scan.groups.values()), default=0)
    metadata = {"format_version": short(content.get("version"), 20)}
    metadata.update({f"state_{state}": str(count) for state, count in sorted(scan.states.items())})
    if pending := _pending(content.get("pg_status")):
        metadata["pending"] = pending
    return SourceHeader(
        rank=rank,
        rank_source=rank_source,
        world_size=world or None,
        backend=_backend(scan.rows.column("name")),
        nccl_version=short(content.get("nccl_version"), 60) or None,
        origin_ns=origin_ns,
        groups=tuple(group for _, group in sorted(scan.groups.items())),
        remarks=metadata,
    )


def _backend(names: list[str]) -> str | None:
    backends = Counter(name.partition(":")[0] for name in names if ":" in name)
    return max(backends, key=lambda name: (backends[name], name), default=None)


def _pending(status: object) -> str:
    """Return "id:completed/enqueued" of the groups that still owe collectives."""
    if not isinstance(status, dict):
        return ""
    out: list[str] = []
    for key, value in sorted((short(key, 40), value) for key, value in list(status.items())[:_MAX_GROUPS]):
        counts = value if isinstance(value, dict) else {}
        done, asked = (_counter(counts.get(f"last_{what}_collective")) for what in ("completed", "enqueued"))
        if done is not None and asked is not None and done < asked:
            out.append(f"{key}:{done}/{asked}")
    return ",".join(out)[:4000]


def _counter(value: object) -> int | None:
    if isinstance(value, str):
        return -1 if value == "-1" else integer(value)
    return whole(value, -1)


def _notices(scan: _Scan, content: dict[str, Any], notices: NoticeList) -> None:
    notices.skipped(scan.num_broken, "flight-recorder entries")
    num_open = sum(count for state, count in scan.states.items() if state != "completed")
    pending = _pending(content.get("pg_status"))
    if scan.first_open is not None:
        notices.warn(
            "Q250",
            f"{num_open} of {scan.num_entries} collectives were not completed when the dump was taken, "
            f"the first: {scan.first_open[1]}; the run probably hung",
            "compare the dumps of all ranks with torchfrtrace",
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
            f"start times of {scan.num_watched} collectives are those at which PyTorch's watchdog looked, "
            "up to some 100 ms late",
            "use a profiler's trace for times",
        )
    if scan.num_without_size:
        notices.warn("Q212", f"{scan.num_without_size} collectives have no size: unknown element type or shape")
