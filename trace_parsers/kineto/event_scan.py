"""Finds the events of a chunk and compares their texts, all at once and without cutting them out.

Cutting a chunk into one bytes object per event and looking at each costs more than decoding the
few events that are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

WORD_BYTES = 8  # bytes; what is compared at once; size of a uint64
_UNIT = 4  # bytes; aligned words searched for a boundary; size of a uint32


class BoundaryFinder:
    """Finds the text between two events in chunk after chunk.

    Of 7 bytes or more in a row, 4 fill an aligned word: only such words are looked at, for the
    four pieces of the boundary that may fill them.

    Attributes:
        opened: what follows the brace of a boundary belongs to the next event; where that begins.
    """

    def __init__(self, boundary: bytes) -> None:
        self.opened = boundary.rfind(b"{") + 1
        self._boundary = boundary
        pieces = [boundary[skip : skip + _UNIT] for skip in range(_UNIT)]
        values = np.array([int.from_bytes(piece, "little") for piece in pieces], dtype=np.uint32)
        self._skips = np.argsort(values)
        self._pieces = values[self._skips]
        # Kept from chunk to chunk: fresh pages would cost more than a search.
        self._marks = np.empty((2, 0), dtype=np.bool_)

    def positions(self, chunk: bytes) -> NDArray[np.intp]:
        """Return where a boundary starts, everywhere in a chunk."""
        if len(self._boundary) < 2 * _UNIT - 1 or len(chunk) < len(self._boundary):
            return self._short_positions(chunk)
        words = np.frombuffer(chunk, dtype="<u4", count=len(chunk) // _UNIT)
        if len(words) > self._marks.shape[1]:
            self._marks = np.empty((2, len(words)), dtype=np.bool_)
        marks, more = self._marks[:, : len(words)]
        np.equal(words, self._pieces[0], out=marks)
        for piece in self._pieces[1:]:
            np.equal(words, piece, out=more)
            np.logical_or(marks, more, out=marks)
        at = np.flatnonzero(marks)
        at = at * _UNIT - self._skips[np.searchsorted(self._pieces, words[at])]
        inside = slice(np.searchsorted(at, 0), np.searchsorted(at, len(chunk) - len(self._boundary), "right"))
        at = at[inside]
        found: NDArray[np.intp] = at[_windows(chunk, f"S{len(self._boundary)}")[at] == self._boundary]
        return found

    def _short_positions(self, chunk: bytes) -> NDArray[np.intp]:
        found = []
        at = chunk.find(self._boundary) if self._boundary else -1
        while at >= 0:
            found.append(at)
            at = chunk.find(self._boundary, at + len(self._boundary))
        return np.array(found, dtype=np.intp)


class EventScan:
    """The events of one chunk of EventChunks.

    Attributes:
        start, stop: where each event's text (without its outer braces) lies in the chunk.
    """

    def __init__(self, chunk: bytes, finder: BoundaryFinder) -> None:
        self._chunk = chunk
        cuts = finder.positions(chunk)
        self.start = np.concatenate(([0], cuts + finder.opened))
        self.stop = np.append(cuts, len(chunk))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_bytes(self) -> int:
        """Return the size of the chunk."""
        return len(self._chunk)

    def texts(self, rows: NDArray[np.intp]) -> list[bytes]:
        """Return the texts of some events."""
        chunk = self._chunk
        bounds = zip(self.start[rows].tolist(), self.stop[rows].tolist(), strict=True)
        return [chunk[start:stop] for start, stop in bounds]

    def first_texts(self, count: int) -> list[bytes]:
        """Return the texts of the first events."""
        return self.texts(np.arange(min(count, len(self))))

    def shorter_than(self, size: int) -> NDArray[np.intp]:
        """Return the events with less text; what is read of them beyond its end is not theirs."""
        return np.flatnonzero(self.stop - self.start < size)

    def words(self, offset: int, rows: NDArray[np.intp] | None = None) -> NDArray[np.uint64]:
        """Return the 8 bytes at an offset of each event, or of some."""
        windows = _windows(self._chunk, "<u8")
        start = self.start if rows is None else self.start[rows]
        found: NDArray[np.uint64] = windows[np.minimum(start + offset, len(windows) - 1)]
        return found

    def have(self, offset: int, text: bytes) -> NDArray[np.bool_]:
        """Mark the events that have the end of a text (at most 8 bytes) right before an offset."""
        text = text[-WORD_BYTES:]
        mask = np.uint64((1 << 8 * len(text)) - 1)
        found: NDArray[np.bool_] = self.words(offset - len(text)) & mask == np.uint64(int.from_bytes(text, "little"))
        return found


class WordTable:
    """A small set of words of one length, at most 8 bytes, each with a value above 0."""

    def __init__(self, words: Mapping[bytes, int]) -> None:
        self.size = len(next(iter(words)))
        table = sorted((int.from_bytes(word, "little"), value) for word, value in words.items())
        self._mask = np.uint64((1 << 8 * self.size) - 1)
        # The last place is for what lies beyond all words.
        self._words = np.array([*(word for word, _ in table), np.iinfo(np.uint64).max], dtype=np.uint64)
        self._values = np.array([*(value for _, value in table), 0], dtype=np.uint8)

    def values(self, found: NDArray[np.uint64]) -> NDArray[np.uint8]:
        """Return the value of each word, given with what follows it; 0 for those not in the set."""
        found = found & self._mask
        place = np.searchsorted(self._words, found)
        values: NDArray[np.uint8] = self._values[place] * (self._words[place] == found)
        return values


def _windows(chunk: bytes, dtype: str) -> NDArray[np.generic]:
    """Return every run of bytes of a type's size, overlapping, without copying."""
    size = np.dtype(dtype).itemsize
    return np.ndarray((max(0, len(chunk) - size + 1),), dtype=dtype, buffer=chunk, strides=(1,))
