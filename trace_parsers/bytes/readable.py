"""A stream of decompressed bytes, read either whole within a limit or line by line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.errors import HostileInputError
from paro_advise.trace_parsers.bytes.constants import MAX_LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Readable:
    """The content of one input, readable once.

    Args:
        blocks: decompressed bytes in order, in pieces of any size.
        limit_bytes: the most that ``read_all`` holds in memory.

    Attributes:
        num_cut_lines: lines longer than 1 MiB, of which ``lines`` gave only the beginning.
    """

    def __init__(self, blocks: Iterable[bytes], limit_bytes: int) -> None:
        self._blocks = blocks
        self._limit_bytes = limit_bytes
        self.num_cut_lines = 0

    def read_all(self, at_most_bytes: int | None = None) -> bytes:
        """Return everything.

        Args:
            at_most_bytes: a limit of the format, where it is below that of this object.

        Raises:
            HostileInputError: there is more than either limit.
        """
        limit = min(self._limit_bytes, at_most_bytes or self._limit_bytes)
        parts: list[bytes] = []
        num_bytes = 0
        for block in self._blocks:
            num_bytes += len(block)
            if num_bytes > limit:
                raise HostileInputError(
                    f"an input of this kind must hold at most {limit} bytes, this one holds more",
                    hint="pass a smaller file of the same run",
                )
            parts.append(block)
        return b"".join(parts)

    def lines(self) -> Iterator[str]:
        """Yield the lines without their ends; bytes that are not UTF-8 are replaced.

        Never holds more than one line of 1 MiB and one block.
        """
        kept = bytearray()
        is_cut = False
        is_first = True
        for block in self._blocks:
            start = 0
            while True:
                end = block.find(b"\n", start)
                stop = end if end >= 0 else len(block)
                room = MAX_LINE_BYTES - len(kept)
                is_cut = is_cut or stop - start > room
                kept += block[start : min(stop, start + room)]
                if end < 0:
                    break
                yield self._text(kept, is_cut=is_cut, is_first=is_first)
                kept.clear()
                is_cut = is_first = False
                start = end + 1
        if kept:
            yield self._text(kept, is_cut=is_cut, is_first=is_first)

    def _text(self, raw: bytearray, *, is_cut: bool, is_first: bool) -> str:
        self.num_cut_lines += is_cut
        text = raw.decode("utf-8", "replace").removesuffix("\r")
        return text.removeprefix("\ufeff") if is_first else text
