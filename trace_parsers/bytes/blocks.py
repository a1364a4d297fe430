"""Bounded, streaming decompression of one input: plain, gzip, zstd, or a member of a tar."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from paro_advise.errors import HostileInputError, InputError
from paro_advise.trace_parsers.bytes.constants import (
    FREE_BYTES,
    GZIP_WINDOW_BITS,
    HASH_BYTES,
    MAX_OUTPUT_BYTES,
    MAX_RATIO,
    MAX_ZSTD_WINDOW,
    OUTPUT_BYTES,
    READ_BYTES,
)
from paro_advise.trace_parsers.bytes.inflate import INFLATE_ERRORS, inflate
from paro_advise.trace_parsers.remote.objects import shown_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.trace_parsers.bytes.archive import ArchiveMember
    from paro_advise.trace_parsers.remote.objects import RemoteObject


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRef:
    """Where an input lies: a file, a member of a tar archive, or an object of a store.

    Attributes:
        path: the file; of an object its key, which is no file.
        member: of the archive at ``path``.
        remote: the object, None for what lies on this machine.
        shown: the name shown to people in place of the path, as that of a copy; "" for none.
        missing_bytes: that a store did not give of what this is a copy of.
    """

    path: Path
    member: ArchiveMember | None = None
    remote: RemoteObject | None = None
    shown: str = ""
    missing_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Return its size as stored, 0 where nothing tells."""
        if self.remote is not None:
            return self.remote.size_bytes or 0
        try:
            return self.path.stat().st_size
        except OSError:  # reading it says why
            return 0

    @property
    def label(self) -> str:
        """Return the name shown to people: ``path``, ``path!member``, or an address."""
        if self.shown or self.remote is not None:
            return _printable(self.shown or shown_address(self.remote.url))  # type: ignore[union-attr]  # it is one
        name = str(self.path) if self.member is None else f"{self.path}!{self.member.name}"
        return _printable(name)

    @property
    def file_name(self) -> str:
        """Return the last part of the member or path."""
        return _printable(Path(self.member.name if self.member else self.path).name)


def _printable(name: str) -> str:
    """Return a name that any output may hold: no bytes that are not UTF-8, no control or bidi characters."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return "".join(char if char.isprintable() else "?" for char in text)


def _without_mark(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield blocks without the UTF-8 byte order mark that some editors and shells put in front of a text."""
    first = next(blocks, b"")
    if first:
        yield first.removeprefix(BOM_UTF8)
    yield from blocks


class BlockReader:
    """Iterates over the decompressed bytes of one input, without a byte order mark.

    After iteration: ``input_bytes`` and ``sha256`` describe the bytes as stored,
    ``output_bytes`` counts what came out, ``truncated`` says why the stream ended early or "".

    Raises (while iterating):
        HostileInputError: the data expands more than 250 times.
        InputError: the file cannot be opened or needs a package that is not installed.
    """

    def __init__(self, ref: SourceRef) -> None:
        self.ref = ref
        self.input_bytes = 0
        self.output_bytes = 0
        self.truncated = ""
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the hash of the stored bytes read so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[bytes]:
        try:
            if self.ref.member is None:
                with self.ref.path.open("rb") as file:
                    yield from _without_mark(self._decode(file))
            else:
                yield from _without_mark(self._read_member(self.ref.member))
        except OSError as error:
            raise InputError(
                f"an input must be a readable file, got: {error.strerror or error}", where=self.ref.label
            ) from error

    def finish(self) -> None:
        """Read the stored bytes to the end, so that ``sha256`` covers the whole input."""
        if self.ref.member is None and self.input_bytes < self.ref.path.stat().st_size:
            with self.ref.path.open("rb") as file:
                file.seek(self.input_bytes)
                while block := file.read(HASH_BYTES):
                    self._note(block)

    def _read_member(self, member: ArchiveMember) -> Iterator[bytes]:
        with member.data.open("rb") as file:
            file.seek(member.offset)
            part = _Part(file, member.size)
            yield from self._decode(cast("IO[bytes]", part))
            if part.left and not part.read(1):
                self.truncated = "archive ends early"

    def _decode(self, file: IO[bytes]) -> Iterator[bytes]:
        first = file.read(READ_BYTES)
        self._note(first)
        if first.startswith(b"\x1f\x8b"):
            yield from self._limit_output(self._gunzip(first, file))
        elif first.startswith(b"\x28\xb5\x2f\xfd"):
            yield from self._limit_output(self._unzstd(first, file))
        else:
            while first:
                self.output_bytes += len(first)
                yield first
                first = file.read(READ_BYTES)
                self._note(first)

    def _note(self, block: bytes) -> None:
        self.input_bytes += len(block)
        self._hash.update(block)

    def _limit_output(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.output_bytes += len(block)
            allowed = min(FREE_BYTES + MAX_RATIO * self.input_bytes, MAX_OUTPUT_BYTES)
            if self.output_bytes > allowed:
                raise HostileInputError(
                    f"compressed input must expand at most {MAX_RATIO} times, this one expands "
                    f"more ({self.output_bytes} bytes out of {self.input_bytes})",
                    where=self.ref.label,
                    hint="decompress it yourself and pass the plain file if it is really a trace",
                )
            yield block

    def _gunzip(self, data: bytes, file: IO[bytes]) -> Iterator[bytes]:
        stream = inflate.decompressobj(GZIP_WINDOW_BITS)
        inside = False
        while data:
            if not inside and not data.startswith(b"\x1f\x8b"):
                self.truncated = "bytes after the compressed data were ignored"
                return
            inside = True
            try:
                out = stream.decompress(data, OUTPUT_BYTES)
            except INFLATE_ERRORS as error:
                self.truncated = f"compressed data is broken ({error})"
                return
            if out:
                yield out
            data = stream.unconsumed_tail
            if stream.eof:
                inside = False
                data = stream.unused_data.lstrip(b"\0")
                stream = inflate.decompressobj(GZIP_WINDOW_BITS)
            if not data:
                data = file.read(READ_BYTES)
                self._note(data)
        if inside:
            self.truncated = "compressed data ends early"
            try:
                rest = stream.flush()
            except INFLATE_ERRORS:
                return
            if rest:
                yield rest

    def _unzstd(self, data: bytes, file: IO[bytes]) -> Iterator[bytes]:
        try:
            import zstandard
        except ImportError:
            raise InputError(
                "zstd input needs the package zstandard, which is not installed",
                where=self.ref.label,
                hint="pip install 'paro-advise[fast]'",
            ) from None
        reader = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW).stream_reader(
            cast("IO[bytes]", _Prefixed(data, file, self._note)), read_across_frames=True
        )
        while True:
            try:
                out = reader.read(OUTPUT_BYTES)
            except zstandard.ZstdError as error:
                self.truncated = f"compressed data is broken ({error})"
                return
            if not out:
                return
            yield out


class _Part:
    """A reader of the next ``size`` bytes of a file.

    Attributes:
        left: bytes not read yet.
    """

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self.left = size

    def read(self, size: int = -1) -> bytes:
        out = self._file.read(self.left if size < 0 else min(size, self.left))
        self.left -= len(out)
        return out


class _Prefixed:
    """A reader that gives bytes already read first, and reports what it reads after."""

    def __init__(self, first: bytes, file: IO[bytes], note: Callable[[bytes], None]) -> None:
        self._first = first
        self._file = file
        self._note = note

    def read(self, size: int = -1) -> bytes:
        if self._first:
            out, self._first = self._first, b""
            return out
        out = self._file.read(size if size > 0 else READ_BYTES)
        self._note(out)
        return out
