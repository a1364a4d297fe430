"""The files that a capture writes for each rank, as the runtime writes and the parsers read them."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.documents import Format

if TYPE_CHECKING:
    from pathlib import Path

STEPS = Format(name="paro-advise/steps", version="1.3")
RUN = Format(name="paro-advise/run", version="1.2")
RUN_FILE = "run.json"
TRACE_PATTERN = "rank*.json.gz"
PROCESS_TRACE_PATTERN = "process*.json.gz"
STEP_LOG_PATTERN = "steps.rank*.jsonl"
# In a capture's folder: what is asked of a running job, and which steps its rank 0 has chosen for it.
REQUEST_FILE, STEPS_FILE = "record.wanted.json", "record.decided.json"


def recordings_folder(capture: Path) -> Path:
    """Return where recordings that were asked for lie: beside the capture, whose own traces they must not mix with."""
    whole = capture.absolute()
    return whole.with_name(f"{whole.name}.recordings")


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that another process waits for; the name on the way is one that nobody can have put a link under.

    Raises:
        OSError: its folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.replace(file.name, path)  # noqa: PTH105 - one of the two is a text
        except BaseException:
            os.unlink(file.name)  # noqa: PTH108 - a text
            raise


def trace_file(rank: int) -> str:
    """Return the name of a rank's trace."""
    return f"rank{rank}.json.gz"


def process_trace_file(number: int, host: str) -> str:
    """Return the name of the trace of a process whose rank nobody knows."""
    return f"process{number}.{re.sub('[^A-Za-z0-9-]', '-', host)}.json.gz"


def step_log_file(rank: int) -> str:
    """Return the name of a rank's step log: a header line, then one line a step."""
    return f"steps.rank{rank}.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRequest:
    """A recording that a running job is asked for.

    Attributes:
        name: of the folder for its traces, inside that of recordings.
        count: steps.
        ranks: that record, as ``capture --ranks`` takes them.
    """

    name: str
    count: int
    ranks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSteps:
    """The steps of such a recording.

    Attributes:
        name, ranks: see RecordingRequest.
        first, last: the first step that is recorded, and the one after the last.
    """

    name: str
    ranks: str
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of one rank; None for what cannot be known.

    Attributes:
        step: its number, from 0.
        step_us: from the end of the step before to its own.
        overhead_us: of these, spent by the capture itself.
        cpu_us: what the thread that ends steps was on a core for, the capture's own part included.
        device_us: from the end of the step before to its own as the device came to them, whose host may be steps ahead.
        profiled: the profiler ran, or other ranks may still have written their traces.
        micro_batches: backward passes.
        loss: sum of what the backward passes started from; NaN and infinities as text.
        gradient_norm_squared: this rank's share of the squared norm, before clipping; the sum over all ranks
            is that of the whole model.
        peak_memory_bytes: the most so far: allocated on a GPU, resident on a CPU.
    """

    step: int
    step_us: float | None
    overhead_us: float
    profiled: bool
    micro_batches: int
    loss: float | str | None
    gradient_norm_squared: float | str | None
    peak_memory_bytes: int
    cpu_us: float | None = None
    device_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogHeader:
    """What a rank says about itself; None where it cannot know.

    Attributes:
        local_world_size: ranks of its node, as the launcher said.
        machine: the same for ranks under one kernel, whatever their hosts are called.
        cores: that the rank may run on.
        steps: first step in the trace, and the first after it.
        inputs: shape and type of each tensor in the first call.
        autocast: type of mixed precision.
    """

    format: str
    rank: int
    world_size: int
    format_version: str = ""
    local_world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    machine: str | None = None
    cores: int | None = None
    device_name: str | None = None
    device_memory_bytes: int | None = None
    torch_version: str | None = None
    steps: tuple[int, int] | None = None
    inputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    autocast: str | None = None
