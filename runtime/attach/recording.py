"""A recording of a running job: who is asked to record, and when."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError
from paro_advise.runtime.attach.constants import (
    DEFAULT_SECONDS,
    GATHER_S,
    LEAD_S,
    MOST_AHEAD_S,
    MOST_SECONDS,
    POLL_S,
    WAIT_S,
    WARM_UP_S,
)
from paro_advise.runtime.attach.messages import settings
from paro_advise.runtime.attach.processes import are_all, chosen, ranks_of
from paro_advise.runtime.attach.traces import Traces

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paro_advise.runtime.attach.listener import Listener
    from paro_advise.runtime.attach.processes import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """What to record.

    Attributes:
        folder: for the traces; the job's processes write there.
        seconds: recorded.
        start_unix_s: when, by the clock that the nodes share; None for as soon as every rank of this node can know.
        below: the process whose descendants are meant, None for all.
        job: the Slurm job that is meant, None for all.
        wait_s: for the traces, after their end.
    """

    folder: Path
    seconds: float = DEFAULT_SECONDS
    start_unix_s: float | None = None
    below: int | None = None
    job: int | None = None
    wait_s: float = WAIT_S

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            UsageError: it cannot be done.
        """
        if not 0 < self.seconds <= MOST_SECONDS:
            raise UsageError(f"--seconds must be above 0 and at most {MOST_SECONDS:.0f}, got {self.seconds:g}")
        unfit = sorted({char for char in str(self.folder.absolute()) if char in "#=" or not char.isprintable()})
        if unfit:
            raise UsageError(
                "the folder's path must hold no '#', '=' or control character, which torch's settings take apart, "
                f"got {', '.join(map(repr, unfit))}",
                where=repr(str(self.folder)),
            )
        if self.start_unix_s is not None and not LEAD_S <= self.start_unix_s - time.time() <= MOST_AHEAD_S:
            raise UsageError(
                f"--at must lie {LEAD_S:.0f} s to {MOST_AHEAD_S:.0f} s ahead, it is "
                f"{self.start_unix_s - time.time():.0f} s ahead"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What came of it.

    Attributes:
        ranks: processes that are ranks.
        told: of these, who learnt of it in time.
        busy: of these, whose profiler was at work.
        written: file name of the trace by process.
        lost: why a process that was told left no trace.
    """

    ranks: tuple[Process, ...]
    told: tuple[Process, ...]
    busy: tuple[Process, ...]
    written: dict[Process, str]
    lost: dict[Process, str]

    @property
    def are_unknown(self) -> bool:
        """Tell whether nothing says which ranks they are."""
        return all(process.place is None for process in self.ranks)


def record(request: AttachRequest, listener: Listener, say: Callable[[str], None]) -> Attached:
    """Have the ranks of this node record at the same time.

    Args:
        request: what to record.
        listener: that they ask.
        say: takes a line for people about what goes on.

    Raises:
        UsageError: nobody asks, or more than one job does.
        OutputError: the folder cannot be written.
    """
    ranks = _gathered(request, listener)
    say(f"{_named(ranks)} of this node found")
    start_s = _start(request)
    say(f"recording {request.seconds:g} s from {time.strftime('%H:%M:%S', time.localtime(start_s))} on")
    with Traces(request.folder) as traces:
        told, busy = _tell(request, listener, ranks, start_s, traces.asked_for)
        _hear_until(listener, time.monotonic() + start_s + request.seconds - time.time())
        deadline_s = time.monotonic() + request.wait_s
        waiting = list(told)
        while waiting and time.monotonic() < deadline_s:
            _hear_until(listener, min(deadline_s, time.monotonic() + POLL_S))
            waiting = [process for process in waiting if not traces.take(process)]
        for process in waiting:
            traces.give_up(process, request.wait_s)
    return Attached(ranks=tuple(ranks), told=tuple(told), busy=tuple(busy), written=traces.written, lost=traces.lost)


def _gathered(request: AttachRequest, listener: Listener) -> list[Process]:
    """Return the ranks, when all of this node have asked or must have."""
    deadline_s = time.monotonic() + GATHER_S
    if request.start_unix_s is not None:
        deadline_s = min(deadline_s, time.monotonic() + request.start_unix_s - time.time() - LEAD_S + WARM_UP_S)
    ranks: list[Process] = []
    while time.monotonic() < deadline_s and not are_all(ranks):
        listener.hear(deadline_s, lambda *_: "")
        ranks = _ranks(request, listener)
    if not ranks:
        others = f" ({listener.num_foreign} messages came from other users)" if listener.num_foreign else ""
        meant = " that is meant" if listener.processes else ""
        raise UsageError(
            f"attach must find a job on this node that asks: no process{meant} of this user did{others}",
            hint="start the job with KINETO_USE_DAEMON=1, and let both have the same network namespace or "
            "KINETO_IPC_SOCKET_DIR",
        )
    return ranks


def _ranks(request: AttachRequest, listener: Listener) -> list[Process]:
    return ranks_of(chosen(listener.processes.values(), below=request.below, job=request.job))


def _start(request: AttachRequest) -> float:
    return float(math.ceil(time.time() + LEAD_S)) if request.start_unix_s is None else request.start_unix_s


def _tell(
    request: AttachRequest, listener: Listener, ranks: list[Process], start_s: float, trace: str
) -> tuple[list[Process], list[Process]]:
    """Tell each rank once; return who could be told in time, and who was busy."""
    told: list[Process] = []
    busy: dict[Process, None] = {}
    text = settings(trace=trace, start_unix_s=start_s, seconds=request.seconds, warm_up_s=WARM_UP_S)

    def wanted(process: Process, is_free: bool) -> str:  # noqa: FBT001 - as the listener calls it
        if process not in ranks or process in told:
            return ""
        if not is_free:
            busy[process] = None
            return ""
        busy.pop(process, None)
        told.append(process)
        return text

    deadline_s = time.monotonic() + start_s - WARM_UP_S - time.time()
    while len(told) < len(ranks) and time.monotonic() < deadline_s:
        listener.hear(deadline_s, wanted)
    return told, list(busy)


def _hear_until(listener: Listener, deadline_s: float) -> None:
    """Keep answering that nothing is wanted: a process that hears nothing waits for it, at its end too."""
    while time.monotonic() < deadline_s:
        listener.hear(deadline_s, lambda *_: "")


def _named(ranks: list[Process]) -> str:
    numbers = [process.place.rank for process in ranks if process.place is not None]
    if not numbers:
        return f"{len(ranks)} processes of unknown rank"
    return f"{len(numbers)} ranks" if len(numbers) > 1 else f"rank {numbers[0]}"
