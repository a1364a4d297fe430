"""Dumps of NCCL's example profiler plugin, and of its offspring that write one record per line.

The example plugin writes Chrome's asynchronous begin and end events, one per line, as a list that
is closed only when the process ends well; what a killed run leaves is read up to the cut. Times
are microseconds on the plugin's own clock.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.collective_sizes import full_bytes
from paro_advise.trace_parsers.constants import MAX_GROUP_SIZE
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.nccl.constants import MAX_OPEN, UINT64_MAX
from paro_advise.trace_parsers.nccl.names import dtype_of_name, element_bytes
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source, warn_of_limits
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ProcessGroup, SourceHeader
from paro_advise.trace_parsers.values import bounded_float, bounded_int, bounded_text

if TYPE_CHECKING:
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_HEAD = re.compile(rb'"cat":\s*"(?:(?:GROUP|COLL|P2P)(?:_API)?|PROXY|NET|GPU|KERNEL_LAUNCH|CE_\w+)"')
_RECORD = re.compile(rb'"type":\s*"(?:ProfilerLifecycle|ncclProfile\w+)"')


@dataclass(slots=True, kw_only=True)
class _Call:
    """A collective: when it was enqueued and, if known, when its kernel ran."""

    func: str
    rank: int | None
    comm: str
    count: int
    dtype: str
    seq: int | None
    how: str
    start_us: float
    end_us: float
    is_open: bool = False
    kernel_start_us: float | None = None
    kernel_end_us: float | None = None


@dataclass(slots=True)
class _Scan:
    calls: list[_Call] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    num_records: int = 0
    num_broken: int = 0
    num_incomplete: int = 0
    num_dropped: int = 0
    _open: dict[tuple[object, ...], list[dict[str, object]]] = field(default_factory=dict)
    _num_open: int = 0
    _stack: dict[tuple[int | None, int | None], _Call] = field(default_factory=dict)
    _by_address: dict[tuple[int | None, str], _Call] = field(default_factory=dict)

    def feed(self, text: str) -> None:
        text = text.strip().removeprefix("[").removesuffix("]").strip().removesuffix(",")
        if text in {"", "{}"}:
            return
        try:
            found = json.loads(f"[{text}]")
        except (ValueError, RecursionError):
            self.num_broken += 1
            return
        for record in found:
            if isinstance(record, dict) and record:
                self._read_record(record)

    def _read_record(self, record: dict[str, object]) -> None:
        self.num_records += 1
        phase = record.get("ph")
        if phase == "b":
            self._begin(record)
        elif phase == "e":
            self._end(record)
        elif phase is None and isinstance(record.get("type"), str):
            self._read_flat(record)

    def _begin(self, record: dict[str, object]) -> None:
        if self._num_open >= MAX_OPEN:
            self.num_dropped += 1
            return
        self._num_open += 1
        self._open.setdefault(_event_key(record), []).append(record)
        ts = bounded_float(record.get("ts"))
        if _category(record) in {"COLL", "P2P"} and ts is not None:
            call = _chrome_call(record, ts)
            if call is not None:
                # Its kernel's channels are written before its own end.
                self._stack[_thread_of(record)] = call

    def _end(self, record: dict[str, object]) -> None:
        begun = self._open.get(_event_key(record))
        if not begun:
            self.num_broken += 1
            return
        first = begun.pop()
        self._num_open -= 1
        start_us, end_us = bounded_float(first.get("ts")), bounded_float(record.get("ts"))
        category = _category(record)
        if category not in {"COLL", "P2P", "GPU"}:
            return
        if start_us is None or end_us is None or end_us < start_us:
            self.num_broken += 1
            return
        if category == "GPU":
            _extend_kernel(self._stack.get(_thread_of(record)), start_us, end_us)
            return
        call = self._stack.pop(_thread_of(record), None)
        if call is None or call.start_us != start_us:
            call = _chrome_call(first, start_us)
        if call is None:
            self.num_broken += 1
            return
        call.end_us = end_us
        self.calls.append(call)

    def _read_flat(self, record: dict[str, object]) -> None:
        kind = record["type"]
        details = record.get("details")
        details = details if isinstance(details, dict) else {}
        comm = str(bounded_int(record.get("commId"), 0, UINT64_MAX) or "")
        if kind == "ProfilerLifecycle":
            size = bounded_int(details.get("nranks"), 1, MAX_GROUP_SIZE)
            if comm and size is not None and len(self.sizes) < MAX_OPEN:
                self.sizes[comm] = size
            return
        if kind not in {"ncclProfileColl", "ncclProfileP2p", "ncclProfileKernelCh"}:
            return
        start_us, end_us = _time_of(record.get("start")), _time_of(record.get("stop"))
        rank = bounded_int(record.get("rank"))
        if start_us is None or end_us is None or end_us < start_us:
            self.num_broken += 1
            return
        if kind == "ncclProfileKernelCh":
            _extend_kernel(self._by_address.get((rank, bounded_text(record.get("parentObj"), 40))), start_us, end_us)
            return
        call = _flat_call(details, rank, comm, start_us, end_us)
        if call is None:
            self.num_broken += 1
            return
        self.calls.append(call)
        if len(self._by_address) < MAX_OPEN:
            self._by_address[(rank, bounded_text(record.get("eventAddr"), 40))] = call

    def finish(self) -> None:
        """Count the collectives that never ended."""
        for begun in self._open.values():
            self.num_incomplete += sum(_category(record) in {"COLL", "P2P"} for record in begun)


def _thread_of(record: dict[str, object]) -> tuple[int | None, int | None]:
    return bounded_int(record.get("pid")), bounded_int(record.get("tid"))


def _category(record: dict[str, object]) -> str:
    return bounded_text(record.get("cat"), 40)


def _event_key(record: dict[str, object]) -> tuple[object, ...]:
    return (
        *_thread_of(record),
        bounded_int(record.get("id")),
        _category(record),
        bounded_text(record.get("name"), 80),
    )


def _time_of(moment: object) -> float | None:
    return bounded_float(moment.get("ts")) if isinstance(moment, dict) else None


def _extend_kernel(call: _Call | None, start_us: float, end_us: float) -> None:
    if call is not None:
        call.kernel_start_us = min(start_us, start_us if call.kernel_start_us is None else call.kernel_start_us)
        call.kernel_end_us = max(end_us, end_us if call.kernel_end_us is None else call.kernel_end_us)


def _chrome_call(record: dict[str, object], start_us: float) -> _Call | None:
    args = record.get("args")
    func = bounded_text(record.get("name"), 80)
    if not isinstance(args, dict) or not func:
        return None
    count = bounded_int(args.get("Count"))
    if count is None:
        return None
    how = " ".join(filter(None, (bounded_text(args.get("Algorithm"), 40), bounded_text(args.get("Protocol"), 40))))
    return _Call(
        func=func,
        rank=bounded_int(args.get("Rank")),
        comm=str(bounded_int(args.get("CommHash"), 0, UINT64_MAX) or ""),
        count=count,
        dtype=dtype_of_name(bounded_text(args.get("Datatype"), 40)),
        seq=bounded_int(args.get("SeqNum")),
        how=how,
        start_us=start_us,
        end_us=start_us,
    )


def _flat_call(details: dict[str, object], rank: int | None, comm: str, start_us: float, end_us: float) -> _Call | None:
    func, count = bounded_text(details.get("func"), 80), bounded_int(details.get("count"))
    if not func or count is None:
        return None
    return _Call(
        func=func,
        rank=rank,
        comm=comm,
        count=count,
        dtype=dtype_of_name(bounded_text(details.get("dtype"), 40)),
        seq=bounded_int(details.get("seq")),
        how=" ".join(filter(None, (bounded_text(details.get("algo"), 40), bounded_text(details.get("proto"), 40)))),
        start_us=start_us,
        end_us=end_us,
    )


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold events of a profiler plugin of NCCL."""
    first = head.lstrip()[:1]
    if first == b"[" and _HEAD.search(head) and re.search(rb'"ph":\s*"[be]"', head):
        return True
    return first == b"{" and b'"commId"' in head and _RECORD.search(head) is not None


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read the collectives; times are us since the first of them, sizes bytes of the full buffer.

    Raises:
        BrokenInputError: no collective can be read.
    """
    scan = _Scan()
    for line in data.lines():
        scan.feed(line)
    scan.finish()
    if not scan.calls:
        raise BrokenInputError(
            "events of a NCCL profiler plugin were expected, but no collective is complete "
            f"({plural(scan.num_records, 'record')}, {scan.num_broken:,} broken)",
            where=source.path,
            hint="set NCCL_PROFILE_EVENT_MASK so that collectives are recorded (bit 2), and let the run end",
        )
    return _result(scan, data, source)


def _result(scan: _Scan, data: Readable, source: SourceFile) -> ParsedSource:
    origin_us = min(min(call.start_us, call.kernel_start_us or call.start_us) for call in scan.calls)
    rows = RowBuffer(COLLECTIVE_COLUMNS)
    counts: Counter[str] = Counter()
    for call in scan.calls:
        op = op_of_name(call.func)
        size = element_bytes(call.dtype)
        num_bytes = None if size is None else full_bytes(op, call.count * size, scan.sizes.get(call.comm))
        counts["no_size"] += num_bytes is None
        is_kernel = call.kernel_start_us is not None
        counts["host_time"] += not is_kernel
        start_us = call.start_us if call.kernel_start_us is None else call.kernel_start_us
        end_us = call.end_us if call.kernel_end_us is None else call.kernel_end_us
        rank = "" if call.rank is None else f"rank {call.rank}"
        rows.add(
            start_us=start_us - origin_us,
            end_us=end_us - origin_us,
            issue_us=call.start_us - origin_us,
            op=op.value,
            bytes=num_bytes,
            dtype=call.dtype,
            group_size=scan.sizes.get(call.comm),
            group_name=call.comm,
            seq=call.seq,
            name=" ".join(filter(None, (call.func, call.how, rank))),
        )
    notices = _notices(scan, counts)
    warn_of_limits(notices, data, rows)
    return parsed_source(source, _header(scan), notices, scan.num_records, collectives=rows)


def _header(scan: _Scan) -> SourceHeader:
    ranks = {call.rank for call in scan.calls}
    only = next(iter(ranks)) if len(ranks) == 1 else None
    return SourceHeader(
        rank=only,
        world_size=max(scan.sizes.values(), default=None),
        backend="nccl",
        groups=tuple(
            ProcessGroup(name=name, description="", ranks=(), size=size) for name, size in sorted(scan.sizes.items())
        ),
        remarks={"num_ranks_logged": str(len(ranks))},
    )


def _notices(scan: _Scan, counts: Counter[str]) -> NoticeList:
    notices = NoticeList()
    notices.warn_of_skipped(scan.num_broken, "records of the profiler plugin")
    if scan.num_incomplete:
        notices.warn("Q240", f"{plural(scan.num_incomplete, 'collective')} never ended in this dump: the run was cut")
    if counts["host_time"]:
        notices.warn(
            "Q241",
            f"{plural(counts['host_time'], 'collective')} by the plugin's host times only, not by kernels",
            "add the kernel channel bit (64) to NCCL_PROFILE_EVENT_MASK",
        )
    notices.warn_of_sizes(counts["no_size"], "element type or communicator")
    if scan.num_dropped:
        notices.warn(
            "Q202", f"{plural(scan.num_dropped, 'event was', 'events were')} left out because too many had not ended"
        )
    if len({call.rank for call in scan.calls}) > 1:
        notices.info("Q214", "several ranks wrote into this file; its collectives are those of all")
    return notices
