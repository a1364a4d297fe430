"""Routes the events of a chunk to their columns, decoding only what analysis needs."""

from __future__ import annotations

import re
from enum import IntEnum
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
_KEEP_NAME = ("c10d", "_c10", "reco", "paro", "auto", "fsdp", "torc", "Dist", "deep", "nccl")
_FULL_DETAIL_NAME = ("c10d", "reco", "paro", "_c10")
_STACK_OF_INTEREST = re.compile(rb"deepspeed|megatron", re.IGNORECASE)
_INDEX_CHECK_BYTES = 6


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
        self._phase_at = len(found.group(1))
        prefix = found.group(1) + b"X" + found.group(2)
        self._key_bytes = len(prefix) + _INDEX_CHECK_BYTES
        self._name_gap = len(prefix) + len(found.group(4))
        self._before_phase = found.group(1)
        self._device: list[bytes] = []
        self._operators: list[bytes] = []
        self._annotations: list[bytes] = []
        self._runtime: list[bytes] = []
        self._python: list[bytes] = []
        self._skipped: list[bytes] = []
        self._unknown: list[bytes] = []
        runtime = self._runtime if detail == Detail.LAUNCHES else self._skipped
        routes = {
            b"kernel": self._device,
            b"gpu_me": self._device,
            b"cpu_op": self._operators,
            b"user_a": self._annotations,
            b"cuda_r": runtime,
            b"cuda_d": runtime,
            b"python": self._python,
            b"gpu_us": self._skipped,
            b"cuda_p": self._skipped,
            b"overhe": self._skipped,
            b'Trace"': self._skipped,
            b"cpu_in": self._skipped,
            b'ac2g",': self._skipped,
            b"fwdbwd": self._skipped,
            b"cuda_s": self._skipped,
        }
        self._routes = {prefix + key: rows.append for key, rows in routes.items()}
        self._lists = (
            self._device, self._operators, self._annotations, self._runtime,
            self._python, self._skipped, self._unknown,
        )  # fmt: skip

    @classmethod
    def learn(cls, parts: list[bytes], detail: Detail) -> _Layout | None:
        """Learn from the first complete event that has the usual key order; None without one."""
        for part in parts[:2000]:
            if found := _LAYOUT.match(part):
                return cls(found, detail)
        return None

    def route(self, parts: list[bytes]) -> _Groups:
        """Sort parts by destination. What does not fit the layout is decoded in full."""
        for rows in self._lists:
            rows.clear()
        size, find, unknown = self._key_bytes, self._routes.get, self._unknown.append
        for part in parts:
            find(part[:size], unknown)(part)
        groups = _Groups()
        groups.device = self._device
        before, at = self._before_phase, self._phase_at
        # Flow and instant events carry no time span; everything else unknown is looked at.
        other = [
            part
            for part in self._unknown
            if not (part[:at] == before and part[at : at + 1] in (b"s", b"t", b"f", b"i", b"C"))
        ]
        operators, wide = self._split_operators()
        # Spans that carry a collective's shape: gloo's always, NCCL's where kernels lack it.
        wide_mark = b'"nccl:' if self._detail == Detail.LAUNCHES else b'"gloo:'
        annotations = [row for row in self._annotations if wide_mark not in row and b'"gloo:' not in row]
        if len(annotations) != len(self._annotations):
            other += [row for row in self._annotations if wide_mark in row or b'"gloo:' in row]
        groups.host = [(HostKind.OPERATOR, operators), (HostKind.ANNOTATION, annotations)]
        if self._detail == Detail.LAUNCHES:
            groups.host.append((HostKind.RUNTIME, list(self._runtime)))
        if self._python:
            stacks = [row for row in self._python if _STACK_OF_INTEREST.search(row)]
            groups.host.append((HostKind.PYTHON, stacks))
        groups.other = other + wide
        return groups

    def _split_operators(self) -> tuple[list[bytes], list[bytes]]:
        """Return the operators to keep, and those whose arguments are needed."""
        at = self._name_gap + len(b"cpu_op")
        end = at + 4
        wide_names = {name.encode() for name in _FULL_DETAIL_NAME}
        wide = [row for row in self._operators if row[at:end] in wide_names]
        if self._detail == Detail.LEAN:
            names = {name.encode() for name in _KEEP_NAME} - wide_names
            return [row for row in self._operators if row[at:end] in names], wide
        return [row for row in self._operators if row[at:end] not in wide_names], wide


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
