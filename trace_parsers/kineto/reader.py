"""Reads one Kineto (torch profiler) trace of any layout since 2020 into tables."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from paro_advise.errors import BrokenInputError, HostileInputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.bytes.chunks import EventChunks
from paro_advise.trace_parsers.kernel_kinds import KernelKind, kind_of_kernel
from paro_advise.trace_parsers.kineto.collectives import (
    CollectiveRows,
    CommKernel,
    HostCall,
    gloo_collectives,
    kernel_collectives,
)
from paro_advise.trace_parsers.kineto.events import CommArgs, as_int, parse_head
from paro_advise.trace_parsers.kineto.gloo import GlooCall, GlooSpan
from paro_advise.trace_parsers.kineto.phases import (
    HostRows,
    PhaseClock,
    backward_passes,
    micro_batches,
    optimizer_spans,
    profiler_steps,
    with_tails,
)
from paro_advise.trace_parsers.kineto.rows import Detail, HostKind, KinetoRows
from paro_advise.trace_parsers.kineto.runtime_annotations import (
    MAX_NAMED_RANKS,
    OWN_PREFIX,
    OwnCall,
    OwnCalls,
    add_own_collectives,
    own_collective,
    stated_strategy,
)
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.tables import (
    LINK_SAMPLE_COLUMNS,
    EventTables,
    ParsedSource,
    ProcessGroup,
    SourceFile,
    SourceHeader,
    SourceKind,
    empty_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

# Without baseTimeNanoseconds, `ts` has 16 digits before the point: more than float64 can hold
# with nanoseconds. The digits that all events share are cut off the text before decoding.
_LONG_TS = re.compile(rb'"ts"\s*:\s*(\d{7})\d{9}(?:\.\d+)?\s*,')
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z0-9])rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)
_AUTOGRAD_MARKS = ("PreBackwardFunctionForModule", "PostBackwardFunctionModule", "ZeroStage3")
_LONGEST_SHIFTED_US = 1e13
_CALL_NAMES = ("record_param_comms", "paro_param_comms", "c10d::")
_POINT_TO_POINT = ("gloo:send", "gloo:recv", "gloo:recvAnySource", "c10d::send", "c10d::recv_")
# Spans of our runtime's communication threads.
_STATE_SPANS = (f"{OWN_PREFIX}gradient", f"{OWN_PREFIX}optimizer")
_STEP_SPANS = ("ProfilerStep", "nccl:", "gloo:")


def read_kineto(ref: SourceRef, detail: Detail | None = None) -> ParsedSource:
    """Read a trace.

    Args:
        ref: where it lies.
        detail: how much to read; by default lean for GPU runs and full for CPU runs.

    Raises:
        BrokenInputError: nothing in it could be read.
        HostileInputError: it expands without bound.
        InputError: it cannot be opened.
    """
    wanted = detail
    reader, chunks, rows, shift_us = _read_rows(ref, wanted)
    if wanted is None and rows.detail == Detail.LEAN and not len(rows.device.start):
        # A trace from a GPU machine that recorded CPU activities only.
        reader, chunks, rows, shift_us = _read_rows(ref, Detail.FULL)
    elif wanted is None and _lacks_issuers(rows):
        # Older traces link kernels to the host by launches only, which the lean reading skips.
        reader, chunks, rows, shift_us = _read_rows(ref, Detail.LAUNCHES)
    reader.finish()
    if not chunks.found_array or rows.num_events == 0:
        raise BrokenInputError(
            "a Kineto trace must hold an array of events, this one holds none that can be read",
            where=ref.label,
            hint="record it again; see `paro-advise explain E303`",
        )
    source = SourceFile(path=ref.label, bytes=reader.input_bytes, sha256=reader.sha256, kind=SourceKind.KINETO)
    return _Builder(ref, source, reader, chunks, rows, shift_us).build()


def _read_rows(ref: SourceRef, detail: Detail | None) -> tuple[BlockReader, EventChunks, KinetoRows, int]:
    reader = BlockReader(ref)
    chunks = EventChunks(reader)
    rows: KinetoRows | None = None
    shift_us, old, new = 0, b"", b""
    for chunk in chunks:
        if rows is None:
            lean = b'"totalGlobalMem"' in chunks.head or b'"numSms"' in chunks.head
            rows = KinetoRows(detail if detail is not None else (Detail.LEAN if lean else Detail.FULL))
            if b"baseTimeNanoseconds" not in chunks.head and (found := _LONG_TS.search(chunk)):
                lead = found.group(1)
                shift_us = (int(lead) - 1) * 10**9
                old, new = b'"ts": ' + lead, b'"ts": 1'
        rows.add(chunk.replace(old, new) if old else chunk, chunks.boundary)
    rows = rows or KinetoRows(Detail.FULL)
    if shift_us:
        _shift_rest(rows, shift_us)
    return reader, chunks, rows, shift_us


def _shift_rest(rows: KinetoRows, shift_us: int) -> None:
    """Bring events onto the shifted axis whose text had another lead (a roll-over, another layout)."""
    for column in (rows.device.start, rows.host.start):
        for row, start in enumerate(column):
            if start > _LONGEST_SHIFTED_US:
                column[row] = start - shift_us


def _lacks_issuers(rows: KinetoRows) -> bool:
    """Tell whether most communication kernels cannot be linked to their host calls by id."""
    import numpy as np

    if not len(rows.device.start) or not len(rows.host.start):
        return False
    kinds = [kind_of_kernel(name) == KernelKind.COMMUNICATION for name in rows.device.names]
    calls = [name.startswith(_CALL_NAMES) for name in rows.host.names]
    kernels = np.array(rows.device.external)[np.array(kinds)[np.array(rows.device.name)]]
    known = np.array(rows.host.external)[np.array(calls)[np.array(rows.host.name)]]
    return bool(np.isin(kernels, known).sum() < 0.5 * len(kernels))


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file name states, None when it states none."""
    found = _RANK_IN_NAME.search(name)
    return int(found.group(1)) if found else None


class _Builder:
    """Turns raw columns into ParsedSource."""

    def __init__(
        self,
        ref: SourceRef,
        source: SourceFile,
        reader: BlockReader,
        chunks: EventChunks,
        rows: KinetoRows,
        shift_us: int,
    ) -> None:
        self._ref = ref
        self._source = source
        self._raw = rows
        self._shift_us = shift_us
        self._notices: list[Notice] = []
        self._note_losses(reader, chunks)
        self._metadata = self._decode_head(chunks)

    def build(self) -> ParsedSource:
        """Return everything the file gave, with times relative to the first event."""
        origin_us = self._origin_us()
        host = self._host_rows(origin_us)
        header = self._header(origin_us)
        groups = {group.name: group for group in header.groups}
        steps = profiler_steps(host)
        updates = optimizer_spans(host)
        cuts = [step.end_us for step in steps] + [update.start_us for update in updates]
        passes = with_tails(host, backward_passes(host), cuts)
        clock = PhaseClock(passes, steps, updates)
        is_gpu = len(self._raw.device.start) > 0
        spans = host.select(
            (host.kind == HostKind.ANNOTATION) & host.codes(not name.startswith(_STEP_SPANS) for name in host.names)
        )
        if is_gpu:
            device, names, collectives = self._gpu_tables(host, clock, groups, origin_us)
        else:
            device, names, collectives = self._cpu_tables(host, clock, header, origin_us)
        self._note_steps(steps)
        return ParsedSource(
            source=self._source,
            header=header,
            collectives=collectives.table(),
            link_samples=empty_table(LINK_SAMPLE_COLUMNS),
            events=EventTables(
                device=device,
                names=names,
                steps=tuple(steps),
                spans=tuple(spans),
                is_gpu=is_gpu,
                backward_passes=tuple(passes),
            ),
            num_micro_batches=micro_batches(steps, spans, passes),
            notices=tuple(self._notices),
            num_events=self._raw.num_events,
        )

    def _note(self, code: str, message: str, help_text: str = "", severity: Severity = Severity.WARNING) -> None:
        self._notices.append(
            Notice(code=code, severity=severity, message=f"{self._ref.file_name}: {message}", help=help_text)
        )

    def _note_losses(self, reader: BlockReader, chunks: EventChunks) -> None:
        raw = self._raw
        if reader.truncated:
            self._note("Q101", reader.truncated, "copy the file again")
        if chunks.is_open and chunks.found_array:
            self._note(
                "Q102",
                f"the trace ends early; {raw.num_events} complete events were used",
                "the process was killed while writing, or the disk was full: record it again",
            )
        if raw.num_repaired:
            self._note("Q103", f"{raw.num_repaired} events with broken JSON were mended")
        if raw.num_dropped:
            self._note("Q104", f"{raw.num_dropped} events could not be read and are missing from all figures")
        if chunks.lost_bytes:
            self._note("Q105", f"{chunks.lost_bytes} bytes without an event boundary were skipped")

    def _decode_head(self, chunks: EventChunks) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        if chunks.head.strip(b" \r\n\t{,"):
            head = parse_head(chunks.head)
            if head is None:
                self._note("Q106", "the metadata before the events could not be read")
            else:
                metadata = head
        closing = chunks.tail.find(b"]")
        tail = chunks.tail[closing + 1 :].strip().rstrip(b"\0 \n}").lstrip(b", \n")
        if closing >= 0 and tail.startswith(b'"'):
            metadata = {**(parse_head(tail) or {}), **metadata}
        return metadata

    def _origin_us(self) -> float:
        starts = [min(column) for column in (self._raw.device.start, self._raw.host.start) if len(column)]
        return float(int(min(starts))) if starts else 0.0

    def _host_rows(self, origin_us: float) -> HostRows:
        import numpy as np

        raw = self._raw.host
        start = np.frombuffer(raw.start, dtype=np.float64) - origin_us
        duration = np.frombuffer(raw.duration, dtype=np.float64)
        order = np.lexsort((-duration, start))
        return HostRows(
            start_us=start[order],
            end_us=(start + self._checked(duration))[order],
            tid=np.frombuffer(raw.tid, dtype=np.int32)[order],
            name=np.frombuffer(raw.name, dtype=np.uint32)[order],
            kind=np.frombuffer(raw.kind, dtype=np.int8)[order],
            external=np.frombuffer(raw.external, dtype=np.int64)[order],
            sequence=np.frombuffer(raw.sequence, dtype=np.int64)[order],
            correlation=np.frombuffer(raw.correlation, dtype=np.int64)[order],
            names=tuple(raw.names.values_in_order()),
        )

    def _checked(self, duration: NDArray[np.float64]) -> NDArray[np.float64]:
        import numpy as np

        negative = int((duration < 0).sum())
        if negative:
            self._note("Q107", f"{negative} events have a negative duration; it was taken as 0")
            return np.maximum(duration, 0.0)
        return duration

    def _gpu_tables(
        self, host: HostRows, clock: PhaseClock, groups: dict[str, ProcessGroup], origin_us: float
    ) -> tuple[pl.DataFrame, tuple[str, ...], CollectiveRows]:
        import numpy as np
        import polars as pl

        raw = self._raw.device
        names = tuple(raw.names.values_in_order())
        start = np.frombuffer(raw.start, dtype=np.float64) - origin_us
        end = start + self._checked(np.frombuffer(raw.duration, dtype=np.float64))
        code = np.frombuffer(raw.name, dtype=np.uint32)
        external = np.frombuffer(raw.external, dtype=np.int64)
        stream = np.frombuffer(raw.stream, dtype=np.int64)
        kind = np.array([kind_of_kernel(name) for name in names], dtype=np.uint8)[code]
        args = dict(raw.comm)
        calls = self._host_calls(origin_us)
        if args:
            kind[np.fromiter(args, dtype=np.int64, count=len(args))] = KernelKind.COMMUNICATION
        comms = np.array([call.external for call in calls if call.external >= 0], dtype=np.int64)
        # Copy-engine collectives run as peer copies inside a recorded collective.
        is_peer_copy = np.array(["PtoP" in name or "Peer" in name for name in names], dtype=bool)
        if is_peer_copy.any() and len(comms):
            kind[is_peer_copy[code] & np.isin(external, comms)] = KernelKind.COMMUNICATION
        rows = np.flatnonzero(kind == KernelKind.COMMUNICATION).tolist()
        kernels = [
            CommKernel(
                start_us=float(start[row]),
                end_us=float(end[row]),
                stream=int(stream[row]),
                name=names[code[row]],
                external=int(external[row]),
                args=args.get(row),
            )
            for row in rows
        ]
        launch, launch_tid = self._launch_times(host)
        launched = [(float(launch[row]), int(launch_tid[row])) for row in rows]
        order = sorted(range(len(kernels)), key=lambda index: kernels[index].start_us)
        collectives = kernel_collectives(
            [kernels[index] for index in order],
            [launched[index] for index in order],
            calls,
            host,
            clock,
            groups,
        )
        device = pl.DataFrame(
            {
                "start_us": start,
                "end_us": end,
                "stream": stream,
                "kind": kind,
                "name": code,
                "launch_us": launch,
            }
        ).sort("start_us", maintain_order=True)
        return device, names, collectives

    def _launch_times(self, host: HostRows) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Return each device row's launch time and thread on the host, NaN and -1 without runtime rows."""
        import numpy as np

        correlation = np.frombuffer(self._raw.device.correlation, dtype=np.int64)
        out = np.full(len(correlation), np.nan)
        tids = np.full(len(correlation), -1, dtype=np.int32)
        runtime = np.flatnonzero((host.kind == HostKind.RUNTIME) & (host.correlation >= 0))
        if not len(runtime):
            return out, tids
        ids = host.correlation[runtime]
        order = np.argsort(ids, kind="stable")
        place = np.minimum(np.searchsorted(ids[order], correlation), len(ids) - 1)
        found = (ids[order][place] == correlation) & (correlation >= 0)
        out[found] = host.start_us[runtime][order][place][found]
        tids[found] = host.tid[runtime][order][place][found]
        return out, tids

    def _host_calls(self, origin_us: float) -> list[HostCall]:
        raw = self._raw.host
        codes = raw.names.values_in_order()
        calls = []
        for row, args in raw.comm:
            name = codes[raw.name[row]]
            if name.startswith((*_CALL_NAMES, "nccl:")):
                begin = raw.start[row] - origin_us
                calls.append(
                    HostCall(
                        start_us=begin,
                        end_us=begin + max(0.0, raw.duration[row]),
                        tid=raw.tid[row],
                        name=name,
                        external=raw.external[row],
                        args=args,
                    )
                )
        return calls

    def _cpu_tables(
        self, host: HostRows, clock: PhaseClock, header: SourceHeader, origin_us: float
    ) -> tuple[pl.DataFrame, tuple[str, ...], CollectiveRows]:
        raw = self._raw.host
        codes = raw.names.values_in_order()
        threads = raw.tids.values_in_order()
        spans = []
        workers: set[int] = set()
        own = self._own_calls(origin_us)
        states = {code for code, name in enumerate(codes) if name.startswith(_STATE_SPANS)}
        if states:
            workers.update(tid for tid, code in zip(raw.tid, raw.name, strict=True) if code in states)
        for row, args in raw.comm:
            name = codes[raw.name[row]]
            begin = raw.start[row] - origin_us
            if name.startswith("gloo:") and not (name in _POINT_TO_POINT and own.covers(begin)):
                spans.append(self._gloo_span(name, begin, raw.duration[row], threads[raw.tid[row]], args))
                if name not in _POINT_TO_POINT:
                    workers.add(raw.tid[row])
        spans.sort(key=lambda span: span.start_us)
        calls = sorted(
            (
                GlooCall(start_us=call.start_us, tid=call.tid, name=call.name, dims=call.args.input_dims)
                for call in self._host_calls(origin_us)
                if call.name.startswith("c10d::") and not (call.name in _POINT_TO_POINT and own.covers(call.start_us))
            ),
            key=lambda call: call.start_us,
        )
        collectives, unpaired, untimed = gloo_collectives(calls, spans, host, clock, header.groups)
        if unpaired:
            self._note("Q110", f"{unpaired} gloo spans have no issuing c10d operator")
        if untimed and spans:
            self._note("Q111", f"{untimed} collectives have no gloo span and therefore no time")
        add_own_collectives(collectives, own, host, clock)
        return (*_cpu_compute(host, workers, own), collectives)

    def _own_calls(self, origin_us: float) -> OwnCalls:
        raw = self._raw.host
        codes = raw.names.values_in_order()
        named = {code: what for code, name in enumerate(codes) if (what := own_collective(name)) is not None}
        if not named:
            return OwnCalls(())
        if sum(len(what.ranks) for what in named.values()) > MAX_NAMED_RANKS:
            raise HostileInputError(
                f"the names of a trace's collectives must list at most {MAX_NAMED_RANKS:,} ranks, these list more",
                where=self._ref.label,
            )
        return OwnCalls(
            OwnCall(
                start_us=raw.start[row] - origin_us,
                end_us=raw.start[row] - origin_us + max(0.0, raw.duration[row]),
                tid=raw.tid[row],
                what=named[code],
            )
            for row, code in enumerate(raw.name)
            if code in named
        )

    @staticmethod
    def _gloo_span(name: str, begin: float, duration: float, thread: Any, args: CommArgs) -> GlooSpan:
        types = args.input_type if isinstance(args.input_type, list) else []
        dtype = next((item for item in types if isinstance(item, str) and item), "")
        return GlooSpan(
            start_us=begin,
            end_us=begin + max(0.0, duration),
            thread=thread if isinstance(thread, int) else -1,
            name=name,
            dims=args.input_dims,
            dtype=dtype.removeprefix("TensorList[").rstrip("]"),
        )

    def _note_steps(self, steps: Sequence[Any]) -> None:
        if not steps:
            self._note(
                "Q120",
                "no ProfilerStep marks: the whole trace counts as one step",
                "call prof.step() once per training step while recording",
            )
        elif not steps[0].name.startswith("ProfilerStep"):
            self._note("Q121", "no ProfilerStep marks: steps were cut at the ends of Optimizer.step")

    def _header(self, origin_us: float) -> SourceHeader:
        info = self._metadata.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        devices = self._metadata.get("deviceProperties")
        devices = [item for item in devices if isinstance(item, dict)] if isinstance(devices, list) else []
        rank, rank_source = as_int(info.get("rank")), "content"
        if rank is None:
            rank, rank_source = rank_in_name(self._ref.label), "name"
        world_size = as_int(info.get("world_size"))
        base_ns = as_int(self._metadata.get("baseTimeNanoseconds")) or 0
        return SourceHeader(
            rank=rank,
            rank_source=rank_source if rank is not None else "",
            world_size=world_size if world_size and 0 < world_size < 1 << 24 else None,
            host=_text(self._metadata.get("host_name")),
            backend=_text(info.get("backend")),
            device_index=self._device_index(),
            gpus_per_node=len(devices) or None,
            device_name=_text(devices[0].get("name")) if devices else None,
            device_memory_bytes=as_int(devices[0].get("totalGlobalMem")) if devices else None,
            nccl_version=_text(info.get("nccl_version")),
            origin_ns=base_ns + int((origin_us + self._shift_us) * 1000),
            groups=_groups(info.get("pg_config")),
            autograd_marks=self._autograd_marks(),
            stated=stated_strategy(self._raw.host.names),
        )

    def _autograd_marks(self) -> tuple[str, ...]:
        return tuple(sorted({mark for name in self._raw.host.names for mark in _AUTOGRAD_MARKS if mark in name}))

    def _device_index(self) -> int | None:
        for _, args in self._raw.device.comm[:1]:
            return as_int(args.device)
        return None


def _text(value: Any) -> str | None:
    return str(value)[:200] if value not in (None, "") else None


def _groups(config: Any) -> tuple[ProcessGroup, ...]:
    """Return the process groups of ``pg_config`` (a list, or text in some versions)."""
    out = []
    for item in config if isinstance(config, list) else []:
        if not isinstance(item, dict):
            continue
        ranks = item.get("ranks")
        members = (
            tuple(rank for rank in (as_int(value) for value in ranks) if rank is not None)
            if isinstance(ranks, list)
            else ()
        )
        size = as_int(item.get("pg_size")) or len(members)
        out.append(
            ProcessGroup(
                name=str(item.get("pg_name", "")),
                description=str(item.get("pg_desc", "")),
                ranks=members if len(members) == size else (),
                size=size,
            )
        )
    return tuple(out)


def _cpu_compute(host: HostRows, workers: set[int], own: OwnCalls) -> tuple[pl.DataFrame, tuple[str, ...]]:
    """Return the operators that compute on a CPU run, one row each, as device rows.

    gloo's worker threads compute for the collective, not for the model, and so do operators inside a
    collective of our runtime. Containers (autograd nodes, c10d calls) hold waiting; only operators
    outside them count.
    """
    import numpy as np
    import polars as pl

    def computes(name: str) -> bool:
        head = name.partition("::")[0]
        return "::" in name and head not in (
            "c10d",
            "_c10d_functional",
            "autograd",
            "torch",
            "record_param_comms",
            "paro_advise",
        )

    def waits(name: str) -> bool:
        return name.startswith(("c10d::", "_c10d_functional::"))

    on_worker = np.isin(host.tid, list(workers)) if workers else np.zeros(len(host.tid), dtype=bool)
    operator = (host.kind == HostKind.OPERATOR) & ~on_worker & ~own.mask(host)
    busy = operator & host.codes(computes(name) for name in host.names)
    waiting = operator & host.codes(waits(name) for name in host.names)
    rows = np.flatnonzero(busy | waiting)
    kind = np.where(waiting[rows], KernelKind.SYNC, KernelKind.COMPUTE).astype(np.uint8)
    device = pl.DataFrame(
        {
            "start_us": host.start_us[rows],
            "end_us": host.end_us[rows],
            "stream": host.tid[rows].astype(np.int64),
            "kind": kind,
            "name": host.name[rows],
            "launch_us": np.full(len(rows), np.nan),
        }
    )
    return device, host.names
