"""Standard output and error, whose reader may close them before a verb is done."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LeftStream(io.FileIO):
    """Writes to a descriptor until its reader has gone, and drops what comes after.

    So ``apply --write | head`` still writes, and a gate of ``compare | head`` keeps its exit code. Any other failure is
    raised once; what is left in buffers then is dropped, so that Python's own flush at the end does not fail again.
    """

    is_left = False
    has_failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write bytes; return how many were taken, None where a non-blocking descriptor takes none now."""
        if self.has_failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self.is_left = True
            return memoryview(data).nbytes
        except OSError:
            self.has_failed = True
            raise


def outlive_readers() -> None:
    """Let standard output and error take what nobody reads."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def is_reader_gone() -> bool:
    """Return whether the reader of standard output is known to have gone."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return isinstance(raw, LeftStream) and raw.is_left


def _outliving(stream: TextIO) -> TextIO:
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # closed by who started us, or no file
        return stream
    stream.flush()
    raw = LeftStream(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream is sys.stderr or stream.isatty(),
    )
