"""Reads one Kineto (torch profiler) trace of any layout since 2020 into tables."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError, InputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader, SourceRef
from paro_advise.trace_parsers.bytes.chunks import EventChunks
from paro_advise.trace_parsers.constants import MAX_TIME_US
from paro_advise.trace_parsers.kineto.collectives.gloo_spans import gloo_calls, gloo_collectives, gloo_spans
from paro_advise.trace_parsers.kineto.collectives.host_calls import host_calls
from paro_advise.trace_parsers.kineto.collectives.kernels import issued_collectives, kernel_collectives
from paro_advise.trace_parsers.kineto.collectives.runtime_annotations import (
    add_own_collectives,
    own_calls,
    state_threads,
)
from paro_advise.trace_parsers.kineto.collectives.untimed import timed_steps, untimed_us
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import (
    FEW_IMPOSSIBLE,
    FEW_OPERATORS,
    JOINED_CODE,
    LITTLE_WORK_SHARE,
    MAX_BARE_SHARE,
    MAX_DURATION_US,
    MAX_LOST_SHARE,
    MAX_SHIFTED_US,
    MIN_DURATION_US,
    NO_STEPS_CODE,
    ROUNDING_US,
    SHIFT_DIGITS_US,
)
from paro_advise.trace_parsers.kineto.device.device_steps import device_steps, without_stub
from paro_advise.trace_parsers.kineto.device.device_table import device_rows, operator_table
from paro_advise.trace_parsers.kineto.device.memory import phase_peaks
from paro_advise.trace_parsers.kineto.device.passes import kinds_by_launch, kinds_of_rows
from paro_advise.trace_parsers.kineto.event_routes import Detail
from paro_advise.trace_parsers.kineto.header import impossible_rank, rank_in_trace_name, trace_header, trace_metadata
from paro_advise.trace_parsers.kineto.host_rows import sort_host_rows
from paro_advise.trace_parsers.kineto.launches import blocking_calls, lit_steps, needs_operators, num_replayed
from paro_advise.trace_parsers.kineto.phases import (
    SEVERAL_UPDATES,
    PhaseClock,
    backward_passes,
    device_updates,
    extend_passes,
    first_layers,
    forward_passes,
    joined_marks,
    micro_batches,
    num_merged,
    optimizer_spans,
    profiler_steps,
    root_forwards,
    shows_training,
    updates_per_step,
)
from paro_advise.trace_parsers.kineto.rows import KinetoRows
from paro_advise.trace_parsers.notice import NoticeList
from paro_advise.trace_parsers.tables import (
    LINK_SAMPLE_COLUMNS,
    EventTables,
    ParsedSource,
    SourceFile,
    SourceHeader,
    SourceKind,
    empty_table,
)

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    import numpy as np
    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.tables import HostSpan

__all__ = ["rank_in_trace_name", "read_kineto"]

# Without baseTimeNanoseconds, `ts` has 16 digits before the point: more than float64 can hold
# with nanoseconds. The digits that all events share are cut off the text before decoding.
_LONG_TS = re.compile(rb'"ts"\s*:\s*(\d{7})\d{9}(?:\.\d+)?\s*,')
_STEP_SPANS = ("ProfilerStep", "nccl:", "gloo:")


def read_kineto(ref: SourceRef) -> ParsedSource:
    """Read a trace, of runs on GPUs no more host events than it takes.

    Raises:
        BrokenInputError: nothing in it could be read.
        HostileInputError: it expands without bound.
        InputError: it cannot be opened.
    """
    raw = _RawTrace(ref)
    if raw.rows.detail == Detail.LEAN and not len(raw.rows.device.start):
        # A trace from a GPU machine that recorded CPU activities only.
        raw = _RawTrace(ref, Detail.FULL)
    elif len(raw.rows.device.start) and (raw.rows.detail == Detail.FULL or needs_operators(raw.rows)):
        raw = _RawTrace(ref, Detail.OPERATORS)
    raw.reader.finish()
    if not raw.chunks.found_array or raw.rows.num_events == 0:
        raise BrokenInputError(
            "a Kineto trace must hold an array of events, this one holds none that can be read",
            where=ref.label,
            hint="record it again; see `paro-advise explain E303`",
        )
    if raw.rows.num_bare > MAX_BARE_SHARE * raw.rows.num_events:
        raise InputError(
            f"a trace must name the category of its events, {raw.rows.num_bare} of {raw.rows.num_events} have none: "
            "nothing tells what a device did, as in traces of Ascend's own profiler",
            where=ref.label,
            hint="give the traces that torch.profiler writes on CUDA, ROCm, XPU or CPUs",
        )
    return _TableBuilder(raw).build()


class _RawTrace:
    """One trace as read.

    Attributes:
        ref: where it lies.
        reader, chunks: the readers of its bytes and text, with what they lost.
        rows: its events.
        shift_us: what was cut off all times.
    """

    def __init__(self, ref: SourceRef, detail: Detail | None = None) -> None:
        self.ref = ref
        self.reader = BlockReader(ref)
        self.chunks = EventChunks(self.reader)
        self.shift_us = 0
        rows: KinetoRows | None = None
        old, new = b"", b""
        for chunk in self.chunks:
            if rows is None:
                rows = KinetoRows(_default_detail(self.chunks.head) if detail is None else detail)
                old, new = self._learn_shift(chunk)
            rows.add(chunk.replace(old, new) if old else chunk, self.chunks.boundary)
        self.rows = rows or KinetoRows(Detail.FULL)
        if self.shift_us:
            for column in (self.rows.device.start, self.rows.host.start):
                self._shift_rest(column)

    def _learn_shift(self, chunk: bytes) -> tuple[bytes, bytes]:
        """Return the text that leads all times and a short one for it, twice b"" when times are short."""
        found = None if b"baseTimeNanoseconds" in self.chunks.head else _LONG_TS.search(chunk)
        if found is None:
            return b"", b""
        lead = found.group(1)
        self.shift_us = (int(lead) - 1) * SHIFT_DIGITS_US
        return b'"ts": ' + lead, b'"ts": 1'

    def _shift_rest(self, column: array[float]) -> None:
        """Bring events onto the shifted axis whose text had another lead (a roll-over, another layout)."""
        for row, start in enumerate(column):
            if start > MAX_SHIFTED_US:
                column[row] = start - self.shift_us


def _default_detail(head: bytes) -> Detail:
    """Return lean for traces whose metadata describes GPUs."""
    return Detail.LEAN if b'"totalGlobalMem"' in head or b'"numSms"' in head else Detail.FULL


class _TableBuilder:
    """Turns a trace as read into ParsedSource."""

    def __init__(self, raw: _RawTrace) -> None:
        self._raw = raw
        self._rows = raw.rows
        self._label = raw.ref.label
        starts = [min(column) for column in (raw.rows.device.start, raw.rows.host.start) if len(column)]
        first_us = min(starts, default=0.0)
        if not -MAX_TIME_US <= first_us + raw.shift_us <= MAX_TIME_US:
            raise BrokenInputError(
                f"events must begin at times (us) that a clock can show, the first of these begins at {first_us:g}",
                where=self._label,
                hint="record it again; see `paro-advise explain E303`",
            )
        self._origin_us = float(int(first_us))
        self._notices = NoticeList(prefix=f"{raw.ref.file_name}: ")
        self._device_steps: tuple[HostSpan, ...] = ()
        self._updates: list[HostSpan] = []
        self._backward: list[tuple[float, float]] = []
        self._forward: list[tuple[float, float]] = []

    def build(self) -> ParsedSource:
        """Return everything the file gave, with times relative to the first event."""
        import numpy as np

        self._note_losses()
        metadata = trace_metadata(self._raw.chunks)
        if not metadata.is_readable:
            self._notices.warn("Q106", "the metadata before the events could not be read")
        if doubtful := impossible_rank(metadata):
            self._notices.warn("Q113", f"no trace can be of {doubtful}: its rank is taken as the file's name states it")
        host = sort_host_rows(self._rows.host, *self._times(self._rows.host.start, self._rows.host.duration))
        header = trace_header(metadata, self._rows, self._label, self._origin_us + self._raw.shift_us)
        worked_us = np.concatenate([host.start_us[host.kind == HostKind.OPERATOR], self._device_starts()])
        passes = backward_passes(host)
        steps, updates = self._lit(without_stub(profiler_steps(host, passes), worked_us), host), optimizer_spans(host)
        if (merged := num_merged(steps)) > 1:
            raise BrokenInputError(
                f"a trace must hold the events of one process, this one holds the steps of {merged} at the same time",
                where=self._label,
                hint="give each rank's own file, as torch.profiler writes it, or split this one by process",
            )
        cuts = [step.end_us for step in steps] + [update.start_us for update in updates]
        steps = self._timed(self._joined(steps, updates, passes), host)
        self._updates = updates
        passes = extend_passes(host, passes, cuts)
        self._backward, self._forward = passes, forward_passes(host, steps, passes)
        clock = PhaseClock(passes, steps, updates, first_layers(host, passes))
        is_gpu = len(self._rows.device.start) > 0
        if not is_gpu and self._is_device_job(header):
            groups = {group.name: group for group in header.groups}
            calls = host_calls(self._rows.host, self._origin_us)
            counted = issued_collectives(calls, host, clock, groups).table()
            told = "the calls of its collectives are counted" if len(counted) else "no call names its collective"
            self._notices.warn(
                "Q122",
                f"no device activity was recorded: {told}, nothing is timed",
                "record with ProfilerActivity.CUDA as well",
            )
            return self._source(header, counted, None)
        self._note_graphs()
        make_tables = self._gpu_tables if is_gpu else self._cpu_tables
        device, names, collectives = make_tables(host, clock, header, steps)
        if not is_gpu and self._lacks_operators(device, host):
            self._notices.warn(
                "Q123",
                "next to no operators were recorded: collectives are counted, what they overlap cannot be known",
                "record CPU activities of the training thread as well",
            )
            return self._source(header, collectives, None)
        self._note_steps(steps)
        events = EventTables(
            device=device,
            names=names,
            steps=steps,
            spans=tuple(_annotations(host)),
            is_gpu=is_gpu,
            backward_passes=tuple(passes),
            device_steps=self._device_steps,
            blocking_calls=blocking_calls(host),
            records_calls=self._rows.num_calls > 0,
            trains=shows_training(host) if len(host.start_us) else None,
            updates=tuple(device_updates(host)),
            memory_peaks=phase_peaks(self._rows.memory, clock, self._origin_us, is_gpu=is_gpu),
        )
        return self._source(header, collectives, events)

    def _lit(self, steps: tuple[HostSpan, ...], host: HostRows) -> tuple[HostSpan, ...]:
        """Leave out first steps whose kernels are missing, where others are left."""
        import numpy as np

        lit, num_lost = lit_steps(steps, host, np.frombuffer(self._rows.device.correlation, dtype=np.int64))
        if not num_lost:
            return steps
        done = (
            f"{plural(len(steps) - len(lit), 'step is', 'steps are')} left out"
            if lit
            else "idle times come out too long"
        )
        self._notices.warn(
            "Q124",
            f"the device's rows begin late, {plural(num_lost, 'kernel')} launched before the first have none: {done}",
            "give the profiler's schedule a warm-up step",
        )
        return lit or steps

    def _joined(
        self, steps: tuple[HostSpan, ...], updates: Sequence[HostSpan], passes: Sequence[tuple[float, float]]
    ) -> tuple[HostSpan, ...]:
        """Join micro-batches that the script marks as steps to those of the optimizer."""
        found = joined_marks(steps, updates, passes)
        if not found:
            return steps
        many = sum(found[0].start_us <= step.start_us < found[0].end_us for step in steps)
        left = len(steps) - many * len(found)
        rest = f"; {plural(left, 'other is', 'others are')} left out" if left else ""
        self._notices.info(
            JOINED_CODE,
            f"each step of the optimizer spans {many} marked steps, which are its micro-batches: they count as one step"
            + rest,
            "call the profiler's step() after each step of the optimizer",
        )
        return found

    def _timed(self, steps: tuple[HostSpan, ...], host: HostRows) -> tuple[HostSpan, ...]:
        """Leave out steps in which collectives have no time, which would look like idle time, where others are left."""
        raw = self._rows.device
        if not len(raw.start):
            return steps
        calls = partial(host_calls, self._rows.host, self._origin_us)
        lost_us, num_collectives = untimed_us(host, raw, calls, self._origin_us)
        if not len(lost_us):
            return steps
        timed = timed_steps(steps, lost_us)
        told = f"{plural(len(lost_us), 'collective has', 'collectives have')} no time on the device"
        help_ = "record it again; some versions of the profiler lose rows where many come at once"
        if timed:
            if len(timed) < len(steps):
                left_out = plural(len(steps) - len(timed), "step is", "steps are")
                self._notices.warn("Q126", f"{told}: {left_out} left out", help_)
            return timed
        if len(lost_us) <= MAX_LOST_SHARE * num_collectives:
            are = "counts as none" if len(lost_us) == 1 else "count as none"
            self._notices.warn("Q126", f"{told} and {are}", help_)
            return steps
        self._notices.warn("Q108", f"{told}: this trace carries no verdict alone", help_)
        return steps

    def _note_graphs(self) -> None:
        """Say how much communication a graph replays: its one launch stands for all, and names nothing of it."""
        num, total = num_replayed(self._rows)
        if num:
            self._notices.warn(
                "Q125",
                f"{num} of {plural(total, 'communication kernel')} were replayed by CUDA graphs: nothing tells what "
                "issued them, what they send and among which ranks",
                "record a few steps without graphs",
            )

    def _device_starts(self) -> NDArray[np.float64]:
        import numpy as np

        return np.frombuffer(self._rows.device.start, dtype=np.float64) - self._origin_us

    def _is_device_job(self, header: SourceHeader) -> bool:
        """Tell whether a trace without device rows is of a job that ran on devices."""
        names, backend = self._rows.host.names, header.backend or ""
        if any(name.startswith("gloo:") for name in names):
            return False
        if "nccl" in backend or any(name.startswith("nccl:") for name in names):
            return True
        # gloo's own spans are recorded with whatever issues them.
        issues = any(name.startswith("c10d::") for name in names)
        return "gloo" not in backend and (header.device_name is not None or issues)

    def _lacks_operators(self, device: pl.DataFrame, host: HostRows) -> bool:
        """Tell whether the recording holds collectives, but too few operators to be a step of training."""
        busy_us = float((device["end_us"] - device["start_us"]).sum() or 0.0)
        span_us = float(host.end_us.max() - host.start_us.min()) if len(host.start_us) else 0.0
        return len(device) < FEW_OPERATORS and busy_us < LITTLE_WORK_SHARE * span_us and bool(self._rows.host.comm)

    def _source(self, header: SourceHeader, collectives: pl.DataFrame, events: EventTables | None) -> ParsedSource:
        reader = self._raw.reader
        return ParsedSource(
            source=SourceFile(path=self._label, bytes=reader.input_bytes, sha256=reader.sha256, kind=SourceKind.KINETO),
            header=header,
            collectives=collectives,
            link_samples=empty_table(LINK_SAMPLE_COLUMNS),
            events=events,
            num_micro_batches=micro_batches(events.steps, events.spans, events.backward_passes) if events else None,
            num_forwards=root_forwards(events.steps, events.spans) if events else None,
            num_updates=updates_per_step(events.steps, self._updates, events.backward_passes) if events else None,
            notices=self._notices.in_order(),
            num_events=self._rows.num_events,
        )

    def _times(self, start: array[float], duration: array[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return starts from the first event on, and durations with 0 for negative ones."""
        import numpy as np

        starts = np.frombuffer(start, dtype=np.float64) - self._origin_us
        durations = raw_durations = np.frombuffer(duration, dtype=np.float64)
        endless = int((durations > MAX_DURATION_US).sum())
        if endless:
            self._notices.warn("Q107", f"{plural(endless, 'event')} longer than a year, taken as 0 us")
            durations = np.where(durations > MAX_DURATION_US, 0.0, durations)
        negative = int((durations < 0).sum())
        if negative:
            self._notices.warn("Q107", f"{plural(negative, 'event')} of negative duration, taken as 0 us")
            durations = np.maximum(durations, 0.0)
        impossible = endless + int((raw_durations < -ROUNDING_US).sum())
        if impossible > max(FEW_IMPOSSIBLE, MAX_LOST_SHARE * len(durations)):
            self._notices.warn(
                "Q108",
                f"{impossible / len(durations):.0%} of the rows of one kind have impossible durations: "
                "this trace carries no verdict alone",
                "copy the file again, or record it again",
            )
        return starts, np.where(durations < MIN_DURATION_US, 0.0, durations)

    def _gpu_tables(
        self, host: HostRows, clock: PhaseClock, header: SourceHeader, steps: Sequence[HostSpan]
    ) -> tuple[pl.DataFrame, tuple[str, ...], pl.DataFrame]:
        """Return device table, its names and collectives of a run with an accelerator."""
        raw = self._rows.device
        calls = host_calls(self._rows.host, self._origin_us)
        ids = [call.external for call in calls]
        rows = device_rows(raw, *self._times(raw.start, raw.duration), host, ids, self._rows.products.flops)
        groups = {group.name: group for group in header.groups}
        collectives = kernel_collectives(rows.comm_kernels(raw), calls, host, clock, groups)
        self._device_steps = device_steps(steps, rows)
        return rows.table(kinds_of_rows(rows, host, self._forward, self._backward)), rows.names, collectives.table()

    def _cpu_tables(
        self, host: HostRows, clock: PhaseClock, header: SourceHeader, _steps: Sequence[HostSpan]
    ) -> tuple[pl.DataFrame, tuple[str, ...], pl.DataFrame]:
        """Return operator table, its names and collectives of a run without an accelerator."""
        raw = self._rows.host
        own = own_calls(raw, self._origin_us, self._label)
        spans, workers = gloo_spans(raw, self._origin_us, own)
        calls = gloo_calls(raw, self._origin_us, own)
        collectives, unpaired, untimed = gloo_collectives(calls, spans, host, clock, header.groups)
        if unpaired:
            self._notices.warn("Q110", f"{unpaired} gloo spans have no issuing c10d operator")
        if untimed and spans:
            self._notices.warn(
                "Q111", f"{plural(untimed, 'collective')} without a gloo span and therefore without a time"
            )
        unsized = sum(span.dims is None and not span.name.endswith("barrier") for span in spans)
        if unsized:
            self._notices.warn(
                "Q112", f"{plural(unsized, 'collective')} recorded without shapes, of unknown size",
                "record with record_shapes=True",
            )  # fmt: skip
        add_own_collectives(collectives, own, host, clock)
        kinds = partial(kinds_by_launch, forward=self._forward, backward=self._backward)
        return operator_table(host, workers | state_threads(raw), own, kinds), host.names, collectives.table()

    def _note_losses(self) -> None:
        raw, chunks, reader = self._rows, self._raw.chunks, self._raw.reader
        if reader.truncated:
            self._notices.warn("Q101", reader.truncated, "copy the file again")
        if chunks.is_open and chunks.found_array:
            self._notices.warn(
                "Q102",
                f"the trace ends early; {plural(raw.num_events, 'complete event was', 'complete events were')} used",
                "the process was killed while writing, or the disk was full: record it again",
            )
        if raw.num_repaired:
            self._notices.warn("Q103", f"{plural(raw.num_repaired, 'event')} with broken JSON mended")
        if raw.num_dropped:
            lost = plural(raw.num_dropped, "event could not be read and is", "events could not be read and are")
            self._notices.warn("Q104", f"{lost} missing from all figures")
        if raw.num_dropped > MAX_LOST_SHARE * raw.num_events:
            self._notices.warn(
                "Q108",
                f"{raw.num_dropped / raw.num_events:.0%} of the events are lost: this trace carries no verdict alone",
                "copy the file again, or record it again",
            )
        if chunks.lost_bytes:
            self._notices.warn("Q105", f"{plural(chunks.lost_bytes, 'byte')} without an event boundary skipped")

    def _note_steps(self, steps: Sequence[HostSpan]) -> None:
        if not steps:
            self._notices.warn(
                NO_STEPS_CODE,
                "no ProfilerStep marks: the whole trace counts as one step",
                "call prof.step() once per training step while recording",
            )
        elif not steps[0].name.startswith("ProfilerStep"):
            several = ", several to a step, as models train in turn" * steps[0].name.startswith(SEVERAL_UPDATES)
            self._notices.warn("Q121", f"no ProfilerStep marks: steps were cut at the ends of Optimizer.step{several}")


def _annotations(host: HostRows) -> list[HostSpan]:
    """Return the annotations from which phases and owners follow, by start."""
    is_annotation = host.kind == HostKind.ANNOTATION
    named = host.mask_of_names(not name.startswith(_STEP_SPANS) for name in host.names)
    # The oldest traces record annotations as operators.
    loads = host.mask_of_names(name.startswith("enumerate(DataLoader)") for name in host.names)
    return host.select((is_annotation & named) | loads)
