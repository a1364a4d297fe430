"""The traces that processes write when they are asked: waited for, given their rank, compressed."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from paro_advise.core.capture_files import process_trace_file, trace_file
from paro_advise.errors import OutputError
from paro_advise.runtime.attach.constants import TAIL_BYTES
from paro_advise.runtime.capture.constants import COMPRESSION_LEVEL, COPY_BYTES

if TYPE_CHECKING:
    from paro_advise.runtime.attach.processes import Process

_STEP_MARKS = (b'"Optimizer.step#', b'"ProfilerStep#')  # names that torch gives, torch/optim and torch/profiler


class Traces:
    """The traces of one recording.

    Args:
        folder: for them; made where there is none.

    Attributes:
        written: file name by process.
        lost: why a process left none.

    Raises:
        OutputError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._raw: dict[Process, Path] = {}
        self._kept = False
        self.written: dict[Process, str] = {}
        self.lost: dict[Process, str] = {}
        self._is_new = not self._folder.exists()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # A name of its own, so that nobody else's file is taken for a trace.
            self._place = Path(tempfile.mkdtemp(prefix=".recording-", dir=self._folder))
        except OSError as error:
            raise OutputError(f"attach must write its folder: {error.strerror}", where=str(folder)) from error

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what is not a trace: what processes write from now on is not waited for."""
        if not self._kept:
            shutil.rmtree(self._place, ignore_errors=True)
        if self._is_new and not self.written:
            try:
                self._folder.rmdir()
            except OSError:  # it holds something
                return

    @property
    def told(self) -> list[Process]:
        """Return the processes that were told where to write."""
        return list(self._raw)

    def path_for(self, process: Process) -> str:
        """Return where a process is told to write; it puts its own number into the file's name.

        Each has a folder, since processes of two containers may have the same number.

        Raises:
            OutputError: the folder cannot be written.
        """
        own = self._place / str(len(self._raw))
        try:
            own.mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(f"attach must write its folder: {error.strerror}", where=str(own)) from error
        self._raw[process] = own / f"trace_{process.line[0]}.json"
        return str(own / "trace.json")

    def is_done(self, process: Process) -> bool:
        """Tell whether nothing more is to come of a process: its trace is there, or it has ended without."""
        ended = process.has_ended  # before the look: it may end when it has written
        if _is_whole(self._raw[process]):
            return True
        if ended:
            self.lost[process] = "it ended before its trace was written"
        return ended

    def give_up(self, process: Process, waited_s: float) -> None:
        """Say that a process has written nothing in time."""
        self.lost[process] = (
            f"none came in {waited_s:.0f} s; another profiler or request may have been at work there, or it does not "
            f"see {self._folder} under this path, or may not write there (KINETO_ONDEMAND_TRACE_DIR of newer torch)"
        )

    def has_steps(self, process: Process) -> bool:
        """Tell whether the optimizer took a step in the trace of a process."""
        longest = max(map(len, _STEP_MARKS))
        rest = b""
        try:
            with self._raw[process].open("rb") as file:
                while piece := file.read(COPY_BYTES):
                    text = rest + piece
                    if any(mark in text for mark in _STEP_MARKS):
                        return True
                    rest = piece[-longest:]
        except OSError:
            pass
        return False

    def pack(self, process: Process, rank: int | None) -> None:
        """Put the trace of a process in its place; one that cannot be packed stays where it is."""
        raw = self._raw[process]
        name = process_trace_file(process.line[0], socket.gethostname()) if rank is None else trace_file(rank)
        facts = {} if rank is None else {"rank": rank}
        if facts and process.place is not None and process.place.world_size is not None:
            facts["world_size"] = process.place.world_size
        packed = raw.with_suffix(".gz")
        try:
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=COMPRESSION_LEVEL) as sink:
                _begin(source, sink, facts)
                shutil.copyfileobj(source, sink, COPY_BYTES)
            packed.replace(self._folder / name)
        except OSError as error:
            packed.unlink(missing_ok=True)
            self._kept = True
            self.lost[process] = f"it could not be compressed ({error.strerror}); it lies in {raw}"
        else:
            self.written[process] = name


def _is_whole(path: Path) -> bool:
    """Tell whether a trace is there to its end; older versions of torch write it under its own name."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            tail = file.read().rstrip()
    except OSError:
        return False
    return tail.endswith(b"}") and b'"traceName"' in tail


def _begin(source: BinaryIO, sink: gzip.GzipFile, facts: dict[str, int]) -> None:
    """Copy the begin of a trace and put in what torch's own profiler would have said of the process's place."""
    start = source.read(1)
    sink.write(start)
    if start == b"{" and facts:
        sink.write(b'"distributedInfo": ' + json.dumps(facts).encode() + b",")
