"""Reads inputs in the processes of a pool: this machine's own, or a Dask cluster's."""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.facts.constants import IN_FLIGHT, POOL_BYTES
from paro_advise.advisor.facts.reading.one_input import read_one
from paro_advise.advisor.facts.reading.packing import read_packed, unpacked
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor, Future

    from paro_advise.advisor.facts.reading.engine import Result
    from paro_advise.trace_parsers.bytes.blocks import SourceRef


class LocalEngine:
    """This machine: in its own process where others would not pay for their start.

    Args:
        jobs: processes at most.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def read(
        self, refs: Sequence[SourceRef], cache: str | None, done: Callable[[int, Result], None], *, alone: bool
    ) -> dict[int, str]:
        """Read inputs; a process that ends takes no more with it than what was being read."""
        if not alone and (self._jobs == 1 or len(refs) == 1 or sum(ref.size_bytes for ref in refs) <= POOL_BYTES):
            for place, ref in enumerate(refs):
                done(place, read_one(ref, cache))
            return {}
        jobs = 1 if alone else min(self._jobs, len(refs))
        waiting = list(range(len(refs)))
        lost: dict[int, str] = {}
        while waiting:
            with _processes(jobs) as pool:
                # No more than it has processes: those that it has when it breaks are what may have broken it.
                rest, gone = _read_by(pool, jobs, refs, waiting, cache, done)
            lost |= gone
            waiting = rest
        return lost


class DaskEngine:
    """A Dask cluster: that of DASK_SCHEDULER_ADDRESS, else one on this machine.

    Args:
        jobs: processes of one on this machine.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def read(
        self, refs: Sequence[SourceRef], cache: str | None, done: Callable[[int, Result], None], *, alone: bool
    ) -> dict[int, str]:
        """Read inputs; Dask itself moves tasks of a worker that ends to others."""
        try:
            from distributed import Client
        except ImportError as error:
            raise UsageError(
                "--engine dask needs Dask", hint="pip install 'paro-advise[dask]', here and on its workers"
            ) from error
        address = os.environ.get("DASK_SCHEDULER_ADDRESS")
        own = {"n_workers": self._jobs, "threads_per_worker": 1, "dashboard_address": None}
        how: dict[str, Any] = {"address": address} if address else own
        with _join(Client, how) as client:
            cores = sum(client.ncores().values()) or 1
            size = 1 if alone else IN_FLIGHT * cores
            pool = client.get_executor(pure=False, retries=0)
            waiting = list(range(len(refs)))
            lost: dict[int, str] = {}
            while waiting:
                waiting, gone = _read_by(pool, size, refs, waiting, cache, done)
                lost |= gone
        return lost


def _join(client: Any, how: dict[str, Any]) -> Any:
    """Return Dask's client.

    Raises:
        UsageError: there is no such cluster.
    """
    try:
        return client(**how)
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"--engine dask must reach a cluster: {str(error).splitlines()[0][:200] if str(error) else error!r}",
            hint="set DASK_SCHEDULER_ADDRESS to a running one, or unset it to start one on this machine",
        ) from error


@contextmanager
def _processes(jobs: int) -> Iterator[Executor]:
    """Give a pool whose processes do not outlive an interruption."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def _read_by(
    pool: Executor,
    size: int,
    refs: Sequence[SourceRef],
    waiting: Sequence[int],
    cache: str | None,
    done: Callable[[int, Result], None],
) -> tuple[list[int], dict[int, str]]:
    """Read inputs until all are, or the pool is broken.

    Args:
        pool: of processes.
        size: inputs that it has at once.
        refs: all inputs.
        waiting: places of those to read.
        cache: see Engine.
        done: likewise.

    Returns:
        Places of those that it was not given, and of those that it has lost, with the reason.
    """
    rest = list(reversed(waiting))
    flying: dict[Future[bytes], int] = {}
    lost: dict[int, str] = {}
    while rest or flying:
        while rest and len(flying) < size and not lost:
            place = rest.pop()
            try:
                flying[pool.submit(read_packed, refs[place], cache)] = place
            except BrokenProcessPool:
                rest.append(place)
                break
        if not flying:
            break
        ready, _ = wait(flying, return_when=FIRST_COMPLETED)
        for future in ready:
            place = flying.pop(future)
            data, reason = _told(future)
            if data is None:
                lost[place] = reason
            else:
                done(place, unpacked(data))
    return list(reversed(rest)), lost


def _told(future: Future[bytes]) -> tuple[bytes | None, str]:
    try:
        return future.result(), ""
    except UsageError:
        raise
    except Exception as error:  # a pool has errors of its own for processes that end
        if os.environ.get("PARO_ADVISE_DEBUG"):
            raise
        return None, f"{type(error).__name__}: {error}"
