"""A collective under way in a thread of ours, in the form that torch waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paro_advise.runtime.ho_ring.worker import reaching_all_ranks

if TYPE_CHECKING:
    from concurrent.futures import Future
    from datetime import timedelta


class AsyncWork(dist.Work):
    """Waits for a job of a Worker.

    Args:
        job: what to wait for.
        what: names it in errors.
        result: tensors that the future hands on.
    """

    def __init__(self, job: Future[object], what: str, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._job = job
        self._what = what
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is done.

        Raises:
            CommunicationError: it failed.
        """
        with reaching_all_ranks(self._what):
            self._job.result()
        return True

    def is_completed(self) -> bool:
        """Tell whether it has ended."""
        return self._job.done()

    def is_success(self) -> bool:
        """Tell whether it has ended well."""
        return self._job.done() and self._job.exception() is None

    def exception(self) -> BaseException | None:
        """Return what it failed with."""
        return self._job.exception() if self._job.done() else None

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future of the result, as DistributedDataParallel wants."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def pass_on(job: Future[object]) -> None:
            error = job.exception()
            if error is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)  # type: ignore[arg-type]  # torch takes any exception that Python can raise

        self._job.add_done_callback(pass_on)
        return future
