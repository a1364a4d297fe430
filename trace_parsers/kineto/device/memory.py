"""Allocated memory over time, from the profiler's `[memory]` events (`profile_memory=True`)."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import msgspec

from paro_advise.trace_parsers.kineto.constants import CPU_DEVICE_TYPE, MAX_ALLOCATED_BYTES
from paro_advise.trace_parsers.kineto.events import DECODE_ERRORS, as_float, as_int

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paro_advise.trace_parsers.kineto.phases import PhaseClock


class _MemoryArgs(msgspec.Struct, gc=False):
    allocated: object = msgspec.field(name="Total Allocated", default=None)
    device_type: object = msgspec.field(name="Device Type", default=None)


class _MemoryEvent(msgspec.Struct, gc=False):
    ts: object = None
    args: _MemoryArgs | None = None


_DECODE = msgspec.json.Decoder(list[_MemoryEvent])


class MemoryColumns:
    """When how much was allocated on which type of device; times in us as recorded."""

    def __init__(self) -> None:
        self.time = array("d")
        self.allocated = array("q")
        self.on_cpu = array("b")

    def extend(self, joined: bytes) -> None:
        """Add events from ``[{...},{...}]``; what cannot be read says nothing about memory."""
        try:
            events = _DECODE.decode(joined)
        except DECODE_ERRORS:
            return
        for event in events:
            time, args = as_float(event.ts), event.args
            allocated = as_int(args.allocated) if args else None
            if time is None or args is None or allocated is None or not 0 <= allocated <= MAX_ALLOCATED_BYTES:
                continue
            self.time.append(time)
            self.allocated.append(allocated)
            self.on_cpu.append(as_int(args.device_type) == CPU_DEVICE_TYPE)


def phase_peaks(
    columns: MemoryColumns, clock: PhaseClock, origin_us: float, *, is_gpu: bool
) -> dict[int, dict[str, int]]:
    """Return the most that was allocated in each phase of each step; phases without an event are left out.

    Args:
        columns: as collected.
        clock: of the host, on which allocations happen.
        origin_us: from which its times count.
        is_gpu: whether the device's memory counts, or the host's.
    """
    out: dict[int, dict[str, int]] = {}
    rows: Iterable[tuple[float, int, int]] = zip(columns.time, columns.allocated, columns.on_cpu, strict=True)
    for time, allocated, on_cpu in rows:
        if bool(on_cpu) == is_gpu:
            continue
        step = clock.step_of(time - origin_us)
        if step < 0:
            continue
        phase = clock.phase(time - origin_us) or "unknown"
        peaks = out.setdefault(step, {})
        peaks[phase] = max(peaks.get(phase, 0), allocated)
    return out
