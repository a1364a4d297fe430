"""Puts the events of chunk after chunk into columns, decoding only what analysis needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kineto.columns import DeviceColumns, HostColumns, HostKind, TimedColumns
from paro_advise.trace_parsers.kineto.constants import LEARN_CHUNKS, LEARN_EVENTS, MAX_WHOLE_BYTES, MIN_HOLE_BYTES
from paro_advise.trace_parsers.kineto.device.memory import MemoryColumns
from paro_advise.trace_parsers.kineto.device.products import ProductColumns
from paro_advise.trace_parsers.kineto.event_routes import (
    EventLayout,
    host_kind,
    is_device_category,
    is_runtime_category,
)
from paro_advise.trace_parsers.kineto.event_scan import BoundaryFinder, EventScan
from paro_advise.trace_parsers.kineto.events import (
    DECODE_ERRORS,
    AnyEvent,
    as_float,
    comm_args,
    decode_any,
    decode_described,
    holds_whole_events,
    parts_of,
    salvage_one,
)

if TYPE_CHECKING:
    from paro_advise.trace_parsers.kineto.event_routes import Detail


class KinetoRows:
    """Collects the rows of one trace.

    Attributes:
        detail: how much of it is read.
        device, host: its rows.
        num_events: events seen, kept or not.
        num_repaired, num_dropped: broken events that were mended or lost.
        num_bare: events that last and have no category, by which nothing tells what they are.
    """

    def __init__(self, detail: Detail) -> None:
        self.detail = detail
        self.device = DeviceColumns()
        self.host = HostColumns()
        self.products = ProductColumns()
        self.memory = MemoryColumns()
        self.num_events = 0
        self.num_repaired = 0
        self.num_dropped = 0
        self.num_bare = 0
        self.num_calls = 0  # of the runtime, kept or not
        self._num_typical = 0  # events no longer than MAX_WHOLE_BYTES, by which damaged text is counted
        self._typical_bytes = 0
        self._layout: EventLayout | None = None
        self._layout_tries = 0
        self._finder: BoundaryFinder | None = None

    def add(self, chunk: bytes, boundary: bytes) -> None:
        """Read one chunk of EventChunks."""
        if self._finder is None:
            self._finder = BoundaryFinder(boundary)
        scan = EventScan(chunk, self._finder)
        self.num_events += len(scan)
        lengths = scan.stop - scan.start
        typical = lengths[lengths < MAX_WHOLE_BYTES]
        self._num_typical += len(typical)
        self._typical_bytes += int(typical.sum())
        if self._layout is None and self._layout_tries < LEARN_CHUNKS:
            self._layout = EventLayout.learn(scan.first_texts(LEARN_EVENTS), self.detail)
            self._layout_tries += 1
        if self._layout is None:
            self._add_any(scan.first_texts(len(scan)))
            return
        texts = self._layout.route(scan)
        self.num_calls += texts.num_calls
        self._add_device(texts.device)
        for kind, rows in texts.host:
            self._add_host(rows, kind)
        self._add_described(texts.described, HostKind.OPERATOR)
        self._add_any(texts.other)
        if texts.products:
            self.products.extend(_join(texts.products))
        if texts.memory:
            self.memory.extend(_join(texts.memory))
        # A cut that joined two events may look like one that is skipped: nothing else would decode it.
        if not holds_whole_events(chunk):
            self._check_skipped(scan.texts(self._layout.skipped(texts)))

    def _check_skipped(self, rows: list[bytes]) -> None:
        """Count what is lost in skipped events of a damaged chunk."""
        for row in rows:
            if row.count(0) >= MIN_HOLE_BYTES or salvage_one(row)[0] is None:
                self._count_lost(row)

    def _count_lost(self, row: bytes) -> None:
        """Count the events that a text which cannot be read stood for, by its length."""
        lost = max(1, round(len(row) * self._num_typical / self._typical_bytes)) if self._num_typical else 1
        self.num_dropped += lost
        self.num_events += lost - 1

    def _add_device(self, rows: list[bytes]) -> None:
        if rows:
            try:
                described = self.device.extend(_join(rows), len(rows))
            except DECODE_ERRORS:
                self._add_any(rows)
            else:
                self._add_described([rows[place] for place in described], None)

    def _add_described(self, rows: list[bytes], kind: HostKind | None) -> None:
        """Add rows of collectives, of the host where a kind is given, else of the device."""
        if not rows:
            return
        try:
            events = decode_described(_join(rows), len(rows))
        except DECODE_ERRORS:
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
            except DECODE_ERRORS:
                self._add_any(rows)

    def _add_any(self, rows: list[bytes]) -> None:
        if not rows:
            return
        try:
            events = decode_any(_join(rows))
        except DECODE_ERRORS:
            self._salvage(rows)
            return
        # Where the text between events varies, a row may hold several.
        self.num_events += len(events) - len(rows)
        for event in events:
            self._add_event(event)

    def _salvage(self, rows: list[bytes], *, are_parted: bool = False) -> None:
        for row in rows:
            event, mended = salvage_one(row)
            # A hole of NUL bytes swallowed events; blanking it would mend the two halves into one.
            if event is not None and row.count(0) < MIN_HOLE_BYTES:
                self.num_repaired += mended
                self._add_event(event)
            elif event is None and not are_parted and len(parts := parts_of(row)) > 1:
                self.num_events += len(parts) - 1
                self._salvage(parts, are_parted=True)
            else:
                self._count_lost(row)

    def _add_event(self, event: AnyEvent) -> None:
        if event.ph != "X":
            return
        start, duration = as_float(event.ts), as_float(event.dur)
        name = event.name
        if start is None or not isinstance(name, str):
            self.num_dropped += 1
            return
        category = str(event.cat).lower() if event.cat else ""
        self.num_bare += not category and bool(duration)
        if is_device_category(category):
            self.device.append(event, comm_args(event), start, duration or 0.0)
            return
        self.num_calls += is_runtime_category(category)
        kind = host_kind(category, name, self.detail)
        if kind is not None:
            self.host.append(event, comm_args(event), kind, start, duration or 0.0)


class TimedRows:
    """Collects every row that has a duration, for rules that know no categories (HTA's)."""

    def __init__(self) -> None:
        self.columns = TimedColumns()

    def add(self, chunk: bytes, boundary: bytes) -> None:
        """Read one chunk of EventChunks; what cannot be read is left out."""
        parts = split_events(chunk, boundary)
        try:
            self.columns.extend(_join(parts))
        except DECODE_ERRORS:
            for part in parts:
                event, _ = salvage_one(part)
                if event is not None:
                    self.columns.append(event)


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
