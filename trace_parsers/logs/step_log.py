"""What ``paro-advise capture`` writes beside traces: facts of every step of a rank, and of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from paro_advise.core.capture_files import RUN, RUN_FILE, STEP_LOG_PATTERN, STEPS, StepLogHeader, StepRecord
from paro_advise.errors import BrokenInputError, InputError
from paro_advise.trace_parsers.bytes.blocks import BlockReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.bytes.blocks import SourceRef

_MAX_BYTES = 256 << 20
_HEAD = 4096
_MAX_US, _MAX_VALUE = 1e15, 1e150


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of one rank; None for what is unknown.

    Attributes:
        step: number, from 0.
        step_us, overhead_us: wall time, and what of it the capture itself took.
        cpu_us: what the training thread was on a core for.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLog:
    """All steps of one rank, in order.

    Attributes:
        rank, world_size, local_world_size, backend, host, device_memory_bytes: as the rank says.
        machine: the same for ranks under one kernel, whatever their hosts are called.
        cores: that the rank may run on.
        traced: first step in the trace, and the first after it; None where it is not said.
        inputs: shape and type of each tensor in the first call, such as "2x64 torch.int64".
        autocast: type of mixed precision, None without.
        num_broken: lines that could not be read.
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


def is_capture_file(ref: SourceRef) -> bool:
    """Tell whether a file is one that ``capture`` writes beside traces: a step log or ``run.json``."""
    name = ref.file_name
    return is_step_log(ref) or (name == RUN_FILE and f'"{RUN.name}"'.encode() in _head(ref))


def is_step_log(ref: SourceRef) -> bool:
    """Tell whether a file is a step log."""
    name = ref.file_name
    return fnmatchcase(name, STEP_LOG_PATTERN) and f'"{STEPS.name}"'.encode() in _head(ref)


def _head(ref: SourceRef) -> bytes:
    try:
        block: bytes = next(iter(BlockReader(ref)), b"")
    except (InputError, OSError):
        return b""
    return block[:_HEAD]


def read_step_log(ref: SourceRef) -> StepLog:
    """Read a step log; lines that are cut or broken are counted and left out.

    Raises:
        BrokenInputError: the first line is none of ours, or the file is absurdly long.
        InputError: it cannot be read.
    """
    import msgspec

    parts, size = [], 0
    for block in BlockReader(ref):
        parts.append(block)
        size += len(block)
        if size > _MAX_BYTES:
            raise BrokenInputError(f"a step log must be shorter than {_MAX_BYTES >> 20} MiB", where=ref.label)
    lines = b"".join(parts).splitlines()
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=StepLogHeader)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenInputError(f"a step log must begin with its header: {error}", where=ref.label) from error
    rows: dict[int, StepRow] = {}
    broken = 0
    decoder = msgspec.json.Decoder(StepRecord)
    for line in lines[1:]:
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            broken += 1
            continue
        if not _is_possible(found):
            broken += 1
            continue
        rows[found.step] = StepRow(
            step=found.step,
            step_us=found.step_us,
            overhead_us=found.overhead_us,
            cpu_us=found.cpu_us if found.cpu_us is not None and 0 < found.cpu_us < _MAX_US else None,
            profiled=found.profiled,
            micro_batches=found.micro_batches,
            loss=_number(found.loss),
            gradient_norm_squared=_number(found.gradient_norm_squared),
            peak_memory_bytes=found.peak_memory_bytes,
        )
    return StepLog(
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
        rows=tuple(rows[number] for number in sorted(rows)),
        num_broken=broken,
    )


def read_step_logs(refs: Sequence[SourceRef]) -> tuple[tuple[StepLog, ...], tuple[str, ...]]:
    """Read all step logs among some files.

    Returns:
        The logs by rank, and why others could not be read.
    """
    found: dict[int, StepLog] = {}
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
            problems.append(f"{ref.file_name}: {log.num_broken} lines could not be read")
        found[log.rank] = log
    return tuple(found[rank] for rank in sorted(found)), tuple(problems)


def _is_possible(line: StepRecord) -> bool:
    """Tell whether numbers can be those of a step."""
    times = (line.step_us, line.overhead_us)
    counts = (line.step, line.micro_batches, line.peak_memory_bytes)
    return (
        all(value is None or 0 <= value < _MAX_US for value in times)
        and line.step_us != 0
        and all(0 <= value < 1 << 62 for value in counts)
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
    return math.nan if value is not None and not abs(value) < _MAX_VALUE else value
