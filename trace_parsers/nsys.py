"""Nsight Systems reports exported to SQLite (nsys export --type sqlite)."""

from __future__ import annotations

import re
import sqlite3
from array import array
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError
from paro_advise.trace_parsers.bytes.foreign_database import Database
from paro_advise.trace_parsers.constants import MAX_DEVICE_ROWS, MAX_DEVICES, MAX_NAMES, MAX_PLACES, MAX_SPANS
from paro_advise.trace_parsers.kernel_kinds import KernelKind, kind_of_kernel, op_of_name
from paro_advise.trace_parsers.kineto.constants import NO_STEPS_CODE
from paro_advise.trace_parsers.nccl.names import dtype_of_name
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.side_rows import RowBuffer, parsed_source
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, EventTables, HostSpan, SourceHeader
from paro_advise.trace_parsers.values import bounded_int, bounded_text

if TYPE_CHECKING:
    from pathlib import Path

    from paro_advise.trace_parsers.tables import ParsedSource, SourceFile

_MAGIC = b"SQLite format 3\0"
_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
# CUpti_ActivityMemcpyKind (CUPTI documentation).
_COPIES = dict(enumerate(("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"), start=1))
# eventType of NVTX ranges (Nsight Systems, SQLite schema); other types are marks, names and domains.
_RANGE_TYPES = (59, 60)  # none; push/pop and start/end; NvtxPushPopRange and NvtxStartEndRange of that schema
# globalTid and globalPid hold the process above the thread (Nsight Systems, SQLite schema).
_TID_BITS = 24  # bits; of a thread in globalTid; that schema
_TID_MASK = (1 << _TID_BITS) - 1  # none; what of a globalTid is the thread; formula
_STEP = re.compile(r"(ProfilerStep#|(?:train[ _])?(?:step|iteration|iter)[ _#:]*)(\d{1,9})", re.IGNORECASE)
_UNNAMED = "unknown kernel"
_MPI_RANK = re.compile(r"MPI Rank (\d{1,7})")
_KERNEL_DTYPE = re.compile(r"_(bf16|f16|f32|f64|i8|u8|i32|u32|i64|u64)(?=_|\(|$)")


@dataclass(slots=True)
class _Rows:
    start_us: array[float] = field(default_factory=lambda: array("d"))
    end_us: array[float] = field(default_factory=lambda: array("d"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    kind: array[int] = field(default_factory=lambda: array("B"))
    name: array[int] = field(default_factory=lambda: array("L"))
    launch_us: array[float] = field(default_factory=lambda: array("d"))
    names: dict[str, int] = field(default_factory=dict)
    kinds: list[int] = field(default_factory=list)
    num_broken: int = 0

    def add(
        self,
        times: tuple[object, object],
        stream: object,
        name: str,
        launch_us: float,
        kind: KernelKind | None,
    ) -> None:
        start, end = bounded_int(times[0]), bounded_int(times[1])
        is_full = len(self.names) >= MAX_NAMES and name not in self.names
        if start is None or end is None or end < start or is_full:
            self.num_broken += 1
            return
        code = self.names.setdefault(name, len(self.names))
        if code == len(self.kinds):
            self.kinds.append(int(kind_of_kernel(name) if kind is None else kind))
        self.start_us.append(start / 1e3)
        self.end_us.append(end / 1e3)
        self.stream.append(bounded_int(stream) or 0)
        self.kind.append(self.kinds[code])
        self.name.append(code)
        self.launch_us.append(launch_us)


@dataclass(slots=True, kw_only=True)
class _Report:
    rows: _Rows
    issues: dict[float, int]  # launch time to thread
    spans: list[HostSpan]
    steps: list[HostSpan]
    rank: int | None
    places: list[tuple[int, int]]
    num_events: int
    num_graphs: int = 0  # executions of CUDA graphs that were recorded as wholes
    num_other_marks: int = 0  # ranges that look like steps, inside of steps or of other names or threads

    @property
    def times_device(self) -> bool:
        """Tell whether a kernel of known name was recorded; without any a device looks idle, whatever it does."""
        known = zip(self.rows.names, self.rows.kinds, strict=True)
        return any(kind != KernelKind.MEMORY and name != _UNNAMED for name, kind in known)


_MERGE_LOG = "move them into it first: sqlite3 FILE 'PRAGMA wal_checkpoint(TRUNCATE)'"


def looks_like(head: bytes) -> bool:
    """Return whether the file is an SQLite database."""
    return head.startswith(_MAGIC)


def parse(path: Path, source: SourceFile) -> ParsedSource:
    """Read device rows, collectives and NVTX ranges; times are us since the session began.

    Args:
        path: the database itself, not compressed.
        source: where it comes from.

    Raises:
        BrokenInputError: it is no database of Nsight Systems or nothing in it can be read.
    """
    try:
        with closing(Database(path, path.stat().st_size)) as database:
            if not database.tables.keys() & {_KERNEL, _MEMCPY, "NVTX_EVENTS", "StringIds"}:
                why = f" ({database.problem})" if database.problem else ""
                raise BrokenInputError(
                    f"an export of Nsight Systems was expected, the database has none of its tables{why}",
                    where=source.path,
                    hint=_MERGE_LOG
                    if _log_bytes(path)
                    else "export the report with: nsys export --type sqlite report.nsys-rep",
                )
            return _read(database, source, _log_bytes(path))
    except (sqlite3.Error, OSError) as error:
        raise BrokenInputError(f"the SQLite database cannot be opened ({error})", where=source.path) from error


def _log_bytes(path: Path) -> int:
    """Return the size of the write-ahead log beside a database, in which its newest rows may stand."""
    log = path.with_name(f"{path.name}-wal")
    return log.stat().st_size if log.is_file() else 0


def _read(database: Database, source: SourceFile, log_bytes: int) -> ParsedSource:
    strings = {
        code: bounded_text(value, 4096)
        for code, value in database.select("StringIds", ("id", "value"), MAX_NAMES)
        if isinstance(code, int)
    }
    places = _places(database)
    report = _device_rows(database, strings, places)
    _add_nvtx_ranges(database, strings, places[0][0] if places else 0, report)
    if not (report.rows.start_us or report.spans or report.steps):
        raise BrokenInputError(
            f"the export of Nsight Systems holds no kernel, copy or NVTX range {database.problem}".rstrip(),
            where=source.path,
            hint="record with: nsys profile --trace=cuda,nvtx",
        )
    collectives = _collectives(report)
    header = _header(database, report)
    notices = _notices(database, report)
    if log_bytes:
        notices.warn("Q275", "rows in the write-ahead log beside the database (-wal) are not read", _MERGE_LOG)
    if collectives.num_dropped:
        notices.warn("Q202", f"{plural(collectives.num_dropped, 'collective was', 'collectives were')} left out")
    return parsed_source(
        source,
        header,
        notices,
        report.num_events,
        collectives=collectives,
        events=_event_tables(report) if report.times_device else None,
    )


def _places(database: Database) -> list[tuple[int, int]]:
    """Return (process, device) of all rows, those with the most kernels first; one rank is one of them."""
    found: dict[tuple[int, int], None] = {}
    for table in (_KERNEL, _GRAPH, _MEMCPY):
        columns = ("globalPid", "deviceId")
        where = "GROUP BY 1, 2 ORDER BY COUNT(*) DESC, 1, 2"
        for process, device in database.select(table, columns, MAX_PLACES, where):
            found.setdefault((bounded_int(process) or 0, bounded_int(device) or 0))
    return list(found)


def _launches(database: Database, process: int) -> tuple[dict[int, float], dict[float, int]]:
    """Return correlation to launch time and launch time to thread, for one process."""
    launches: dict[int, float] = {}
    threads: dict[float, int] = {}
    columns = ("correlationId", "start", "globalTid")
    for correlation, start, thread in database.select(_RUNTIME, columns, MAX_DEVICE_ROWS):
        tid = bounded_int(thread) or 0
        # The upper bits of a thread's id are those of its process.
        if (
            isinstance(correlation, int)
            and isinstance(start, int)
            and (not process or tid >> _TID_BITS == process >> _TID_BITS)
        ):
            launches[correlation] = start / 1e3
            threads[start / 1e3] = tid & _TID_MASK
    return launches, threads


def _device_rows(database: Database, strings: dict[int, str], places: list[tuple[int, int]]) -> _Report:
    rows = _Rows()
    process, device = places[0] if places else (0, 0)
    launches, threads = _launches(database, process)
    num_events = 0
    num_graphs = 0
    for table, label in ((_KERNEL, "demangledName"), (_GRAPH, ""), (_MEMCPY, "copyKind"), (_MEMSET, "")):
        columns = ("start", "end", "streamId", "correlationId", "globalPid", "deviceId", label, "shortName")
        for cells in database.select(table, columns, MAX_DEVICE_ROWS):
            num_events += 1
            start, end, stream, correlation, pid, number, what, short_name = cells
            if (bounded_int(pid) or 0, bounded_int(number) or 0) != (process, device):
                continue
            kind = {_KERNEL: None, _GRAPH: KernelKind.COMPUTE}.get(table, KernelKind.MEMORY)
            if table == _KERNEL:
                name = _text(strings, what) or _text(strings, short_name) or _UNNAMED
            elif table == _GRAPH:
                name, num_graphs = "CUDA graph", num_graphs + 1
            elif table == _MEMCPY:
                name = f"Memcpy {_COPIES.get(bounded_int(what) or 0, 'unknown')}"
            else:
                name = "Memset (Device)"
            launch_us = launches.get(bounded_int(correlation) or -1, float("nan"))
            rows.add((start, end), stream, name, launch_us, kind)
    return _Report(
        rows=rows, issues=threads, spans=[], steps=[], rank=None, places=places, num_events=num_events,
        num_graphs=num_graphs,
    )  # fmt: skip


def _text(strings: dict[int, str], code: object) -> str:
    return strings.get(code, "") if isinstance(code, int) else ""


def _add_nvtx_ranges(database: Database, strings: dict[int, str], process: int, report: _Report) -> None:
    columns = ("start", "end", "eventType", "text", "textId", "globalTid")
    for start, end, kind, text, code, thread in database.select("NVTX_EVENTS", columns, MAX_SPANS):
        report.num_events += 1
        name = bounded_text(text, 1000) or _text(strings, code)
        tid = bounded_int(thread) or 0
        if process and tid >> _TID_BITS != process >> _TID_BITS:
            continue
        if report.rank is None and (rank := _MPI_RANK.fullmatch(name)):
            report.rank = int(rank[1])
        first, last = bounded_int(start), bounded_int(end)
        if kind not in _RANGE_TYPES or first is None or last is None or last < first or not name:
            continue
        span = HostSpan(start_us=first / 1e3, end_us=last / 1e3, tid=tid & _TID_MASK, name=name)
        (report.steps if _STEP.fullmatch(name) else report.spans).append(span)
    report.spans.sort(key=lambda span: (span.start_us, -span.end_us, span.name))
    marks = sorted(report.steps, key=lambda span: (span.start_us, -span.end_us, span.name))
    launches = Counter(report.issues.values())
    report.steps = _one_after_another(marks, max(launches, key=lambda tid: launches[tid], default=None))
    report.num_other_marks = len(marks) - len(report.steps)


def _one_after_another(marks: list[HostSpan], trains: int | None) -> list[HostSpan]:
    """Return the ranges of the thread and name that cover the most time, without those inside of one another.

    Scripts mark steps within steps (accumulated passes, iterations of a solver), and threads beside the training one.

    Args:
        marks: by start, longer ones first.
        trains: the thread that launches the most, whose marks go before others'; None where that is not known.
    """
    families: dict[tuple[int, str], list[HostSpan]] = {}
    for span in marks:
        found = _STEP.fullmatch(span.name)
        family = families.setdefault((span.tid, found[1].lower() if found else ""), [])
        if not family or span.start_us >= family[-1].end_us:
            family.append(span)

    def weight(family: list[HostSpan]) -> tuple[bool, float]:
        return family[0].tid == trains, sum(span.end_us - span.start_us for span in family)

    return max(families.values(), key=weight, default=[])


def _event_tables(report: _Report) -> EventTables:
    import polars as pl

    rows = report.rows
    device = pl.DataFrame(
        {
            "start_us": pl.Series(rows.start_us, dtype=pl.Float64),
            "end_us": pl.Series(rows.end_us, dtype=pl.Float64),
            "stream": pl.Series(rows.stream, dtype=pl.Int64),
            "kind": pl.Series(rows.kind, dtype=pl.UInt8),
            "name": pl.Series(rows.name, dtype=pl.UInt32),
            "launch_us": pl.Series(rows.launch_us, dtype=pl.Float64),
        }
    ).sort("start_us", maintain_order=True)
    return EventTables(
        device=device,
        names=tuple(rows.names),
        steps=tuple(report.steps),
        spans=tuple(report.spans),
        is_gpu=True,
    )


def _collectives(report: _Report) -> RowBuffer:
    rows = report.rows
    out = RowBuffer(COLLECTIVE_COLUMNS)
    names = tuple(rows.names)
    for index, kind in enumerate(rows.kind):
        if kind != KernelKind.COMMUNICATION:
            continue
        name = names[rows.name[index]]
        dtype = _KERNEL_DTYPE.search(name)
        launch_us = rows.launch_us[index]
        is_launched = launch_us == launch_us  # NaN when unknown
        out.add(
            start_us=rows.start_us[index],
            end_us=rows.end_us[index],
            issue_us=launch_us if is_launched else None,
            issue_tid=report.issues.get(launch_us) if is_launched else None,
            op=op_of_name(name.partition("(")[0]).value,
            dtype=dtype_of_name(dtype[1]) if dtype else "",
            stream=rows.stream[index],
            name=bounded_text(name),
        )
    return out


def _header(database: Database, report: _Report) -> SourceHeader:
    gpus = list(database.select("TARGET_INFO_GPU", ("id", "name", "totalMemory"), MAX_DEVICES))
    device = report.places[0][1] if report.places else None
    mine = next((cells for cells in gpus if cells[0] == device), gpus[0] if gpus else (None, None, None))
    epoch = next(database.select("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",), 1), (None,))[0]
    host = database.named_value("TARGET_INFO_SYSTEM_ENV", "Hostname")
    version = database.named_value("EXPORT_META_DATA", "EXPORT_PRODUCT_VERSION")
    return SourceHeader(
        rank=report.rank,
        host=bounded_text(host, 255) or None,
        backend="nccl" if any("nccl" in name.lower() for name in report.rows.names) else None,
        device_index=bounded_int(device),
        gpus_per_node=len(gpus) or None,
        device_name=bounded_text(mine[1], 200) or None,
        device_memory_bytes=bounded_int(mine[2], 1),
        origin_ns=bounded_int(epoch) or 0,
        remarks={"nsys_version": bounded_text(version, 40)} if version else {},
    )


def _notices(database: Database, report: _Report) -> NoticeList:
    notices = NoticeList()
    notices.warn_of_skipped(report.rows.num_broken, "device rows of Nsight Systems")
    if len(report.places) > 1:
        notices.warn(
            "Q270",
            f"only one of {len(report.places)} pairs of process and device was read, that with the most kernels",
            "let every rank write its own report: nsys profile -o report_%q{RANK}",
        )
    if missing := sorted({_KERNEL, "NVTX_EVENTS", _RUNTIME, "StringIds"} - database.tables.keys()):
        notices.warn(
            "Q271",
            f"the export lacks {', '.join(missing)}; what rests on them is unknown",
            "record with: nsys profile --trace=cuda,nvtx",
        )
    if not report.times_device:
        notices.warn(
            "Q122",
            "no kernel was recorded by its name: nothing is timed on the device",
            "record with: nsys profile --trace=cuda,nvtx",
        )
    elif not report.steps:
        notices.warn(
            NO_STEPS_CODE,
            "no NVTX range marks steps: the whole report counts as one step",
            'mark each step: torch.cuda.nvtx.range_push(f"step {number}")',
        )
    if report.num_graphs:
        notices.warn(
            "Q276",
            f"{plural(report.num_graphs, 'execution')} of CUDA graphs were recorded as wholes: all that runs in them "
            "counts as computing, collectives too",
            "record with: nsys profile --cuda-graph-trace=node",
        )
    if report.num_other_marks:
        notices.info(
            "Q274",
            f"{plural(report.num_other_marks, 'NVTX range')} beside the steps also called steps, and left out of them",
        )
    if database.problem:
        notices.warn("Q272", f"the database is damaged or too complex, reading stopped early: {database.problem}")
    if any(kind == KernelKind.COMMUNICATION for kind in report.rows.kind):
        notices.info("Q273", "Nsight Systems records neither sizes nor groups of collectives, only their times")
    return notices
