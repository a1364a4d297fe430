"""Routes the events of a chunk to their columns, decoding only what analysis needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from paro_advise.trace_parsers.kineto.event_scan import BoundaryFinder, EventScan, WordTable
from paro_advise.trace_parsers.kineto.events import (
    _DECODE_ERRORS,
    AnyEvent,
    DeviceColumns,
    HostColumns,
    TimedColumns,
    as_float,
    comm_args,
    decode_any,
    decode_described,
    salvage_one,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
_LEARN_EVENTS = 2000


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
        self._finder: BoundaryFinder | None = None

    def add(self, chunk: bytes, boundary: bytes) -> None:
        """Read one chunk of EventChunks."""
        if self._finder is None:
            self._finder = BoundaryFinder(boundary)
        scan = EventScan(chunk, self._finder)
        self.num_events += len(scan)
        if self._layout is None and self._layout_tries < 8:
            self._layout = _Layout.learn(scan.first_texts(_LEARN_EVENTS), self.detail)
            self._layout_tries += 1
        if self._layout is None:
            self._add_any(scan.first_texts(len(scan)))
            return
        groups = self._layout.route(scan)
        self._add_device(groups.device)
        for kind, rows in groups.host:
            self._add_host(rows, kind)
        self._add_described(groups.described, HostKind.OPERATOR)
        self._add_any(groups.other)

    def _add_device(self, rows: list[bytes]) -> None:
        if rows:
            try:
                described = self.device.extend(_join(rows), len(rows))
            except _DECODE_ERRORS:
                self._add_any(rows)
            else:
                self._add_described([rows[place] for place in described], None)

    def _add_described(self, rows: list[bytes], kind: HostKind | None) -> None:
        """Add rows of collectives, of the host where a kind is given, else of the device."""
        if not rows:
            return
        try:
            events = decode_described(_join(rows), len(rows))
        except _DECODE_ERRORS:
            self._add_any(rows)
            return
        for event in events:
            if kind is None:
                self.device.append(event, event.args, event.ts, event.dur)
            else:
                self.host.append(event, event.args, kind, event.ts, event.dur)

    def _add_host(self, rows: list[bytes], kind: HostKind) -> None:
        if rows:
            try:
                self.host.extend(_join(rows), len(rows), kind)
            except _DECODE_ERRORS:
                self._add_any(rows)

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


@dataclass(slots=True)
class _Groups:
    """The texts of a chunk's events by destination."""

    device: list[bytes]
    host: list[tuple[HostKind, list[bytes]]]
    described: list[bytes]  # operators whose arguments are needed
    other: list[bytes]


class _Route(IntEnum):
    """Where a category's rows go."""

    UNKNOWN = 0
    SKIP = 1
    DEVICE = 2
    OPERATOR = 3
    ANNOTATION = 4
    RUNTIME = 5
    PYTHON = 6


# By the first six letters of the category.
_ROUTES = {
    b"kernel": _Route.DEVICE,
    b"gpu_me": _Route.DEVICE,
    b"cpu_op": _Route.OPERATOR,
    b"user_a": _Route.ANNOTATION,
    b"cuda_r": _Route.RUNTIME,
    b"cuda_d": _Route.RUNTIME,
    b"cuda_s": _Route.SKIP,
    b"python": _Route.PYTHON,
    b"gpu_us": _Route.SKIP,
    b"cuda_p": _Route.SKIP,
    b"overhe": _Route.SKIP,
    b'Trace"': _Route.SKIP,
    b"cpu_in": _Route.SKIP,
    b'ac2g",': _Route.SKIP,
    b"fwdbwd": _Route.SKIP,
}
_KEEP, _WIDE = 1, 2
_SPAN, _SPANLESS = 1, 2  # flow and instant events carry no time span


class _Layout:
    """The learned text in front of an event's category and name, and where rows go by it."""

    def __init__(self, found: re.Match[bytes], detail: Detail) -> None:
        self._detail = detail
        self._before_phase = found.group(1)
        self._prefix = found.group(1) + b"X" + found.group(2)
        self._name_at = len(self._prefix) + len(b"cpu_op") + len(found.group(4))
        routes = dict(_ROUTES)
        if detail != Detail.LAUNCHES:
            routes |= {b"cuda_r": _Route.SKIP, b"cuda_d": _Route.SKIP}
        # The letter of a phase with as much of what precedes it as fits into a word.
        before = self._before_phase[-7:]
        phases = {before + letter: _SPANLESS for letter in (b"s", b"t", b"f", b"i", b"C")}
        self._phases = WordTable({**phases, before + b"X": _SPAN})
        self._categories = WordTable({word: int(route) for word, route in routes.items()})
        names = dict.fromkeys(_KEEP_NAME, _KEEP) | dict.fromkeys(_FULL_DETAIL_NAME, _WIDE)
        self._names = WordTable({name.encode(): value for name, value in names.items()})

    @classmethod
    def learn(cls, parts: list[bytes], detail: Detail) -> _Layout | None:
        """Learn from the first complete event that has the usual key order; None without one."""
        for part in parts:
            if found := _LAYOUT.match(part):
                return cls(found, detail)
        return None

    def route(self, scan: EventScan) -> _Groups:
        """Sort events by destination. What does not fit the layout is decoded in full."""
        route = self._routes(scan)
        kept, wide = self._operators(scan, np.flatnonzero(route == _Route.OPERATOR))
        annotations = scan.texts(np.flatnonzero(route == _Route.ANNOTATION))
        other = scan.texts(np.flatnonzero(route == _Route.UNKNOWN))
        # Spans that carry a collective's shape: gloo's always, NCCL's where kernels lack it.
        wide_mark = b'"nccl:' if self._detail == Detail.LAUNCHES else b'"gloo:'
        plain = [row for row in annotations if wide_mark not in row and b'"gloo:' not in row]
        if len(plain) != len(annotations):
            other += [row for row in annotations if wide_mark in row or b'"gloo:' in row]
        host = [(HostKind.OPERATOR, kept), (HostKind.ANNOTATION, plain)]
        if self._detail == Detail.LAUNCHES:
            host.append((HostKind.RUNTIME, scan.texts(np.flatnonzero(route == _Route.RUNTIME))))
        stacks = scan.texts(np.flatnonzero(route == _Route.PYTHON))
        host.append((HostKind.PYTHON, [row for row in stacks if _STACK_OF_INTEREST.search(row)]))
        device = scan.texts(np.flatnonzero(route == _Route.DEVICE))
        return _Groups(device=device, host=host, described=wide, other=other)

    def _routes(self, scan: EventScan) -> NDArray[np.uint8]:
        """Return where each event goes; what does not look as learned is UNKNOWN."""
        phase_at, category_at = len(self._before_phase), len(self._prefix)
        if scan.num_bytes < category_at + 8:
            return np.zeros(len(scan), dtype=np.uint8)
        phase = self._phases.values(scan.words(phase_at + 1 - self._phases.size))
        route = self._categories.values(scan.words(category_at))
        route *= (phase == _SPAN) & scan.have(category_at, self._prefix)
        route[phase == _SPANLESS] = _Route.SKIP
        route[scan.shorter_than(category_at + 8)] = _Route.UNKNOWN
        return route

    def _operators(self, scan: EventScan, rows: NDArray[np.intp]) -> tuple[list[bytes], list[bytes]]:
        """Return the operators to keep, and those whose arguments are needed."""
        value = self._names.values(scan.words(self._name_at, rows))
        kept = value == _KEEP if self._detail == Detail.LEAN else value != _WIDE
        return scan.texts(rows[kept]), scan.texts(rows[value == _WIDE])


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
