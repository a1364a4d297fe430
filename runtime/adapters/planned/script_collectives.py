"""The script's own collectives over all ranks: where ranks meet without a plan, and may come to each other's help.

Before a model is sharded they tell its first training pass from one that rank 0 makes by itself, for a summary or to
count operations: then others enter a collective, or end, without a pass.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch.distributed as dist

from paro_advise.errors import CommunicationError
from paro_advise.runtime.adapters.constants import FIRST_PASS_POLL_S
from paro_advise.runtime.adapters.names import replace_name
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class ScriptCollectives:
    """Stands before torch's functions.

    Attributes:
        attended: called with a function and its arguments in the place of it, once a model is sharded whose ranks meet
            here; it calls the function.
    """

    def __init__(self) -> None:
        self.attended: Callable[..., object] | None = None
        self._entered = 0  # collectives over all ranks, by this one
        self._has_begun = False  # a training pass since the last of them
        self._is_over = False
        self._all_reduce = dist.all_reduce

    def install(self) -> None:
        """Take the names; scripts may import what stands there one by one."""
        for name in _NAMES:
            replace_name(name, self._standing_for(getattr(dist, name)), dist)
        atexit.register(self._leave)

    def _standing_for(self, original: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(original)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self.attended is not None:
                found: _R = self.attended(original, args, kwargs)  # type: ignore[assignment]  # it returns its result
                return found
            if not self._is_over and takes_all_ranks(args, kwargs):
                self._enter()
            return original(*args, **kwargs)

        return call

    def sum_unattended(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks in place."""
        self._all_reduce(tensor)

    def _enter(self) -> None:
        if not self._has_begun:
            job_store().add(self._key("without"), 1)
        self._entered += 1
        self._has_begun = False

    def _leave(self) -> None:
        if self.attended is None and not self._is_over and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever would wait
                self._enter()

    def _key(self, what: str) -> str:
        return f"first_pass_{what}_{self._entered}"

    def all_begin(self) -> bool:
        """Wait until all ranks begin a training pass, and tell whether they do, and not this one alone.

        Raises:
            CommunicationError: some rank does not come.
        """
        if self._is_over:
            return True
        store, until = job_store(), time.monotonic() + dist.default_pg_timeout.total_seconds()
        if not self._has_begun:
            store.add(self._key("begun"), 1)
            self._has_begun = True
        wait_s = FIRST_PASS_POLL_S[0]
        while store.add(self._key("begun"), 0) < dist.get_world_size():
            if store.add(self._key("without"), 0):
                return False
            if time.monotonic() > until:
                raise CommunicationError(
                    "all ranks must come to the first training pass or to a collective, some did not for as long as a "
                    "process group waits",
                    hint="look at what the other ranks printed last",
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, FIRST_PASS_POLL_S[1])
        self._is_over = True
        return True


def takes_all_ranks(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Tell whether a collective with these arguments is one that this thread enters with all ranks."""
    if not dist.is_initialized() or current_thread() is not main_thread():
        return False
    groups = [item for item in (*args, *kwargs.values()) if isinstance(item, dist.ProcessGroup)]
    return all(dist.get_world_size(group) == dist.get_world_size() for group in groups)
