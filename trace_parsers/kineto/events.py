"""Typed decoding of Kineto's events, with salvage of broken ones.

Structs that the garbage collector does not track are what makes this fast: plain dictionaries spend
most of their time in Python's cyclic collector (docs/traces.md, salvage and limits).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from paro_advise.trace_parsers.constants import INT64_MAX
from paro_advise.trace_parsers.kineto.constants import MAX_FLOAT, MAX_NAME_BYTES, NO_ID

if TYPE_CHECKING:
    from collections.abc import Iterator

    JsonValue = object  # every reader narrows it
else:
    JsonValue = Any  # msgspec decodes Any in two thirds of the time that object takes

DECODE_ERRORS = (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError, TypeError)
_Event = TypeVar("_Event")


class DeviceArgs(msgspec.Struct, gc=False):
    """Arguments of a kernel or copy that say where it ran and what launched it."""

    external_id: int | str | None = msgspec.field(name="External id", default=NO_ID)
    stream: int | str | None = NO_ID
    correlation: int | str | None = NO_ID
    collective: str | None = msgspec.field(name="Collective name", default=None)


class HostArgs(msgspec.Struct, gc=False):
    """Identifiers of a host row."""

    external_id: int | str | None = msgspec.field(name="External id", default=NO_ID)
    sequence: int | str | None = msgspec.field(name="Sequence number", default=NO_ID)
    correlation: int | str | None = NO_ID


class CommArgs(msgspec.Struct, gc=False):
    """Arguments of a row that describes a collective; values as recorded, any type."""

    external_id: JsonValue = msgspec.field(name="External id", default=None)
    stream: JsonValue = None
    correlation: JsonValue = None
    device: JsonValue = None
    sequence: JsonValue = msgspec.field(name="Sequence number", default=None)
    collective: JsonValue = msgspec.field(name="Collective name", default=None)
    in_nelems: JsonValue = msgspec.field(name="In msg nelems", default=None)
    out_nelems: JsonValue = msgspec.field(name="Out msg nelems", default=None)
    group_size: JsonValue = msgspec.field(name="Group size", default=None)
    dtype: JsonValue = None
    group_name: JsonValue = msgspec.field(name="Process Group Name", default=None)
    group_desc: JsonValue = msgspec.field(name="Process Group Description", default=None)
    group_ranks: JsonValue = msgspec.field(name="Process Group Ranks", default=None)
    rank_start: JsonValue = msgspec.field(name="Global rank start", default=None)
    rank_stride: JsonValue = msgspec.field(name="Global rank stride", default=None)
    rank: JsonValue = msgspec.field(name="Rank", default=None)  # in the process group
    seq: JsonValue = msgspec.field(name="Seq", default=None)
    source: JsonValue = msgspec.field(name="Src Rank", default=None)
    destination: JsonValue = msgspec.field(name="Dst Rank", default=None)
    input_dims: JsonValue = msgspec.field(name="Input Dims", default=None)
    input_type: JsonValue = msgspec.field(name="Input type", default=None)


class DeviceEvent(msgspec.Struct, gc=False):
    """A kernel or copy; times in us."""

    name: str
    ts: float
    dur: float = 0.0
    args: DeviceArgs | None = None


class HostEvent(msgspec.Struct, gc=False):
    """An operator, annotation or runtime call; times in us."""

    name: str
    ts: float
    tid: int | str | None = None
    dur: float = 0.0
    args: HostArgs | None = None


class TimedArgs(msgspec.Struct, gc=False):
    """Arguments of any timed row."""

    stream: JsonValue = None
    correlation: JsonValue = None


class TimedEvent(msgspec.Struct, gc=False):
    """Any event, of which only the timed ones are kept; times in us."""

    name: JsonValue = None
    cat: JsonValue = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: TimedArgs | None = None


class DescribedEvent(msgspec.Struct, gc=False):
    """A row of a collective: all arguments are needed."""

    name: str
    ts: float
    args: CommArgs
    tid: int | str | None = None
    dur: float = 0.0


class AnyEvent(msgspec.Struct):
    """An event of any phase and category, for rows that need all fields and odd layouts."""

    ph: JsonValue = None
    cat: JsonValue = None
    name: JsonValue = None
    pid: JsonValue = None
    tid: JsonValue = None
    ts: JsonValue = None
    dur: JsonValue = None
    args: JsonValue = None


class _Nothing(msgspec.Struct, gc=False):
    """An event of which nothing is kept: decoding it tells whether it is whole."""


_DECODE_DEVICE = msgspec.json.Decoder(list[DeviceEvent])
_DECODE_HOST = msgspec.json.Decoder(list[HostEvent])
_DECODE_TIMED = msgspec.json.Decoder(list[TimedEvent])
_DECODE_DESCRIBED = msgspec.json.Decoder(list[DescribedEvent])
_DECODE_ANY = msgspec.json.Decoder(list[AnyEvent])
_DECODE_ONE = msgspec.json.Decoder(AnyEvent)

_DECODE_NOTHING = msgspec.json.Decoder(list[_Nothing])

_NO_TIMED_ARGS = TimedArgs()
_NO_DEVICE_ARGS = DeviceArgs()
_NO_HOST_ARGS = HostArgs()
_NO_COMM_ARGS = CommArgs()

_LONE_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrtu])')
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])-?(?:nan|inf(?:inity)?)(?=\s*[,}\]])", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x1f]")
# An event's end and the next one's beginning; fields may hold such a thing too, so it is for broken text only.
_BETWEEN_EVENTS = re.compile(rb'\}\s{0,64},\s{0,64}\{(?=\s{0,64}"(?:ph|name|cat|ts|pid|tid|args|dur|id)"\s{0,64}:)')
_NAME_START = re.compile(rb'"name":\s*"')
_NAME_END = re.compile(rb'"\s{0,64},\s{0,64}"(?:pid|ph|ts|cat)"\s{0,64}:')


def as_int(value: object) -> int | None:
    """Return an int64 from a JSON value, None when it is none or does not fit."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if -INT64_MAX <= number <= INT64_MAX else None


def as_float(value: object) -> float | None:
    """Return a finite float from a JSON value, None when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return number if abs(number) < MAX_FLOAT else None


def as_id(value: object) -> int:
    """Return an identifier as int64, -1 when there is none."""
    if type(value) is int and -INT64_MAX <= value <= INT64_MAX:
        return value
    number = as_int(value)
    return NO_ID if number is None else number


def comm_args(event: AnyEvent) -> CommArgs:
    """Return the arguments of an event in typed form, empty when it has none."""
    if not isinstance(event.args, dict):
        return _NO_COMM_ARGS
    return msgspec.convert(event.args, CommArgs, strict=False)


def decode_device(joined: bytes, count: int) -> tuple[list[DeviceEvent], list[DeviceArgs]]:
    """Decode ``[{...},{...}]`` into kernels and copies with their arguments, ``count`` of them.

    Raises:
        msgspec.DecodeError, RecursionError: some rows have another shape.
    """
    events = _check_count(count, _DECODE_DEVICE.decode(joined))
    return events, [event.args or _NO_DEVICE_ARGS for event in events]


def decode_host(joined: bytes, count: int) -> tuple[list[HostEvent], list[HostArgs]]:
    """Decode ``[{...},{...}]`` into plain host rows with their arguments, ``count`` of them.

    Raises:
        msgspec.DecodeError, RecursionError: some rows have another shape.
    """
    events = _check_count(count, _DECODE_HOST.decode(joined))
    return events, [event.args or _NO_HOST_ARGS for event in events]


def decode_timed(joined: bytes) -> tuple[list[TimedEvent], list[TimedArgs]]:
    """Decode ``[{...},{...}]`` into events that may be timed, with their arguments.

    Raises:
        msgspec.DecodeError, RecursionError: some rows have another shape.
    """
    events = _DECODE_TIMED.decode(joined)
    return events, [event.args or _NO_TIMED_ARGS for event in events]


def decode_described(joined: bytes, count: int) -> list[DescribedEvent]:
    """Decode ``[{...},{...}]`` into rows of collectives, ``count`` of them.

    Raises:
        msgspec.DecodeError, RecursionError: some rows have another shape.
    """
    return _check_count(count, _DECODE_DESCRIBED.decode(joined))


def _check_count(count: int, events: list[_Event]) -> list[_Event]:
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


def holds_whole_events(text: bytes) -> bool:
    """Tell whether a text is events and nothing else (without the outermost braces), whatever they hold."""
    try:
        _DECODE_NOTHING.decode(b"".join((b"[{", text, b"}]")))
    except DECODE_ERRORS:
        return False
    return True


def parts_of(text: bytes) -> list[bytes]:
    """Part a text that may hold several events (without the outermost braces) before fields that events begin with."""
    return _BETWEEN_EVENTS.split(text)


def salvage_one(text: bytes) -> tuple[AnyEvent | None, bool]:
    """Decode one event (without outer braces), mending what is commonly broken.

    Returns:
        The event or None when nothing helps, and whether it had to be mended.
    """
    whole = b"{" + text + b"}"
    for mended, candidate in enumerate(_mendings(whole)):
        try:
            return _DECODE_ONE.decode(candidate), mended > 0
        except DECODE_ERRORS:
            continue
    return None, True


def _mendings(whole: bytes) -> Iterator[bytes]:
    """Yield the text as it is, then ever stronger repairs of it."""
    yield whole
    text = _NOT_A_NUMBER.sub(b"null", _LONE_BACKSLASH.sub(rb"\\\\", whole))
    text = text.decode("utf-8", "replace").encode()
    yield text
    text = _CONTROL.sub(b" ", text)
    yield text
    yield _requote_name(text)


def _requote_name(text: bytes) -> bytes:
    """Escape the quotes inside the first name; a text without its end, or too long a one, stays as it is."""
    begin = _NAME_START.search(text)
    end = _NAME_END.search(text, begin.end(), begin.end() + MAX_NAME_BYTES) if begin else None
    if begin is None or end is None:
        return text
    inner = text[begin.end() : end.start()].replace(b'\\"', b'"').replace(b'"', b'\\"')
    return text[: begin.end()] + inner + text[end.start() :]


def parse_head(text: bytes) -> dict[str, object] | None:
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
        except (*DECODE_ERRORS, json.JSONDecodeError):
            continue
        if isinstance(value, dict):
            return value
    return None
