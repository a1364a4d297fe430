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
    MOST_AHEAD_S,
    MOST_SECONDS,
    START_LEAD_S,
    TOO_LATE_S,
    TRACE_POLL_S,
    TRACE_WAIT_S,
    WARM_UP_S,
)
from paro_advise.runtime.attach.messages import settings
from paro_advise.runtime.attach.processes import members, ranks_of, unheard
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
    """

    folder: Path
    seconds: float = DEFAULT_SECONDS
    start_unix_s: float | None = None
    below: int | None = None
    job: int | None = None

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
        ahead_s = math.inf if self.start_unix_s is None else self.start_unix_s - time.time()
        if self.start_unix_s is not None and not GATHER_S + START_LEAD_S <= ahead_s <= MOST_AHEAD_S:
            raise UsageError(
                f"--at must lie {GATHER_S + START_LEAD_S:.0f} s to {MOST_AHEAD_S:.0f} s ahead by this node's clock, "
                f"got {ahead_s:.0f} s"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What came of it.

    Attributes:
        written: file name of the trace by process.
        missing: why a process that may be a rank brought none.
        num_left_out: processes of the job that took no step beside others that did.
        num_unheard: ranks of this node that never asked, as far as their launcher tells.
        are_ranks_known: every trace names its rank.
    """

    written: dict[Process, str]
    missing: dict[Process, str]
    num_left_out: int
    num_unheard: int
    are_ranks_known: bool


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
    with Traces(request.folder) as traces:
        processes = _await_processes(request, listener)
        start_s = float(math.ceil(time.time() + START_LEAD_S)) if request.start_unix_s is None else request.start_unix_s
        shown = time.strftime("%H:%M:%S", time.localtime(start_s))
        say(f"{len(processes)} processes of the job found" if len(processes) > 1 else f"{processes[0].name} found")
        say(f"recording {request.seconds:g} s from {shown} on")
        try:
            missing = _tell(request, listener, processes, start_s, traces)
            _hear_until(listener, _monotonic_s(start_s + request.seconds))
            deadline_s = time.monotonic() + TRACE_WAIT_S
            waiting = traces.told
            while waiting and time.monotonic() < deadline_s:
                _hear_until(listener, min(deadline_s, time.monotonic() + TRACE_POLL_S))
                waiting = [process for process in waiting if not traces.is_done(process)]
        except KeyboardInterrupt:
            if traces.told:
                say(f"{len(traces.told)} processes record at {shown} all the same, and what they write is lost")
            raise
        for process in waiting:
            traces.give_up(process, TRACE_WAIT_S)
        done = [process for process in traces.told if process not in traces.lost]
        ranks = ranks_of(done, [process for process in done if traces.has_steps(process)])
        for process, rank in ranks.items():
            traces.pack(process, rank)
    missing.update(traces.lost)
    return Attached(
        written=traces.written,
        missing={process: why for process, why in missing.items() if not any(map(process.is_below, ranks))},
        num_left_out=len(done) - len(ranks),
        num_unheard=unheard(processes),
        are_ranks_known=None not in ranks.values(),
    )


def _await_processes(request: AttachRequest, listener: Listener) -> list[Process]:
    """Return the processes of the job, when all of this node must have asked."""
    if request.start_unix_s is not None:
        time.sleep(max(0.0, request.start_unix_s - START_LEAD_S - GATHER_S - time.time()))
    _hear_until(listener, time.monotonic() + GATHER_S)
    processes = members(listener.processes.values(), below=request.below, job=request.job)
    if processes:
        return processes
    known = [
        (len(listener.processes), "asked that are not of the job that you named"),
        (listener.num_foreign, "messages came from other users: run this as the job's own user"),
        (listener.num_elsewhere, "questions came from a folder of another name: give both the same, letter by letter"),
    ]
    others = "".join(f"; {number} {what}" for number, what in known if number)
    raise UsageError(
        f"attach must find a job of this user that asks on this node, none did in {GATHER_S:.0f} s{others}",
        hint="start the job with KINETO_USE_DAEMON=1, and give both the same network namespace or "
        "KINETO_IPC_SOCKET_DIR",
    )


def _tell(
    request: AttachRequest,
    listener: Listener,
    processes: list[Process],
    start_s: float,
    traces: Traces,
) -> dict[Process, str]:
    """Tell each process once; return why others could not be told."""
    missing = dict.fromkeys(processes, "it did not ask again before the start")

    def wanted(process: Process, is_free: bool) -> str:  # noqa: FBT001 - as the listener calls it
        if process not in missing:
            return ""
        if not is_free:
            missing[process] = "another profiler is at work there"
            return ""
        del missing[process]
        path = traces.path_for(process)
        return settings(trace=path, start_unix_s=start_s, seconds=request.seconds, warm_up_s=WARM_UP_S)

    deadline_s = _monotonic_s(start_s - TOO_LATE_S)
    while missing and time.monotonic() < deadline_s:
        listener.hear(deadline_s, wanted)
    return missing


def _monotonic_s(unix_s: float) -> float:
    """Return by the monotonic clock what is a time by the clock of all nodes."""
    return time.monotonic() + unix_s - time.time()


def _hear_until(listener: Listener, deadline_s: float) -> None:
    """Take questions, so that none is answered when it is long past."""
    while time.monotonic() < deadline_s:
        listener.hear(deadline_s, lambda *_: "")
