"""The traces that processes write when they are asked: waited for, given their rank, compressed."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from paro_advise.core.capture_files import trace_file
from paro_advise.errors import OutputError
from paro_advise.runtime.attach.constants import COMPRESSION_LEVEL, COPY_BYTES

if TYPE_CHECKING:
    from paro_advise.runtime.attach.processes import Process


class Traces:
    """The traces of one recording.

    Args:
        folder: for them; made where there is none.

    Attributes:
        asked_for: path that processes are told; each puts its own number into the file's name.
        written: file name by process.
        lost: why a process left none.

    Raises:
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self.written: dict[Process, str] = {}
        self.lost: dict[Process, str] = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A name of its own, so that nobody else's file is taken for a trace.
            self._raw = Path(tempfile.mkdtemp(prefix=".recording-", dir=self._folder))
        except OSError as error:
            raise OutputError(f"attach must write its folder: {error.strerror}", where=str(folder)) from error
        self.asked_for = str(self._raw / "trace.json")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the folder in which processes write: what comes later is not waited for."""
        shutil.rmtree(self._raw, ignore_errors=True)

    def take(self, process: Process) -> bool:
        """Tell whether a process is done with: its trace is there and taken, or it has ended without."""
        raw = self._raw / f"trace_{process.line[0]}.json"
        is_over = process.number > 0 and not Path(f"/proc/{process.number}").exists()
        if _is_whole(raw):
            self._pack(process, raw)
        elif is_over:
            self.lost[process] = "it ended before its trace was written"
        else:
            return False
        return True

    def give_up(self, process: Process, waited_s: float) -> None:
        """Say that a process has written nothing in time."""
        self.lost[process] = (
            f"no trace after {waited_s:.0f} s; in a container it must see {self._raw.parent} under the same path"
        )

    def _pack(self, process: Process, raw: Path) -> None:
        place = process.place
        name = f"process{process.line[0]}.json.gz" if place is None else trace_file(place.rank)
        facts = {} if place is None else {"rank": place.rank, "world_size": place.world_size}
        packed = raw.with_suffix(".gz")
        try:
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=COMPRESSION_LEVEL) as sink:
                _begin(source, sink, {name: value for name, value in facts.items() if value is not None})
                shutil.copyfileobj(source, sink, COPY_BYTES)
            os.replace(packed, self._folder / name)  # noqa: PTH105 - as elsewhere
        except OSError as error:
            raise OutputError(f"attach must write its folder: {error.strerror}", where=str(self._folder)) from error
        finally:
            raw.unlink(missing_ok=True)
        self.written[process] = name


def _is_whole(path: Path) -> bool:
    """Tell whether a trace is there to its end; older versions of torch write it under its own name."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def _begin(source: BinaryIO, sink: gzip.GzipFile, facts: dict[str, int]) -> None:
    """Copy the begin of a trace and put in what torch's own profiler would have said of the process's place."""
    start = source.read(1)
    sink.write(start)
    if start == b"{" and facts:
        sink.write(b'"distributedInfo": ' + json.dumps(facts).encode() + b",")
