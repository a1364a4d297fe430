"""Cuts a Kineto JSON stream into its head, chunks of whole events, and its tail.

The text between two events is learned from the first one, so that every layout since 2020
(several fields a line, one field a line, one line in all) is cut the same way. A wrong cut can
only make a decode fail, which is repaired or counted later; it can never alter data silently.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.bytes.constants import (
    CHUNK_BYTES,
    FEW_IN_FRONT,
    MAX_FIRST_EVENT_BYTES,
    MAX_KEY_BYTES,
    MAX_LEADING_BYTES,
    MAX_PENDING_BYTES,
    ROWS_IN_FRONT,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ARRAY = re.compile(rb'"traceEvents"\s{0,1000}:\s{0,1000}\[')
_BARE_LIST = re.compile(rb"[\s\xef\xbb\xbf]*\[\s*\{")
# An event's end, and the end of the array with what may follow it.
_ARRAY_END = re.compile(rb"\}\s*\](?=\s*(?:\Z|\}|,\s*\"))")
_SPACES_AND_COMMA = re.compile(rb"\s*,\s*(?=\{)")
# Fields of events, with which one may begin.
_EVENT_KEYS = (b'"ph"', b'"name"', b'"cat"', b'"ts"', b'"pid"', b'"tid"', b'"args"', b'"dur"', b'"id"')
_FALLBACK_BOUNDARIES = (b"\n  },\n  {", b'},{"ph"', b'}, {"ph"', b'},\n{"ph"', b'},{"name"', b'}, {"name"')


class EventChunks:
    """Splits blocks of bytes into chunks of whole events.

    Attributes (complete after iteration):
        head: the text before the event array, "" for a bare list.
        tail: the text after the event array.
        boundary: the bytes from the end of one event to the start of the next.
        lost_bytes: bytes given up because no event boundary was found in 64 MiB.
        is_open: the array was never closed, so the file ends early.
    """

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self.head = b""
        self.tail = b""
        self.boundary = b""
        self.lost_bytes = 0
        self.is_open = False
        self.found_array = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield chunks: event texts joined by ``boundary``, without the outer braces."""
        pending = self._find_array()
        if pending is None:
            return
        pending = self._learn_boundary(pending)
        if not self.boundary:
            yield from self._split_end(pending)
            return
        # Texts of events without their outer braces; the last one is still open.
        parts = [pending[pending.find(b"{") + 1 :]]
        size = len(parts[0])
        for block in self._blocks:
            size += len(block)
            cut = block.rfind(self.boundary) if size >= CHUNK_BYTES else -1
            if cut >= 0:
                yield b"".join((*parts, memoryview(block)[:cut]))
                parts = [self._event_opening() + block[cut + len(self.boundary) :]]
                size = len(parts[0])
            elif size <= MAX_PENDING_BYTES:
                parts.append(block)
            else:
                self.lost_bytes += size
                parts, size = [], 0
        yield from self._split_end(b"{" + b"".join(parts))

    def _find_array(self) -> bytes | None:
        """Read up to the event array; return what follows its bracket, None when there is none."""
        pending = bytearray()
        searched = 0
        for block in self._blocks:
            pending += block
            if searched < MAX_LEADING_BYTES and _BARE_LIST.match(pending, 0, MAX_LEADING_BYTES):
                self.found_array = True
                return bytes(pending[pending.index(b"[") + 1 :])
            if found := _ARRAY.search(pending, max(0, searched - MAX_LEADING_BYTES)):
                self.found_array = True
                self.head = bytes(pending[: found.start()])
                return bytes(pending[found.end() :])
            searched = len(pending)
            if searched > MAX_PENDING_BYTES:
                self.lost_bytes = searched
                break
        self.head = bytes(pending[:MAX_PENDING_BYTES])
        return None

    def _learn_boundary(self, pending: bytes) -> bytes:
        """Set ``boundary`` from the first two events; return the bytes read so far."""
        decoder = json.JSONDecoder(strict=False)
        ended = False
        while True:
            start = pending.find(b"{")
            if start >= 0:
                # Latin-1 keeps one character a byte, so offsets carry over.
                text = pending[start : start + MAX_FIRST_EVENT_BYTES].decode("latin-1")
                try:
                    _, end = decoder.raw_decode(text)
                except (ValueError, RecursionError):
                    end = 0
                if end and (gap := _SPACES_AND_COMMA.match(pending, start + end)):
                    line_start = pending.rfind(b"\n", start, start + end) + 1
                    closing = pending[line_start : start + end]
                    prefix = b"\n" + closing if line_start and closing.strip() == b"}" else b"}"
                    opening = prefix + gap.group() + b"{"
                    self.boundary = opening + self._usual_key(pending, opening, self._first_key(pending, gap.end()))
                    return pending
                if end and (ended or b"]" in pending[start + end : start + end + 64]):
                    return pending
            if ended or len(pending) > MAX_FIRST_EVENT_BYTES:
                counts = [(pending.count(known), known) for known in _FALLBACK_BOUNDARIES]
                count, best = max(counts)
                self.boundary = best if count else b""
                return pending
            block = next(self._blocks, b"")
            ended = not block
            pending += block

    @staticmethod
    def _first_key(pending: bytes, brace: int) -> bytes:
        """Return nothing for multi-line layouts, the first key for one-line ones.

        On one line ``},{`` also separates nested objects, so the cut includes the key that
        opens an event.
        """
        if pending[brace + 1 : brace + 2] != b'"':
            return b""
        end = pending.find(b'"', brace + 2)
        return pending[brace + 1 : end + 1] if 0 < end - brace < MAX_KEY_BYTES else b""

    @staticmethod
    def _usual_key(pending: bytes, opening: bytes, first: bytes) -> bytes:
        """Return the key that opens most events, where the first ones may be rows that somebody put in front."""
        if not first:
            return first
        counts = {key: pending.count(opening + key) for key in dict.fromkeys((first, *_EVENT_KEYS))}
        most = max(counts, key=lambda key: (counts[key], key == first))
        # Objects inside events begin with fields of their own, and may be more than the events are.
        return most if counts[first] < max(ROWS_IN_FRONT, FEW_IN_FRONT * counts[most]) else first

    def _split_end(self, pending: bytes) -> Iterator[bytes]:
        """Split the final piece into events and tail."""
        start = pending.find(b"{")
        if start < 0:
            self._end(pending)
            return
        cut = pending.rfind(self.boundary) if self.boundary else -1
        if cut > start:
            yield pending[start + 1 : cut]
            pending = b"{" + self._event_opening() + pending[cut + len(self.boundary) :]
            start = 0
        text = pending[start:].decode("latin-1")
        position, events = 0, []
        decoder = json.JSONDecoder(strict=False)
        while text.startswith("{", position):
            try:
                _, end = decoder.raw_decode(text, position)
            except (ValueError, RecursionError):
                break
            events.append(text[position:end])
            gap = re.compile(r"[\s,]*").match(text, end)
            position = gap.end() if gap else end
        rest = text[position:].encode("latin-1")
        if events:
            yield ",".join(events).encode("latin-1")[1:-1]
        if rest.startswith(b"{") and (closing := _ARRAY_END.search(rest)):
            # The last event itself is broken: hand it on so that it is repaired or counted.
            yield rest[1 : closing.start()]
            rest = rest[closing.end() - 1 :]
        self._end(rest)

    def _end(self, rest: bytes) -> None:
        """Set what follows the events; brackets inside an event that was cut do not close their array."""
        self.tail = rest
        self.is_open = not rest.lstrip(b" \r\n\t,").startswith(b"]")

    def _event_opening(self) -> bytes:
        """Return the part of the boundary that belongs to the next event (its first key)."""
        return self.boundary[self.boundary.rindex(b"{") + 1 :]
