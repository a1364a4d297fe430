"""The facts of every step of one rank, as lines of JSON: the format ``paro-advise/steps``."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch
import torch.distributed as dist

from paro_advise.core.capture_files import STEPS, StepRecord, step_log_file
from paro_advise.runtime.capture.constants import BATCH_STEPS, MAX_LOGGED_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping


class ProcessFacts(TypedDict):
    """Who a rank is and what it runs on; None where that is not known."""

    rank: int
    world_size: int
    local_world_size: int | None
    backend: str | None
    host: str
    machine: str | None
    cores: int | None
    torch_version: str
    python_version: str
    device_name: str | None
    device_memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingStep:
    """A step whose loss and gradient norm may still be on a device.

    Attributes:
        record: the rest.
        loss, gradient_norm_squared: see StepRecord.
        marks: of its begin and its end on the device; None where there is none.
    """

    record: StepRecord
    loss: float | torch.Tensor | None
    gradient_norm_squared: float | torch.Tensor | None
    marks: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def to_record(self) -> StepRecord:
        """Return the record with its numbers; waits for the device."""
        return replace(
            self.record,
            loss=_number(self.loss),
            gradient_norm_squared=_number(self.gradient_norm_squared),
            device_us=self._device_us(),
        )

    def _device_us(self) -> float | None:
        if self.marks is None:
            return None
        begin, end = self.marks
        with suppress(RuntimeError):  # a script that goes on on another device, between whose events is no time
            end.synchronize()
            passed_ms: float = begin.elapsed_time(end)
            return passed_ms * 1e3
        return None


class StepLog:
    """Writes steps of this rank to ``steps.rank{rank}.jsonl``.

    Args:
        folder: made if needed.
        facts: more about the run for the first line.
    """

    def __init__(self, folder: Path, facts: Mapping[str, object]) -> None:
        self._waiting: list[PendingStep] = []
        self._num_steps = 0
        self._immediate = not torch.cuda.is_available()
        folder.mkdir(parents=True, exist_ok=True)
        process = facts_of_process()
        header = {"format": STEPS.name, "format_version": STEPS.version, **process, **facts}
        self._file = (folder / step_log_file(process["rank"])).open("w", encoding="utf-8")
        self._file.write(json.dumps(header, sort_keys=True) + "\n")
        self._file.flush()

    def add(self, step: PendingStep) -> None:
        """Add a step; nothing is written beyond MAX_LOGGED_STEPS."""
        self._num_steps += 1
        if self._num_steps <= MAX_LOGGED_STEPS:
            self._waiting.append(step)
        if self._immediate or len(self._waiting) >= BATCH_STEPS:
            self.flush()

    def flush(self) -> None:
        """Write the buffered steps."""
        for step in self._waiting:
            self._file.write(json.dumps(asdict(step.to_record()), sort_keys=True) + "\n")
        self._waiting = []
        self._file.flush()

    def close(self) -> None:
        """Write the buffered steps and close the file."""
        if not self._file.closed:
            self.flush()
            self._file.close()


def mark_on_device() -> torch.cuda.Event | None:
    """Return an event that the device reaches when it has done what it was asked to do so far; None without a device.

    Of a CUDA graph that is being captured there is none: events in it tell no time.
    """
    has_device: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not has_device or torch.cuda.is_current_stream_capturing():
        return None
    mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    mark.record()
    return mark


def _number(value: float | torch.Tensor | None) -> float | str | None:
    if isinstance(value, torch.Tensor):
        value = value.item()
    # JSON has no NaN or infinity; such a loss stays visible as a string.
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def facts_of_process() -> ProcessFacts:
    """Return who this rank is and what it runs on."""
    ready = dist.is_available() and dist.is_initialized()
    has_gpu = torch.cuda.is_available()
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return {
        "rank": dist.get_rank() if ready else int(os.environ.get("RANK", "0")),
        "world_size": dist.get_world_size() if ready else int(os.environ.get("WORLD_SIZE", "1")),
        "local_world_size": int(local) if local.isdecimal() else None,
        "backend": str(dist.get_backend()) if ready else None,
        "host": socket.gethostname(),
        "machine": _machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "torch_version": torch.__version__,
        "python_version": sys.version.split()[0],
        "device_name": torch.cuda.get_device_name() if has_gpu else None,
        "device_memory_bytes": torch.cuda.get_device_properties(0).total_memory if has_gpu else None,
    }


def _machine() -> str | None:
    """Return a name that all processes of one kernel share, containers included; None where unknown."""
    with suppress(OSError):
        return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:16]
    return None


def peak_memory_bytes() -> int:
    """Return the peak of the memory in use so far."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
