"""Typed decoding of Kineto event chunks into columns, with salvage of broken events.

Garbage-collector-free structs are what makes this fast: plain dictionaries spend most of their
time in Python's cyclic collector (reference: parsing).
"""

from __future__ import annotations

import json
import re
from array import array
from collections import defaultdict
from typing import Any, TypeVar

import msgspec

_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError, TypeError)
_Event = TypeVar("_Event")
_INT64_MAX = (1 << 63) - 1
NO_ID = -1


class _DeviceArgs(msgspec.Struct, gc=False):
    external_id: int | str | None = msgspec.field(name="External id", default=NO_ID)
    stream: int | str | None = NO_ID
    correlation: int | str | None = NO_ID
    collective: str | None = msgspec.field(name="Collective name", default=None)


class _HostArgs(msgspec.Struct, gc=False):
    external_id: int | str | None = msgspec.field(name="External id", default=NO_ID)
    sequence: int | str | None = msgspec.field(name="Sequence number", default=NO_ID)
    correlation: int | str | None = NO_ID


class CommArgs(msgspec.Struct, gc=False):
    """Arguments of a row that describes a collective; values as recorded, any type."""

    external_id: Any = msgspec.field(name="External id", default=None)
    stream: Any = None
    correlation: Any = None
    device: Any = None
    sequence: Any = msgspec.field(name="Sequence number", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_nelems: Any = msgspec.field(name="In msg nelems", default=None)
    out_nelems: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    group_name: Any = msgspec.field(name="Process Group Name", default=None)
    group_desc: Any = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    rank_start: Any = msgspec.field(name="Global rank start", default=None)
    rank_stride: Any = msgspec.field(name="Global rank stride", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    input_dims: Any = msgspec.field(name="Input Dims", default=None)
    input_type: Any = msgspec.field(name="Input type", default=None)


class _DeviceEvent(msgspec.Struct, gc=False):
    name: str
    ts: float
    dur: float = 0.0
    args: _DeviceArgs | None = None


class _HostEvent(msgspec.Struct, gc=False):
    name: str
    ts: float
    tid: int | str | None = None
    dur: float = 0.0
    args: _HostArgs | None = None


class _TimedArgs(msgspec.Struct, gc=False):
    stream: Any = None
    correlation: Any = None


class _TimedEvent(msgspec.Struct, gc=False):
    name: Any = None
    cat: Any = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: _TimedArgs | None = None


class DescribedEvent(msgspec.Struct, gc=False):
    """A row of a collective: all arguments are needed."""

    name: str
    ts: float
    args: CommArgs
    tid: int | str | None = None
    dur: float = 0.0


class AnyEvent(msgspec.Struct):
    """An event of any phase and category, for rows that need all fields and odd layouts."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Any = None


_DECODE_DEVICE = msgspec.json.Decoder(list[_DeviceEvent])
_DECODE_HOST = msgspec.json.Decoder(list[_HostEvent])
_DECODE_TIMED = msgspec.json.Decoder(list[_TimedEvent])
_DECODE_DESCRIBED = msgspec.json.Decoder(list[DescribedEvent])
_DECODE_ANY = msgspec.json.Decoder(list[AnyEvent])
_DECODE_ONE = msgspec.json.Decoder(AnyEvent)

_LONE_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrtu])')
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])-?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NAME_FIELD = re.compile(rb'("name":\s*")(.*?)("\s*,\s*"(?:pid|ph|ts|cat)"\s*:)', re.DOTALL)


def as_int(value: Any) -> int | None:
    """Return an int64 from a JSON value, None when it is none or does not fit."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if -_INT64_MAX <= number <= _INT64_MAX else None


def as_float(value: Any) -> float | None:
    """Return a finite float from a JSON value, None when it is none."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if abs(number) < 1e300 else None


class Codes(defaultdict[Any, int]):
    """Dense integer codes for values, in order of first sight."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def values_in_order(self) -> list[Any]:
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
        self.names = Codes()
        self.comm: list[tuple[int, CommArgs]] = []  # (row, arguments)

    def extend(self, joined: bytes, count: int) -> list[int]:
        """Append kernels and copies from ``[{...},{...}]``, ``count`` of them; all or nothing.

        Returns:
            The places of rows that describe a collective: these need all their arguments and
            are left out.

        Raises:
            msgspec.DecodeError, OverflowError, RecursionError: the caller salvages one by one.
        """
        events = _exactly(count, _DECODE_DEVICE.decode(joined))
        args = [event.args or _NO_DEVICE_ARGS for event in events]
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
        self.names = Codes()
        self.tids = Codes()
        self.comm: list[tuple[int, CommArgs]] = []

    def extend(self, joined: bytes, count: int, kind: int) -> None:
        """Append plain host rows of one kind; all or nothing (see DeviceColumns.extend)."""
        events = _exactly(count, _DECODE_HOST.decode(joined))
        args = [event.args or _NO_HOST_ARGS for event in events]
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
        self.names = Codes()
        self.num_fractional = 0
        self.num_untimed = 0

    def extend(self, joined: bytes) -> None:
        """Append the rows among ``[{...},{...}]``; all or nothing (see DeviceColumns.extend)."""
        events = _DECODE_TIMED.decode(joined)
        rows = [
            (event.ts, event.dur, event.name, event.args or _NO_TIMED_ARGS)
            for event in events
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


# "Trace" rows say how long the profiler itself ran.
_UNTIMED_CATEGORIES = (None, "Trace")
_NO_TIMED_ARGS = _TimedArgs()
_NO_DEVICE_ARGS = _DeviceArgs()
_NO_HOST_ARGS = _HostArgs()
_NO_COMM_ARGS = CommArgs()


def _add_ids(column: array[int], values: list[Any]) -> None:
    try:
        column.fromlist(values)
    except (TypeError, OverflowError):  # some are text, null or too big
        column.fromlist([as_id(value) for value in values])


def as_id(value: Any) -> int:
    """Return an identifier as int64, -1 when there is none."""
    if type(value) is int and -_INT64_MAX <= value <= _INT64_MAX:
        return value
    number = as_int(value)
    return NO_ID if number is None else number


def comm_args(event: AnyEvent) -> CommArgs:
    """Return the arguments of an event in typed form, empty when it has none."""
    if not isinstance(event.args, dict):
        return _NO_COMM_ARGS
    return msgspec.convert(event.args, CommArgs, strict=False)


def decode_described(joined: bytes, count: int) -> list[DescribedEvent]:
    """Decode ``[{...},{...}]`` into rows of collectives, ``count`` of them.

    Raises:
        msgspec.DecodeError, RecursionError: some rows have another shape.
    """
    return _exactly(count, _DECODE_DESCRIBED.decode(joined))


def _exactly(count: int, events: list[_Event]) -> list[_Event]:
    """Return events that were cut apart as they should be; a text may hold two by a wrong cut."""
    if len(events) != count:
        raise msgspec.DecodeError("an event's text holds several events")
    return events


def decode_any(joined: bytes) -> list[AnyEvent]:
    """Decode ``[{...},{...}]`` into events of any shape.

    Raises:
        msgspec.DecodeError, RecursionError: the caller salvages one by one.
    """
    return _DECODE_ANY.decode(joined)


def salvage_one(text: bytes) -> tuple[AnyEvent | None, bool]:
    """Decode one event (without outer braces), mending what is commonly broken.

    Returns:
        The event or None when nothing helps, and whether it had to be mended.
    """
    whole = b"{" + text + b"}"
    for mended, candidate in enumerate(_mendings(whole)):
        try:
            return _DECODE_ONE.decode(candidate), mended > 0
        except _DECODE_ERRORS:
            continue
    return None, True


def _mendings(whole: bytes) -> Any:
    """Yield the text as it is, then ever stronger repairs of it."""
    yield whole
    text = _NOT_A_NUMBER.sub(b"null", _LONE_BACKSLASH.sub(rb"\\\\", whole))
    text = text.decode("utf-8", "replace").encode()
    yield text
    text = _CONTROL.sub(b" ", text)
    yield text
    yield _NAME_FIELD.sub(_requote, text, count=1)


def _requote(found: re.Match[bytes]) -> bytes:
    inner = found.group(2).replace(b'\\"', b'"').replace(b'"', b'\\"')
    return found.group(1) + inner + found.group(3)


def parse_head(text: bytes) -> dict[str, Any] | None:
    """Decode the metadata around the event array (object text without its last bracket).

    Returns:
        The metadata, or None when it cannot be read even after mending.
    """
    body = text.strip().rstrip(b",").rstrip()
    if not body.startswith(b"{"):
        body = b"{" + body
    for candidate in _mendings(body + b"}"):
        try:
            value = msgspec.json.decode(candidate)
        except (*_DECODE_ERRORS, json.JSONDecodeError):
            continue
        if isinstance(value, dict):
            return value
    return None
