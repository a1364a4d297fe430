"""Tar archives: where each member lies, so that it can be read without what precedes it.

A compressed archive is decompressed once, into a temporary file that goes when the process ends. Headers are walked
here: the standard library reads names and attributes of any length into memory.
"""

from __future__ import annotations

import atexit
import bz2
import lzma
import os
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, TYPE_CHECKING, cast

from paro_advise.errors import HostileInputError, InputError
from paro_advise.trace_parsers.bytes.constants import (
    FREE_BYTES,
    HASH_BYTES,
    MAX_HEADER_BYTES,
    MAX_MEMBERS,
    MAX_OUTPUT_BYTES,
    MAX_RATIO,
)
from paro_advise.trace_parsers.bytes.inflate import INFLATE_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator

_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_RECORD = 512  # bytes; of a header, and what contents are filled up to; POSIX.1-1988, ustar
_LONG_HEADERS = b"LKxgX"  # type flags: GNU long name and link, pax headers
# A size beyond 2^63 is a ValueError or OverflowError where a file is told to go there.
_BROKEN: tuple[type[Exception], ...] = (
    tarfile.TarError, EOFError, OSError, lzma.LZMAError, ValueError, OverflowError, *INFLATE_ERRORS,
)  # fmt: skip


def is_archive(path: PurePath) -> bool:
    """Tell by its name whether a file is an archive."""
    return path.name.lower().endswith(_SUFFIXES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveMember:
    """A regular file in an archive: ``size`` bytes from ``offset`` on of the uncompressed archive ``data``."""

    name: str
    data: Path
    offset: int
    size: int


def archive_members(path: Path) -> list[ArchiveMember]:
    """Return the regular files in a tar archive, in order.

    Raises:
        InputError: the archive cannot be read at all.
        HostileInputError: it holds more than MAX_MEMBERS members, expands without bound, or has endless headers.
    """
    data = _unpack(path)
    members: list[ArchiveMember] = []
    problem: Exception | None = None
    try:
        _check_headers(data, str(path))
        with tarfile.open(data, mode="r:") as archive:
            for info in archive:
                if len(members) >= MAX_MEMBERS:
                    raise HostileInputError(f"an archive must hold at most {MAX_MEMBERS} files", where=str(path))
                if info.isfile() and not info.issparse():
                    members.append(
                        ArchiveMember(name=info.name, data=data, offset=info.offset_data, size=max(0, info.size))
                    )
    except _BROKEN as error:
        problem = error
    if not members and problem is not None:
        raise InputError(f"the archive cannot be read ({problem})", where=str(path)) from problem
    return members


def _check_headers(data: Path, where: str) -> None:
    """Refuse names and attributes that are too long to be any.

    Raises:
        HostileInputError: a header holds more than 64 KiB.
    """
    end = data.stat().st_size
    with data.open("rb") as file:
        while file.tell() < end:
            header = file.read(_RECORD)
            if len(header) < _RECORD or not header.strip(b"\0"):
                return
            try:
                size = tarfile.nti(header[124:136])  # type: ignore[attr-defined]  # in the module, not in its stubs
            except tarfile.HeaderError:
                return  # the archive's reader will say so
            if header[156:157] in _LONG_HEADERS and size > MAX_HEADER_BYTES:
                raise HostileInputError(
                    f"a name in an archive must hold at most {MAX_HEADER_BYTES >> 10} KiB, got {size} bytes",
                    where=where,
                )
            if not 0 <= size <= end:
                return
            file.seek(-(-size // _RECORD) * _RECORD, os.SEEK_CUR)


def _unpack(path: Path) -> Path:
    """Return an uncompressed archive as it lies, a compressed one as a temporary file."""
    with path.open("rb") as file:
        first = file.read(6)
    if not first.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")):
        return path
    handle, name = tempfile.mkstemp(prefix="paro-advise-", suffix=".tar")
    atexit.register(Path(name).unlink, missing_ok=True)
    with os.fdopen(handle, "wb") as spool:
        allowed = min(FREE_BYTES + MAX_RATIO * path.stat().st_size, MAX_OUTPUT_BYTES)
        written = 0
        for block in _decompress(path, first):
            written += len(block)
            if written > allowed:
                raise HostileInputError(f"an archive must expand at most {MAX_RATIO} times", where=str(path))
            spool.write(block)
    return Path(name)


def _decompress(path: Path, first: bytes) -> Iterator[bytes]:
    """Yield what an archive expands to, as far as it can be read."""
    with _open(path, first) as file:
        while True:
            try:
                block = file.read(HASH_BYTES)
            except _BROKEN:
                return
            if not block:
                return
            yield block


def _open(path: Path, first: bytes) -> IO[bytes]:
    if first.startswith(b"BZh"):
        return cast("IO[bytes]", bz2.open(path))
    if first.startswith(b"\xfd7zXZ"):
        return cast("IO[bytes]", lzma.open(path))
    try:  # several times faster than zlib; an optional extra
        from isal import igzip as gzip
    except ImportError:
        import gzip
    return cast("IO[bytes]", gzip.open(path))
