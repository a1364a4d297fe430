"""Standard input and pipes as temporary files, since inputs are read twice."""

from __future__ import annotations

import os
import select
import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from paro_advise.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_PIPE_WAIT_S = 5.0  # seconds that a pipe may have nobody who writes to it; assumed: shells start both ends at once
_BLOCK_BYTES = 1 << 20  # bytes read at once; assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Spooled:
    """Paths to read, streams among them as temporary files.

    Attributes:
        paths: of files and folders.
        stream_of: what a user calls the stream of each temporary file.
    """

    paths: tuple[str, ...]
    stream_of: Mapping[str, str]

    def shown(self, path: str) -> str:
        """Return a path as the user knows it."""
        return self.stream_of.get(path, path)


@contextmanager
def spooled(paths: Sequence[str]) -> Iterator[Spooled]:
    """Give the paths with each stream among them replaced by a temporary file of what it holds.

    Raises:
        InputError: nobody writes to a pipe, or what is done meanwhile raises it, which then names the stream.
    """
    if not any(map(is_stream, paths)):
        yield Spooled(paths=tuple(paths), stream_of={})
        return
    with tempfile.TemporaryDirectory(prefix="paro-advise-") as folder:
        files, stream_of = [], {}
        for number, path in enumerate(paths):
            if is_stream(path):
                target = Path(folder) / f"stdin-{number}"
                with target.open("wb") as file:
                    _copy(path, file)
                stream_of[str(target)] = "standard input" if path == "-" else path
                path = str(target)
            files.append(path)
        found = Spooled(paths=tuple(files), stream_of=stream_of)
        try:
            yield found
        except InputError as error:
            error.where = found.shown(error.where) if error.where else None
            raise


def is_stream(path: str) -> bool:
    """Tell whether a path can be read only once."""
    return path == "-" or Path(path).is_fifo()


def _copy(path: str, file: IO[bytes]) -> None:
    if path == "-":
        shutil.copyfileobj(sys.stdin.buffer, file)
        return
    # Opened to wait, a pipe without a writer would block for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _copy_pipe(descriptor, path, file)
    finally:
        os.close(descriptor)


def _copy_pipe(descriptor: int, path: str, file: IO[bytes]) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ends, has_writer = time.monotonic() + _PIPE_WAIT_S, False
    while True:
        try:
            block = os.read(descriptor, _BLOCK_BYTES)
        except BlockingIOError:  # somebody holds it open and will write
            has_writer = True
            poll.poll()
            continue
        if block:
            has_writer = True
            file.write(block)
        elif has_writer:
            return
        elif time.monotonic() > ends:
            raise InputError(
                "nothing writes to this pipe",
                where=path,
                hint="start the writer first, or pass a file",
            )
        else:
            time.sleep(0.05)
