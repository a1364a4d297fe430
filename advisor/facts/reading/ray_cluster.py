"""Reads inputs on a Ray cluster: the user's running one, by RAY_ADDRESS, else one on this machine."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.facts.constants import CLUSTER_CONNECT_S, IN_FLIGHT
from paro_advise.advisor.facts.reading.packing import read_packed, unpacked
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paro_advise.advisor.facts.reading.engine import Result
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

_HOST_AND_PORT = re.compile(r"(?:ray://)?\[?([^\[\]/]{1,255})\]?:(\d{1,5})")


class RayEngine:
    """A Ray cluster.

    Args:
        jobs: cores of one on this machine.
    """

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs

    def read(
        self, refs: Sequence[SourceRef], cache: str | None, done: Callable[[int, Result], None], *, alone: bool
    ) -> dict[int, str]:
        """Read inputs, spread over its nodes."""
        # Ray says on standard output that a worker has ended, where a report may go.
        with redirect_stdout(sys.stderr), _cluster(self._jobs) as ray:
            # Retries are ours, so that they are counted and said.
            how = {"num_cpus": 1, "max_retries": 0, "max_calls": int(alone), "scheduling_strategy": "SPREAD"}
            task = ray.remote(**how)(read_packed)
            size = max(1, IN_FLIGHT * int(ray.cluster_resources().get("CPU", 1)))
            rest = list(reversed(range(len(refs))))
            flying: dict[Any, int] = {}
            lost: dict[int, str] = {}
            while rest or flying:
                while rest and len(flying) < size:
                    place = rest.pop()
                    flying[task.remote(refs[place], cache)] = place
                ready, _ = ray.wait(list(flying), num_returns=1)
                for item in ready:
                    place = flying.pop(item)
                    try:
                        data = ray.get(item)
                    except ray.exceptions.RayError as error:
                        lost[place] = _reason(error)
                        continue
                    done(place, unpacked(data))
        return lost


def _reason(error: Exception) -> str:
    """Return the last line of an error, which names its cause, without the colours that Ray gives it."""
    lines = [line for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else type(error).__name__


def _knock(address: str) -> None:
    """Raise at once where nothing listens, which Ray finds out after more than five minutes.

    Raises:
        OSError: nothing listens at the address.
        OverflowError: there is no such port.
    """
    found = _HOST_AND_PORT.fullmatch(address)
    if found is not None:
        socket.create_connection((found[1], int(found[2])), timeout=CLUSTER_CONNECT_S).close()


@contextmanager
def _cluster(jobs: int) -> Iterator[Any]:
    """Give Ray, joined to a cluster for as long as the block runs."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--engine ray needs Ray", hint="pip install 'paro-advise[ray]', here and on its nodes"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    address = os.environ.get("RAY_ADDRESS")
    own: dict[str, Any] = {"address": "local", "num_cpus": jobs, "include_dashboard": False}
    # One that is made here tells nobody that it is.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _knock(address or "")
        ray.init(**({"address": address} if address else own), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises Exception itself where its processes take too long to start
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise UsageError(
            f"--engine ray must reach a cluster: {reason}",
            hint="set RAY_ADDRESS to a running one, or unset it to start one on this machine",
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()
