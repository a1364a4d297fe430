"""JSON lines of NCCL Inspector, formats v4.0 to v4.3.

Up to v4.2 every record carries its ``header`` and ``metadata``; from v4.3 they stand in the
``dump_stats`` marker before the records of one communicator. ``coll_msg_size_bytes`` is what one
rank passes to NCCL, for an all-gather or reduce-scatter its shard.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.collective_sizes import busbw_gbps, full_bytes
from paro_advise.trace_parsers.constants import MAX_GROUP_SIZE, MAX_GROUPS, MAX_TIME_US
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.nccl.constants import MAX_KERNELS_OF_ONE, MAX_LABELS
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source, warn_of_limits
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, LINK_SAMPLE_COLUMNS, ProcessGroup, SourceHeader
from paro_advise.trace_parsers.values import bounded_float, bounded_int, bounded_text

if TYPE_CHECKING:
    from paro_advise.core.collective import Op
    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_KINDS = (("coll_perf", "coll"), ("p2p_perf", "p2p"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comm:
    name: str
    description: str
    rank: int
    size: int
    num_nodes: int | None


@dataclass(slots=True)
class _Scan:
    rows: RowBuffer = field(default_factory=lambda: RowBuffer(COLLECTIVE_COLUMNS))
    samples: RowBuffer = field(default_factory=lambda: RowBuffer(LINK_SAMPLE_COLUMNS))
    comms: dict[str, _Comm] = field(default_factory=dict)
    ranks: set[tuple[str, int]] = field(default_factory=set)
    hosts: set[str] = field(default_factory=set)
    versions: Counter[str] = field(default_factory=Counter)
    timing_sources: Counter[str] = field(default_factory=Counter)
    sequences: dict[tuple[str, int, str], tuple[int, int, int]] = field(default_factory=dict)
    dropped: dict[tuple[str, int], int] = field(default_factory=dict)
    header: dict[str, object] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)
    base_us: int | None = None  # the first time stamp: differences to it are exact in a float
    num_records: int = 0
    num_broken: int = 0
    num_event_times: int = 0
    num_dump_times: int = 0
    num_without_sample: int = 0

    def feed(self, line: str) -> None:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            self.num_broken += 1
            return
        header, metadata = record.get("header"), record.get("metadata")
        if isinstance(header, dict):
            self.header = header
            self.metadata = metadata if isinstance(metadata, dict) else {}
        stats = record.get("dump_stats")
        if isinstance(stats, dict):
            self._note_losses(stats)
        for key, prefix in _KINDS:
            if key in record:
                self.num_records += 1
                self.num_broken += not self._add_record(record[key], prefix)

    def _comm(self) -> _Comm | None:
        header = self.header
        size = bounded_int(header.get("n_ranks"), 1, MAX_GROUP_SIZE)
        rank = bounded_int(header.get("rank"))
        name = bounded_text(header.get("id"), 80)
        if size is None or rank is None or rank >= size or not name:
            return None
        return _Comm(
            name=name,
            description=bounded_text(header.get("comm_name"), 200),
            rank=rank,
            size=size,
            num_nodes=bounded_int(header.get("nnodes"), 1),
        )

    def _note_losses(self, stats: dict[str, object]) -> None:
        comm = self._comm()
        if comm is not None and len(self.dropped) < MAX_GROUPS:
            lost = [bounded_int(stats.get(f"{kind}_dropped_total")) or 0 for kind in ("coll", "p2p")]
            self.dropped[(comm.name, comm.rank)] = sum(lost)

    def _add_record(self, perf: object, prefix: str) -> bool:
        comm = self._comm()
        if comm is None or not isinstance(perf, dict):
            return False
        kind = bounded_text(perf.get(prefix), 40)
        size = bounded_int(perf.get(f"{prefix}_msg_size_bytes"))
        time_us = bounded_float(perf.get(f"{prefix}_exec_time_us"), high=MAX_TIME_US)
        if not kind or size is None or time_us is None:
            return False
        op = op_of_name(kind)
        num_bytes = full_bytes(op, size, comm.size)
        if num_bytes is None:
            return False
        seq = bounded_int(perf.get(f"{prefix}_sn"))
        self._note_comm(comm, kind, seq, perf.get(f"{prefix}_timing_source"))
        start_us = self._start_us(perf, time_us)
        self.rows.add(
            start_us=start_us,
            end_us=None if start_us is None else start_us + time_us,
            op=op.value,
            bytes=num_bytes,
            group_size=comm.size,
            group_name=comm.name,
            group_desc=comm.description,
            seq=seq,
            name=_row_name(kind, perf, prefix, comm.rank),
        )
        # Only collectives have numbers that all ranks of a communicator share.
        self._add_sample(op, num_bytes, time_us, comm, seq if prefix == "coll" else None)
        return True

    def _note_comm(self, comm: _Comm, kind: str, seq: int | None, timing_source: object) -> None:
        if len(self.comms) < MAX_GROUPS:
            self.comms[comm.name] = comm
            self.ranks.add((comm.name, comm.rank))
            key = (comm.name, comm.rank, kind)
            if seq is not None:
                first, last, count = self.sequences.get(key, (seq, seq, 0))
                self.sequences[key] = (min(first, seq), max(last, seq), count + 1)
        host = bounded_text(self.metadata.get("hostname"), 255)
        if host and len(self.hosts) < MAX_GROUPS:
            self.hosts.add(host)
        for counter, value in (
            (self.versions, self.metadata.get("inspector_output_format_version")),
            (self.timing_sources, timing_source),
        ):
            if (text := bounded_text(value, 40)) and len(counter) < MAX_LABELS:
                counter[text] += 1

    def _start_us(self, perf: dict[str, object], time_us: float) -> float | None:
        """Return the start relative to ``base_us``, by the best source there is."""
        trace = perf.get("event_trace_ts")
        if isinstance(trace, dict):
            kernels = trace.get("kernel_events")
            events = kernels[:MAX_KERNELS_OF_ONE] if isinstance(kernels, list) else []
            starts = [
                bounded_int(item.get("kernel_start_ts"), 1, MAX_TIME_US) for item in events if isinstance(item, dict)
            ]
            known = [start for start in starts if start is not None]
            enqueued = trace.get("coll_start_ts") or trace.get("p2p_start_ts")
            start = min(known) if known else bounded_int(enqueued, 1, MAX_TIME_US)
            if start is not None:
                self.num_event_times += 1
                return float(self._since_base(start))
        dumped = bounded_int(self.metadata.get("dump_timestamp_us"), 1, MAX_TIME_US)
        if dumped is None:
            return None
        self.num_dump_times += 1
        return self._since_base(dumped) - time_us

    def _since_base(self, stamp_us: int) -> int:
        if self.base_us is None:
            self.base_us = stamp_us
        return stamp_us - self.base_us

    def _add_sample(self, op: Op, num_bytes: int, time_us: float, comm: _Comm, seq: int | None) -> None:
        if comm.size == 1 or time_us <= 0 or num_bytes == 0:
            self.num_without_sample += 1
            return
        self.samples.add(
            op=op.value,
            bytes=num_bytes,
            group_size=comm.size,
            num_nodes=comm.num_nodes,
            time_us=time_us,
            busbw_gbps=busbw_gbps(op, num_bytes, time_us, comm.size),
            group_name=comm.name if seq is not None else "",
            seq=seq,
            rank=comm.rank if seq is not None else None,
        )


def _row_name(kind: str, perf: dict[str, object], prefix: str, rank: int) -> str:
    algorithm, protocol = bounded_text(perf.get(f"{prefix}_algo"), 40), bounded_text(perf.get(f"{prefix}_proto"), 40)
    return " ".join(part for part in (kind, algorithm, protocol, f"rank {rank}") if part)


def looks_like(head: bytes) -> bool:
    """Return whether the first 64 KiB hold a record of NCCL Inspector."""
    names = (b'"coll_perf"', b'"p2p_perf"', b'"inspector_output_format_version"')
    return head.lstrip()[:1] == b"{" and any(name in head for name in names)


def parse(data: Readable, source: SourceFile) -> ParsedSource:
    """Read collectives and link samples.

    Sizes are bytes in nccl-tests' convention, times microseconds since ``origin_ns``.

    Raises:
        BrokenInputError: no record can be read.
    """
    scan = _Scan()
    for line in data.lines():
        if text := line.strip():
            scan.feed(text)
    if not scan.rows.num_rows:
        raise BrokenInputError(
            f"a record of NCCL Inspector was expected, but none is intact ({scan.num_broken} broken)",
            where=source.path,
            hint="set NCCL_INSPECTOR_ENABLE=1 and NCCL_INSPECTOR_PROM_DUMP=0, then record again",
        )
    origin_us = _rebase(scan.rows, scan.base_us or 0)
    notices = _notices(scan)
    warn_of_limits(notices, data, scan.rows, scan.samples)
    return parsed_source(
        source,
        _header(scan, origin_us),
        notices,
        scan.num_records,
        collectives=scan.rows,
        link_samples=scan.samples,
    )


def _rebase(rows: RowBuffer, base_us: int) -> int:
    """Make times relative to the first start; return that in us since the epoch."""
    first_us = math.floor(min(rows.numbers("start_us"), default=0))
    for name in ("start_us", "end_us"):
        rows.convert(name, lambda time_us: time_us - first_us)
    return base_us + first_us


def _header(scan: _Scan, origin_us: int) -> SourceHeader:
    # The largest communicator is taken for the world: Inspector knows ranks within communicators only.
    world = max(scan.comms.values(), key=lambda comm: (comm.size, comm.name))
    ranks = {rank for name, rank in scan.ranks if name == world.name}
    # Where another one spans more nodes, none of them holds all ranks.
    is_whole = all((comm.num_nodes or 0) <= (world.num_nodes or 0) for comm in scan.comms.values())
    metadata = {
        "clock": "event" if not scan.num_dump_times else "dump" if not scan.num_event_times else "mixed",
        "format_version": ",".join(sorted(scan.versions)),
        "timing_source": ",".join(f"{name}:{count}" for name, count in sorted(scan.timing_sources.items())),
        "num_ranks_logged": str(len(ranks)),
    }
    if not (scan.num_dump_times or scan.num_event_times):
        metadata["clock"] = "none"
    return SourceHeader(
        rank=next(iter(ranks)) if len(ranks) == 1 and is_whole else None,
        world_size=world.size if is_whole else None,
        host=next(iter(scan.hosts)) if len(scan.hosts) == 1 else None,
        backend="nccl",
        num_nodes=world.num_nodes if is_whole else None,
        origin_ns=origin_us * 1000,
        groups=tuple(
            ProcessGroup(name=comm.name, description=comm.description, ranks=(), size=comm.size)
            for _, comm in sorted(scan.comms.items())
        ),
        remarks=metadata,
    )


def _notices(scan: _Scan) -> NoticeList:
    notices = NoticeList()
    notices.warn_of_skipped(scan.num_broken, "lines or records of NCCL Inspector")
    notices.info(
        "Q230",
        "NCCL Inspector's execution times include the wait for other ranks",
        "pass the files of all ranks: the minimum over ranks of one collective is its transfer time",
    )
    if scan.num_dump_times:
        notices.warn(
            "Q231",
            f"{plural(scan.num_dump_times, 'collective')} without a start time, taken to end at the dump: "
            "only durations hold",
            "set NCCL_INSPECTOR_DUMP_VERBOSE=1 to have start times recorded",
        )
    if lost := sum(scan.dropped.values()):
        notices.warn(
            "Q232",
            f"NCCL Inspector overwrote {plural(lost, 'record')} before writing",
            "raise NCCL_INSPECTOR_DUMP_COLL_RING_SIZE, or shorten NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS",
        )
    _add_gap_notice(scan, notices)
    if scan.num_without_sample:
        notices.info(
            "Q234", f"{plural(scan.num_without_sample, 'record')} of one rank, no bytes or 0 us: nothing about links"
        )
    if len({rank for _, rank in scan.ranks}) > 1 and len(scan.ranks) > len(scan.comms):
        notices.info("Q214", f"{len(scan.ranks)} ranks wrote into this file; its collectives are those of all")
    return notices


def _add_gap_notice(scan: _Scan, notices: NoticeList) -> None:
    missing = sum(last - first + 1 - count for first, last, count in scan.sequences.values())
    if missing > 0:
        seen = sum(count for _, _, count in scan.sequences.values())
        notices.warn(
            "Q233",
            f"{missing} of {missing + seen} sequence numbers are absent: lost, or too small to be kept "
            "(NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES)",
            "set NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES=0 and a larger ring if all are needed",
        )
