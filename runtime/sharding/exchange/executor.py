"""What runs communication beside computation, on any kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paro_advise.runtime.sharding.exchange.streams import AcceleratorStreams, StreamExecutor
from paro_advise.runtime.sharding.exchange.threads import ThreadExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from threading import Thread

    import torch


class Submission(Protocol):
    """Communication that has been submitted."""

    def wait(self) -> None:
        """Let what the caller does from here on come after it; as often as asked, from any stream.

        Raises:
            CommunicationError: it failed, most often because another rank is gone.
        """


class Executor(Protocol):
    """Runs jobs one after the other, each after all that its caller has begun to compute before.

    Every rank submits the same jobs in the same order, so that the collectives of a communicator are issued in one
    order everywhere.
    """

    @property
    def threads(self) -> Sequence[Thread]:
        """Return the threads that run jobs; they end after ``ending()`` was called."""

    def arrive(self) -> None:
        """Note that what the caller's stream computes now is read in the next ``meeting``."""

    def meeting(self) -> AbstractContextManager[None]:
        """Return a context in which the caller may read what has arrived, and after which that may be freed."""

    def submit(self, job: Callable[[], None]) -> Submission:
        """Run a job after those before it.

        Raises:
            CommunicationError: it, or an earlier one, failed.
        """

    def drain(self) -> None:
        """Wait for all jobs.

        Raises:
            CommunicationError: one failed.
        """

    def ending(self) -> Callable[[], None]:
        """Return what ends the executor once its model is gone; it holds nothing of the model."""


def executor_for(device: torch.device, what: str, depth: int = 2) -> Executor:
    """Return the executor of a kind of device.

    Args:
        device: that the backend communicates from.
        what: names the jobs in errors.
        depth: how many of them may wait; bounds the memory of their buffers.
    """
    if device.type == "cpu":
        return ThreadExecutor(what, depth)
    return StreamExecutor(what, AcceleratorStreams(device), depth)
