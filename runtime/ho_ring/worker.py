"""A thread that runs communication in order beside the computation."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from paro_advise.errors import CommunicationError, ParoAdviseError
from paro_advise.runtime.ho_ring.constants import WORKER_GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_Result = TypeVar("_Result")


class Worker:
    """Runs jobs one after the other in a thread of its own.

    A daemon thread, unlike those of ``concurrent.futures``: when another rank dies, this process must
    end with its error while a job still waits for a third rank.

    Attributes:
        thread: ends after ``close``.
    """

    _alive: ClassVar[weakref.WeakSet[Worker]] = weakref.WeakSet()  # of this process, for its end

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._last: Future[object] | None = None
        self.thread = threading.Thread(target=self._run, name=f"paro_advise {name}", daemon=True)
        self.thread.start()
        self._alive.add(self)

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Run a job after those before it."""
        future: Future[_Result] = Future()
        self._last = future  # type: ignore[assignment]  # only asked whether it is done, not for its result
        self._jobs.put(lambda: _fulfil(future, job))
        return future

    def close(self) -> None:
        """End the thread after the jobs that wait."""
        self._jobs.put(None)

    def finish(self) -> None:
        """Wait for the jobs; after an error that ends the process, end it at once instead.

        The job may wait for a rank that in turn waits for this process to end, and a thread that
        comes back from the backend while the interpreter is taken down aborts the process.
        """
        if self._last is not None and not self._last.done():
            if getattr(sys, "last_value", None) is not None:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            self._last.exception()
        # The thread may still let go of what the last job held.
        self.close()
        self.thread.join(WORKER_GRACE_S)

    @classmethod
    def finish_all(cls) -> None:
        """Wait for the jobs of all workers of this process."""
        for worker in list(cls._alive):
            worker.finish()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # while this thread waits, what the job held may go


def _fulfil(future: Future[_Result], job: Callable[[], _Result]) -> None:
    try:
        with torch.no_grad():
            result = job()
    except BaseException as error:  # noqa: BLE001 - belongs to whoever asks for the result
        future.set_exception(error)
    else:
        future.set_result(result)


atexit.register(Worker.finish_all)


@contextmanager
def reaching_all_ranks(what: str) -> Iterator[None]:
    """Name what was going on when another rank was lost.

    Raises:
        CommunicationError: the backend reported an error.
    """
    try:
        yield
    except (ParoAdviseError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # what torch says where a CPU has no more
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CommunicationError(
            f"{what} must reach all ranks, got: {reason}",
            hint="look for the first rank that failed; the others lost it",
        ) from error
