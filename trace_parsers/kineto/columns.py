"""Columns of numbers that the rows of a trace are collected in; times in us as recorded."""

from __future__ import annotations

from array import array
from collections import defaultdict
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, TypeVar

from paro_advise.trace_parsers.kernel_kinds import KernelKind, kind_of_kernel
from paro_advise.trace_parsers.kineto.events import (
    CommArgs,
    as_float,
    as_id,
    as_int,
    decode_device,
    decode_host,
    decode_timed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.events import AnyEvent, DescribedEvent

_Value = TypeVar("_Value")
# "Trace" rows say how long the profiler itself ran.
_UNTIMED_CATEGORIES = (None, "Trace")


class HostKind(IntEnum):
    """What a host row is; the value is what the ``kind`` column holds."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2
    PYTHON = 3
    DEVICE_SPAN = 4  # an annotation as the device ran what was launched inside it


class Codes(defaultdict[_Value, int], Generic[_Value]):
    """Dense integer codes for values, in order of first sight."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def values_in_order(self) -> list[_Value]:
        """Return the coded values; the code is the index."""
        return list(self)


class DeviceColumns:
    """Columns of device rows: kernels, copies, sets, synchronisations."""

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.stream = array("q")
        self.name = array("I")
        self.external = array("q")
        self.correlation = array("q")
        self.names: Codes[str] = Codes()
        self.comm: list[tuple[int, CommArgs]] = []  # (row, arguments)

    def are_of_communication(self) -> NDArray[np.bool_]:
        """Mark the rows that are kernels of communication."""
        import numpy as np

        kinds = (kind_of_kernel(name) == KernelKind.COMMUNICATION for name in self.names)
        table = np.fromiter(kinds, dtype=bool, count=len(self.names))
        found: NDArray[np.bool_] = table[np.array(self.name)]
        return found

    def extend(self, joined: bytes, count: int) -> list[int]:
        """Append kernels and copies from ``[{...},{...}]``, ``count`` of them; all or nothing.

        Returns:
            The places of rows that describe a collective: these need all their arguments and
            are left out.

        Raises:
            msgspec.DecodeError, OverflowError, RecursionError: the caller salvages one by one.
        """
        events, args = decode_device(joined, count)
        described = [place for place, item in enumerate(args) if item.collective is not None]
        for place in reversed(described):
            del events[place], args[place]
        codes = self.names
        self.start.fromlist([event.ts for event in events])
        self.duration.fromlist([event.dur for event in events])
        self.name.fromlist([codes[event.name] for event in events])
        _add_ids(self.stream, [item.stream for item in args])
        _add_ids(self.external, [item.external_id for item in args])
        _add_ids(self.correlation, [item.correlation for item in args])
        return described

    def append(self, event: AnyEvent | DescribedEvent, args: CommArgs, start: float, duration: float) -> None:
        """Append one row of any shape."""
        if args.collective is not None:
            self.comm.append((len(self.start), args))
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(self.names[str(event.name)])
        stream = as_int(args.stream)
        self.stream.append(as_id(stream if stream is not None else event.tid))
        self.external.append(as_id(args.external_id))
        self.correlation.append(as_id(args.correlation))


class HostColumns:
    """Columns of host rows: operators, annotations, runtime calls."""

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.tid = array("i")
        self.name = array("I")
        self.kind = array("b")
        self.external = array("q")
        self.sequence = array("q")
        self.correlation = array("q")
        self.names: Codes[str] = Codes()
        self.tids: Codes[int | str | None] = Codes()
        self.comm: list[tuple[int, CommArgs]] = []  # (row, arguments)

    def extend(self, joined: bytes, count: int, kind: int) -> None:
        """Append plain host rows of one kind; all or nothing (see DeviceColumns.extend)."""
        events, args = decode_host(joined, count)
        codes, tids = self.names, self.tids
        self.start.fromlist([event.ts for event in events])
        self.duration.fromlist([event.dur for event in events])
        self.tid.fromlist([tids[event.tid] for event in events])
        self.name.fromlist([codes[event.name] for event in events])
        self.kind.extend(array("b", [kind]) * len(events))
        _add_ids(self.external, [item.external_id for item in args])
        _add_ids(self.sequence, [item.sequence for item in args])
        _add_ids(self.correlation, [item.correlation for item in args])

    def append(
        self, event: AnyEvent | DescribedEvent, args: CommArgs, kind: int, start: float, duration: float
    ) -> None:
        """Append one row of any shape."""
        if args.collective is not None or args.input_dims is not None:
            self.comm.append((len(self.start), args))
        self.start.append(start)
        self.duration.append(duration)
        tid = event.tid if isinstance(event.tid, int | str) else str(event.tid)
        self.tid.append(self.tids[tid])
        self.name.append(self.names[str(event.name)])
        self.kind.append(kind)
        self.external.append(as_id(args.external_id))
        self.sequence.append(as_id(args.sequence))
        self.correlation.append(as_id(args.correlation))


class TimedColumns:
    """Columns of every row that has a category and a duration, whatever it is (us).

    Attributes:
        num_fractional: events of any shape whose ``ts`` is written with decimals.
        num_untimed: events of any shape without ``ts``.
    """

    def __init__(self) -> None:
        self.start = array("d")
        self.duration = array("d")
        self.stream = array("q")
        self.correlation = array("q")
        self.name = array("I")
        self.names: Codes[str] = Codes()
        self.num_fractional = 0
        self.num_untimed = 0

    def extend(self, joined: bytes) -> None:
        """Append the rows among ``[{...},{...}]``; all or nothing (see DeviceColumns.extend)."""
        events, args = decode_timed(joined)
        rows = [
            (event.ts, event.dur, event.name, item)
            for event, item in zip(events, args, strict=True)
            if event.dur is not None and event.ts is not None and event.cat not in _UNTIMED_CATEGORIES
        ]
        start = array("d", [row[0] for row in rows])
        duration = array("d", [row[1] for row in rows])
        codes = self.names
        self.name.extend([codes[str(row[2])] for row in rows])
        self.stream.extend([as_id(row[3].stream) for row in rows])
        self.correlation.extend([as_id(row[3].correlation) for row in rows])
        self.start.extend(start)
        self.duration.extend(duration)
        times = [event.ts for event in events]
        self.num_fractional += sum(type(time) is float for time in times)
        self.num_untimed += times.count(None)

    def append(self, event: AnyEvent) -> None:
        """Append an event of any shape if it is such a row."""
        start, duration = as_float(event.ts), as_float(event.dur)
        self.num_fractional += isinstance(event.ts, float)
        self.num_untimed += start is None
        if start is None or duration is None or event.cat in _UNTIMED_CATEGORIES:
            return
        args = event.args if isinstance(event.args, dict) else {}
        self.start.append(start)
        self.duration.append(duration)
        self.stream.append(as_id(args.get("stream")))
        self.correlation.append(as_id(args.get("correlation")))
        self.name.append(self.names[str(event.name)])


def _add_ids(column: array[int], values: Sequence[int | str | None]) -> None:
    try:
        column.fromlist(values)  # type: ignore[arg-type]  # almost always all integers; the rest is caught below
    except (TypeError, OverflowError):  # some are text, null or too big
        column.fromlist([as_id(value) for value in values])
