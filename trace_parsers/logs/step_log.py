"""What ``paro-advise capture`` writes beside traces: facts of every step of a rank, and of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paro_advise.core.capture_files import (
    REQUEST_FILE,
    RUN,
    RUN_FILE,
    STEP_LOG_PATTERN,
    STEPS,
    STEPS_FILE,
    StepLogHeader,
    StepRecord,
)
from paro_advise.core.plural import plural
from paro_advise.errors import BrokenInputError, InputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader
from paro_advise.trace_parsers.logs.constants import LOG_HEAD_BYTES, MAX_COUNT, MAX_STEP_LOG_BYTES, MAX_US, MAX_VALUE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.bytes.blocks import SourceRef


_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_DECODE_RECORD = msgspec.json.Decoder(StepRecord)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one rank; None for what is unknown.

    Attributes:
        step: number, from 0.
        step_us, overhead_us: wall time, and what of it the capture itself took.
        cpu_us: what the training thread was on a core for.
        device_us: time of the step on the device, whose host may be ahead; None on a CPU.
        profiled: the profiler ran or was just writing.
        micro_batches: backward passes.
        loss: sum of what they started from.
        gradient_norm_squared: this rank's share; all ranks' sum is the model's.
        peak_memory_bytes: the most so far.
    """

    step: int
    step_us: float | None
    overhead_us: float
    cpu_us: float | None
    profiled: bool
    micro_batches: int
    loss: float | None
    gradient_norm_squared: float | None
    peak_memory_bytes: int
    device_us: float | None = None

    @property
    def pace_us(self) -> float | None:
        """Return what training took for the step: the device's time where there is one."""
        return self.step_us if self.device_us is None else self.device_us


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSteps:
    """All steps of one rank, in order.

    Attributes:
        rank, world_size, local_world_size, backend, host, device_memory_bytes: as the rank says.
        machine: the same for ranks under one kernel, whatever their hosts are called.
        cores: that the rank may run on.
        traced: first step in the trace, and the first after it; None where it is not said.
        inputs: shape and type of each tensor in the first call, such as "2x64 torch.int64".
        autocast: type of mixed precision, None without.
        num_broken: lines that could not be read.
        folder: in which it lies, as people are shown it.
    """

    rank: int
    world_size: int
    local_world_size: int | None
    backend: str | None
    host: str | None
    machine: str | None
    cores: int | None
    device_name: str | None
    device_memory_bytes: int | None
    torch_version: str | None
    traced: tuple[int, int] | None
    inputs: tuple[str, ...]
    autocast: str | None
    rows: tuple[StepRow, ...]
    num_broken: int
    folder: str = ""


def folder_of(label: str) -> str:
    """Return the folder, of a machine, an archive or a store, in which an input lies that is shown by a name.

    It is the same however the name was given, from the folder that the process is in or from the root.
    """
    folder = label.replace("\\", "/").rpartition("/")[0]
    return folder if "://" in folder else str(Path(folder).resolve())


def is_capture_file(ref: SourceRef) -> bool:
    """Tell whether a file is one that ``capture`` writes beside traces: a step log or ``run.json``, or about one."""
    name = ref.file_name
    return (
        name in (REQUEST_FILE, STEPS_FILE)
        or is_step_log(ref)
        or (name == RUN_FILE and f'"{RUN.name}"'.encode() in _head(ref))
    )


def is_step_log(ref: SourceRef) -> bool:
    """Tell whether a file is a step log."""
    name = ref.file_name
    return fnmatchcase(name, STEP_LOG_PATTERN) and f'"{STEPS.name}"'.encode() in _head(ref)


def _head(ref: SourceRef) -> bytes:
    try:
        block: bytes = next(iter(BlockReader(ref)), b"")
    except (InputError, OSError):
        return b""
    return block[:LOG_HEAD_BYTES]


def read_step_log(ref: SourceRef) -> LoggedSteps:
    """Read a step log; lines that are cut or broken are counted and left out.

    Raises:
        BrokenInputError: the first line is none of ours, or the file is absurdly long.
        InputError: it cannot be read.
    """
    lines = _lines(ref)
    header = _decode_header(lines[0] if lines else b"", ref)
    rows, num_broken = step_rows(lines[1:])
    return LoggedSteps(
        rank=header.rank,
        world_size=header.world_size,
        local_world_size=header.local_world_size,
        backend=header.backend,
        host=header.host,
        machine=header.machine,
        cores=header.cores if header.cores and header.cores > 0 else None,
        device_name=header.device_name,
        device_memory_bytes=header.device_memory_bytes,
        torch_version=header.torch_version,
        traced=header.steps,
        inputs=tuple(f"{_shape(shape)} {dtype}" for shape, dtype in header.inputs),
        autocast=header.autocast,
        rows=rows,
        num_broken=num_broken,
        folder=folder_of(ref.label),
    )


def step_rows(lines: Sequence[bytes]) -> tuple[tuple[StepRow, ...], int]:
    """Return the steps in lines of a step log behind its first one, in order, and how many lines could not be read."""
    records = [_decode_record(line) for line in lines]
    rows = {record.step: _step_row(record) for record in records if record is not None}
    return tuple(rows[number] for number in sorted(rows)), records.count(None)


def _lines(ref: SourceRef) -> list[bytes]:
    parts, size = [], 0
    for block in BlockReader(ref):
        parts.append(block)
        size += len(block)
        if size > MAX_STEP_LOG_BYTES:
            raise BrokenInputError(f"a step log must be shorter than {MAX_STEP_LOG_BYTES >> 20} MiB", where=ref.label)
    return b"".join(parts).splitlines()


def _decode_header(line: bytes, ref: SourceRef) -> StepLogHeader:
    try:
        return msgspec.json.decode(line, type=StepLogHeader)
    except _DECODE_ERRORS as error:
        raise BrokenInputError(f"a step log must begin with its header: {error}", where=ref.label) from error


def _decode_record(line: bytes) -> StepRecord | None:
    """Return the facts of a step, None for a line that is cut, broken or impossible."""
    try:
        record = _DECODE_RECORD.decode(line)
    except _DECODE_ERRORS:
        return None
    return record if _is_possible(record) else None


def _step_row(record: StepRecord) -> StepRow:
    cpu_us, device_us = record.cpu_us, record.device_us
    return StepRow(
        step=record.step,
        step_us=record.step_us,
        overhead_us=record.overhead_us,
        cpu_us=cpu_us if cpu_us is not None and 0 < cpu_us < MAX_US else None,
        device_us=device_us if device_us is not None and 0 < device_us < MAX_US else None,
        profiled=record.profiled,
        micro_batches=record.micro_batches,
        loss=_number(record.loss),
        gradient_norm_squared=_number(record.gradient_norm_squared),
        peak_memory_bytes=record.peak_memory_bytes,
    )


def read_step_logs(refs: Sequence[SourceRef]) -> tuple[tuple[LoggedSteps, ...], tuple[str, ...]]:
    """Read all step logs among some files.

    Returns:
        The logs by rank, those of several jobs too, and why others could not be read.
    """
    logs = []
    problems = []
    for ref in refs:
        if not is_step_log(ref):
            continue
        try:
            log = read_step_log(ref)
        except InputError as error:
            problems.append(f"{ref.file_name} could not be used: {error.what}")
            continue
        if log.num_broken:
            problems.append(f"{ref.file_name}: {plural(log.num_broken, 'line')} could not be read")
        logs.append(log)
    return tuple(sorted(logs, key=lambda log: log.rank)), tuple(problems)


def _is_possible(line: StepRecord) -> bool:
    """Tell whether numbers can be those of a step."""
    times = (line.step_us, line.overhead_us)
    counts = (line.step, line.micro_batches, line.peak_memory_bytes)
    return (
        all(value is None or 0 <= value < MAX_US for value in times)
        and line.step_us != 0
        and all(0 <= value < MAX_COUNT for value in counts)
    )


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _number(value: float | str | None) -> float | None:
    """Return a number; infinities and NaN come as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return math.nan if value is not None and not abs(value) < MAX_VALUE else value
