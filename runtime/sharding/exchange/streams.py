"""Communication on a stream of its own: where the host only issues it, as on GPUs with NCCL (docs/gpu.md, streams).

The host never waits here. Work is ordered by events: a job comes after what its caller's stream was asked to do
before, and whoever waits for a job lets its own stream wait. Jobs are issued by the thread that submits them, so
that the order of collectives is that of the program.

Memory. The allocator gives what is freed on the host to the next request on the same stream at once. So a job is
kept, with all that it uses, until the stream that submitted it waits for it: what that stream allocates later comes
after the job. Only then it is dropped. At most ``depth`` jobs are kept, by which the memory of their buffers is
bounded without the host.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from paro_advise.runtime.ho_ring.worker import reaching_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from threading import Thread


class Streams(Protocol):
    """The streams of a device."""

    def current(self) -> torch.Stream:
        """Return the one that the calling thread works on."""

    def create(self) -> torch.Stream:
        """Return a new one."""

    def using(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Let the calling thread work on a stream inside this context."""


class AcceleratorStreams:
    """The streams of a device of torch's.

    Args:
        device: a GPU, say.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> torch.Stream:
        """Return the one that the calling thread works on."""
        return torch.accelerator.current_stream(self._device)

    def create(self) -> torch.Stream:
        """Return a new one, whose work goes before that of others where both are ready."""
        return torch.Stream(self._device, priority=-1)

    def using(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Let the calling thread work on a stream inside this context."""
        return stream


class Fence(NamedTuple):
    """When memory that a job uses is free, without what it uses.

    Attributes:
        owner: the stream that submitted it, whose memory it uses.
        done: when it is through.
    """

    owner: torch.Stream
    done: torch.Event


class StreamJob:
    """A job that has been issued.

    Args:
        streams: of the device.
        issued: where, and when it is through.
        uses: keeps what it uses.
    """

    def __init__(self, streams: Streams, issued: Fence, uses: Callable[[], None]) -> None:
        self._streams = streams
        self._issued = issued
        self._uses: Callable[[], None] | None = uses

    def wait(self) -> None:
        """Let the caller's stream wait for it."""
        self._streams.current().wait_event(self._issued.done)

    def release(self) -> None:
        """Let what it uses go, once the stream that it is from waits for it."""
        self._issued.owner.wait_event(self._issued.done)
        self._uses = None


class StreamExecutor:
    """Issues jobs in order on a stream of their own.

    Args:
        what: names the jobs in errors.
        streams: of the device.
        depth: how many jobs may be under way; bounds the memory of their buffers.
    """

    def __init__(self, what: str, streams: Streams, depth: int) -> None:
        self._what = what
        self._streams = streams
        self._depth = depth
        self._stream = streams.create()
        self._arrived: set[torch.Stream] = set()
        self._pending: list[StreamJob] = []
        self._unwaited: list[Fence] = []  # of the pending, in their order

    @property
    def threads(self) -> list[Thread]:
        """Return none: the caller's thread issues the jobs."""
        return []

    def arrive(self) -> None:
        """Note that what the caller's stream computes now is read in the next ``meeting``."""
        self._arrived.add(self._streams.current())

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Let the caller's stream wait for those that something has arrived on, and then those for it."""
        current = self._streams.current()
        others, self._arrived = self._arrived - {current}, set()
        for stream in others:
            current.wait_event(stream.record_event())
        yield
        for stream in others:  # they may give the memory of what was read to others
            stream.wait_event(current.record_event())

    def submit(self, job: Callable[[], None]) -> StreamJob:
        """Issue a job after those before it, and after all that its caller's stream has been asked to do.

        Raises:
            CommunicationError: it could not be issued.
        """
        while len(self._pending) >= self._depth:
            self._pending.pop(0).release()
            self._unwaited.pop(0)
        owner = self._streams.current()
        self._stream.wait_event(owner.record_event())
        with reaching_all_ranks(self._what), self._streams.using(self._stream), torch.no_grad():
            job()
        issued = Fence(owner, self._stream.record_event())
        submitted = StreamJob(self._streams, issued, job)
        self._pending.append(submitted)
        self._unwaited.append(issued)
        return submitted

    def drain(self) -> None:
        """Let the caller's stream wait for all jobs, and let go what they use."""
        for job in self._pending:
            job.wait()
            job.release()
        self._pending.clear()
        self._unwaited.clear()

    def ending(self) -> Callable[[], None]:
        """Return what lets streams wait for jobs that are still kept, whose memory they are about to give to others."""
        return partial(_wait_for, self._unwaited)


def _wait_for(unwaited: list[Fence]) -> None:
    for issued in unwaited:
        issued.owner.wait_event(issued.done)
    unwaited.clear()
