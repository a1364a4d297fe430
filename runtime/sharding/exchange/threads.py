"""Communication in a thread of its own: where collectives block whoever calls them, as gloo's do on CPUs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from paro_advise.runtime.ho_ring.worker import Worker, reaching_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from threading import Thread


class ThreadJob:
    """A job of a thread.

    Args:
        future: of it.
        what: names it in errors.
    """

    def __init__(self, future: Future[None], what: str) -> None:
        self._future = future
        self._what = what

    def wait(self) -> None:
        """Block until it is done.

        Raises:
            CommunicationError: it failed, most often because another rank is gone.
        """
        with reaching_all_ranks(self._what):
            self._future.result()


class ThreadExecutor:
    """Runs jobs in order in a thread, so that they overlap computation.

    Args:
        what: names the jobs in errors.
        depth: how many jobs may wait; bounds the memory of their buffers.
    """

    def __init__(self, what: str, depth: int) -> None:
        self._what = what
        self._depth = depth
        self._worker = Worker(what)
        self._pending: list[ThreadJob] = []

    @property
    def threads(self) -> list[Thread]:
        """Return the thread."""
        return [self._worker.thread]

    def arrive(self) -> None:
        """Do nothing: on a CPU what has been computed is there."""

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Do nothing beside it."""
        yield

    def submit(self, job: Callable[[], None]) -> ThreadJob:
        """Run a job after those before it; blocks while too many wait.

        Raises:
            CommunicationError: an earlier job failed.
        """
        while len(self._pending) >= self._depth:
            self._pending.pop(0).wait()
        submitted = ThreadJob(self._worker.submit(job), self._what)
        self._pending.append(submitted)
        return submitted

    def drain(self) -> None:
        """Wait for all jobs.

        Raises:
            CommunicationError: one failed.
        """
        while self._pending:
            self._pending.pop(0).wait()

    def ending(self) -> Callable[[], None]:
        """Return what ends the thread after the jobs that wait."""
        return self._worker.close
