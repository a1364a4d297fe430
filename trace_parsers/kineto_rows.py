"""Routes the events of a chunk to their columns, decoding only what analysis needs."""

from __future__ import annotations

import re
from enum import IntEnum
from itertools import compress, repeat
from operator import itemgetter
from typing import Any

from paro_advise.trace_parsers.kineto_events import (
    _DECODE_ERRORS,
    AnyEvent,
    DeviceColumns,
    HostColumns,
    TimedColumns,
    as_float,
    comm_args,
    decode_any,
    salvage_one,
)


class HostKind(IntEnum):
    """What a host row is; the value is what the ``kind`` column holds."""

    OPERATOR = 0
    ANNOTATION = 1
    RUNTIME = 2
    PYTHON = 3


class Detail(IntEnum):
    """How much of a trace is read."""

    LEAN = 0  # GPU run: device rows, annotations, collectives, autograd; other operators skipped
    FULL = 1  # CPU run: all operators as well
    LAUNCHES = 2  # runtime calls as well: older traces link kernels to the host by them only


_LAYOUT = re.compile(rb'^(\s*"ph":\s*")X(",\s*"cat":\s*")(\w[\w ]*)(",\s*"name":\s*")')
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "mtia_ccp_events", "hpu_op", "xpu_runtime_kernel"}
_KEEP_NAME = ("Prof", "Opti", "c10d", "_c10", "reco", "paro", "auto", "fsdp", "torc", "Dist", "deep", "nccl")
_FULL_DETAIL_NAME = ("c10d", "reco", "paro", "_c10")
_STACK_OF_INTEREST = re.compile(rb"deepspeed|megatron", re.IGNORECASE)
_INDEX_CHECK_BYTES = 6
_NAME_LETTERS = 4
_WIDE_NAMES = frozenset(name.encode() for name in _FULL_DETAIL_NAME)
_LEAN_NAMES = frozenset(name.encode() for name in _KEEP_NAME) - _WIDE_NAMES


class KinetoRows:
    """Collects the rows of one trace.

    Attributes:
        num_events: events seen, kept or not.
        num_repaired, num_dropped: broken events that were mended or lost.
        num_negative: rows whose negative duration was set to 0.
        thread_names: (pid, tid) to name, from metadata rows.
    """

    def __init__(self, detail: Detail) -> None:
        self.detail = detail
        self.device = DeviceColumns()
        self.host = HostColumns()
        self.num_events = 0
        self.num_repaired = 0
        self.num_dropped = 0
        self.thread_names: dict[Any, str] = {}
        self._layout: _Layout | None = None
        self._layout_tries = 0

    def add(self, chunk: bytes, boundary: bytes) -> None:
        """Read one chunk of EventChunks."""
        parts = split_events(chunk, boundary)
        self.num_events += len(parts)
        if self._layout is None and self._layout_tries < 8:
            self._layout = _Layout.learn(parts, self.detail)
            self._layout_tries += 1
        if self._layout is None:
            self._add_any(parts)
            return
        groups = self._layout.route(parts)
        self._add_device(groups.device)
        for kind, rows in groups.host:
            self._add_host(rows, kind)
        self._add_any(groups.other)

    def _add_device(self, rows: list[bytes]) -> None:
        plain = [row for row in rows if b'"Collective name"' not in row]
        if len(plain) != len(rows):
            self._add_any([row for row in rows if b'"Collective name"' in row])
        if plain:
            try:
                self.device.extend(_join(plain))
            except _DECODE_ERRORS:
                self._salvage(plain)

    def _add_host(self, rows: list[bytes], kind: HostKind) -> None:
        if rows:
            try:
                self.host.extend(_join(rows), kind)
            except _DECODE_ERRORS:
                self._salvage(rows)

    def _add_any(self, rows: list[bytes]) -> None:
        if not rows:
            return
        try:
            events = decode_any(_join(rows))
        except _DECODE_ERRORS:
            self._salvage(rows)
            return
        # Where the text between events varies, a row may hold several.
        self.num_events += len(events) - len(rows)
        for event in events:
            self._place(event)

    def _salvage(self, rows: list[bytes]) -> None:
        for row in rows:
            event, mended = salvage_one(row)
            if event is None:
                self.num_dropped += 1
                continue
            self.num_repaired += mended
            self._place(event)

    def _place(self, event: AnyEvent) -> None:
        if event.ph == "M":
            self._note_thread(event)
            return
        if event.ph != "X":
            return
        start, duration = as_float(event.ts), as_float(event.dur)
        name = event.name
        if start is None or not isinstance(name, str):
            self.num_dropped += 1
            return
        category = str(event.cat).lower() if event.cat else ""
        if category in _DEVICE:
            self.device.append(event, comm_args(event), start, duration or 0.0)
            return
        kind = self._host_kind(category, name)
        if kind is not None:
            self.host.append(event, comm_args(event), kind, start, duration or 0.0)

    def _host_kind(self, category: str, name: str) -> HostKind | None:
        match category:
            case "user_annotation":
                return HostKind.ANNOTATION
            case "cpu_op" | "operator":
                keep = self.detail != Detail.LEAN or name.startswith(_KEEP_NAME)
                return HostKind.OPERATOR if keep else None
            case "cuda_runtime" | "cuda_driver" | "runtime":
                return HostKind.RUNTIME if self.detail == Detail.LAUNCHES else None
            case "python_function":
                return HostKind.PYTHON if _STACK_OF_INTEREST.search(name.encode()) else None
            case _:
                return None

    def _note_thread(self, event: AnyEvent) -> None:
        if event.name == "thread_name" and isinstance(event.args, dict):
            label = event.args.get("name")
            tid = event.tid if isinstance(event.tid, int | str) else str(event.tid)
            if isinstance(label, str) and len(self.thread_names) < 100_000:
                self.thread_names[tid] = label


class TimedRows:
    """Collects every row that has a duration, for rules that know no categories (HTA's)."""

    def __init__(self) -> None:
        self.columns = TimedColumns()

    def add(self, chunk: bytes, boundary: bytes) -> None:
        """Read one chunk of EventChunks; what cannot be read is left out."""
        parts = split_events(chunk, boundary)
        try:
            self.columns.extend(_join(parts))
        except _DECODE_ERRORS:
            for part in parts:
                event, _ = salvage_one(part)
                if event is not None:
                    self.columns.append(event)


class _Route(IntEnum):
    """Where an event goes."""

    SKIPPED = 0
    DEVICE = 1
    OPERATOR = 2
    ANNOTATION = 3
    RUNTIME = 4
    PYTHON = 5
    UNKNOWN = 6


# Translation tables that turn routes into truth values.
_IS_ROUTE = tuple(bytes(int(code == route) for code in range(256)) for route in _Route)


class _Groups:
    """The rows of a chunk by destination; reused from chunk to chunk."""

    def __init__(self) -> None:
        self.device: list[bytes] = []
        self.host: list[tuple[HostKind, list[bytes]]] = []
        self.other: list[bytes] = []


class _Layout:
    """The learned text in front of an event's category and name, and where rows go by it."""

    def __init__(self, found: re.Match[bytes], detail: Detail) -> None:
        self._detail = detail
        prefix = found.group(1) + b"X" + found.group(2)
        self._name_gap = len(prefix) + len(found.group(4))
        runtime = _Route.RUNTIME if detail == Detail.LAUNCHES else _Route.SKIPPED
        routes = {
            b"kernel": _Route.DEVICE,
            b"gpu_me": _Route.DEVICE,
            b"cpu_op": _Route.OPERATOR,
            b"user_a": _Route.ANNOTATION,
            b"cuda_r": runtime,
            b"cuda_d": runtime,
            b"python": _Route.PYTHON,
            b"gpu_us": _Route.SKIPPED,
            b"cuda_p": _Route.SKIPPED,
            b"overhe": _Route.SKIPPED,
            b'Trace"': _Route.SKIPPED,
            b"cpu_in": _Route.SKIPPED,
            b'ac2g",': _Route.SKIPPED,
            b"fwdbwd": _Route.SKIPPED,
            b"cuda_s": _Route.SKIPPED,
        }
        self._routes = {prefix + key: int(route) for key, route in routes.items()}
        self._key = itemgetter(slice(0, len(prefix) + _INDEX_CHECK_BYTES))
        # Flow, instant and counter events carry no span of time.
        self._spanless = {found.group(1) + phase: 0 for phase in (b"s", b"t", b"f", b"i", b"C")}
        self._phase_key = itemgetter(slice(0, len(found.group(1)) + 1))

    @classmethod
    def learn(cls, parts: list[bytes], detail: Detail) -> _Layout | None:
        """Learn from the first complete event that has the usual key order; None without one."""
        for part in parts[:2000]:
            if found := _LAYOUT.match(part):
                return cls(found, detail)
        return None

    def route(self, parts: list[bytes]) -> _Groups:
        """Sort parts by destination. What does not fit the layout is decoded in full."""
        # All of it runs in C: a loop over millions of events in Python would cost more than decoding.
        routes = bytes(map(self._routes.get, map(self._key, parts), repeat(_Route.UNKNOWN)))
        unknown = _selected(parts, routes, _Route.UNKNOWN)
        spanless = bytes(map(self._spanless.get, map(self._phase_key, unknown), repeat(1)))
        groups = _Groups()
        groups.device = _selected(parts, routes, _Route.DEVICE)
        other = list(compress(unknown, spanless))
        operators, wide = self._split_operators(_selected(parts, routes, _Route.OPERATOR))
        # Spans that carry a collective's shape: gloo's always, NCCL's where kernels lack it.
        wide_mark = b'"nccl:' if self._detail == Detail.LAUNCHES else b'"gloo:'
        spans = _selected(parts, routes, _Route.ANNOTATION)
        annotations = [row for row in spans if wide_mark not in row and b'"gloo:' not in row]
        if len(annotations) != len(spans):
            other += [row for row in spans if wide_mark in row or b'"gloo:' in row]
        groups.host = [(HostKind.OPERATOR, operators), (HostKind.ANNOTATION, annotations)]
        if self._detail == Detail.LAUNCHES:
            groups.host.append((HostKind.RUNTIME, _selected(parts, routes, _Route.RUNTIME)))
        if _Route.PYTHON in routes:
            frames = _selected(parts, routes, _Route.PYTHON)
            groups.host.append((HostKind.PYTHON, [row for row in frames if _STACK_OF_INTEREST.search(row)]))
        groups.other = other + wide
        return groups

    def _split_operators(self, rows: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Return the operators to keep, and those whose arguments are needed."""
        at = self._name_gap + len(b"cpu_op")
        names = list(map(itemgetter(slice(at, at + _NAME_LETTERS)), rows))
        wide = list(compress(rows, map(_WIDE_NAMES.__contains__, names)))
        if self._detail == Detail.LEAN:
            return list(compress(rows, map(_LEAN_NAMES.__contains__, names))), wide
        return [row for row, name in zip(rows, names, strict=True) if name not in _WIDE_NAMES], wide


def _selected(parts: list[bytes], routes: bytes, route: int) -> list[bytes]:
    """Return the parts that go one way."""
    return list(compress(parts, routes.translate(_IS_ROUTE[route])))


def split_events(chunk: bytes, boundary: bytes) -> list[bytes]:
    """Split a chunk into event texts without their outer braces."""
    if not boundary:
        return [chunk]
    parts = chunk.split(boundary)
    reopened = boundary[boundary.rindex(b"{") + 1 :]
    if reopened:
        parts[1:] = [reopened + part for part in parts[1:]]
    return parts


def _join(rows: list[bytes]) -> bytes:
    return b"[{" + b"},{".join(rows) + b"}]"
