"""The script's own collectives over all ranks: where ranks meet without a plan, and may come to each other's help.

Before a model is sharded they tell its first training pass from one that rank 0 makes by itself, for a summary or to
count operations: then others enter a collective, or end, without a pass.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch.distributed as dist

from paro_advise.errors import CommunicationError, TrainingError
from paro_advise.runtime.adapters.constants import FIRST_PASS_POLL_S, LONG_WAIT_S, NO_PLAN
from paro_advise.runtime.adapters.names import replace_name
from paro_advise.runtime.messages import tell
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

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


# Ranks make a group together as well; the plan's own are made so.
_NEW_GROUP = "new_group"
_WAITS = (
    f"a rank has waited {LONG_WAIT_S:.0f} s for the others to begin to train, or to enter a collective over all ranks "
    "without. If they wait for it in another way (recv, a file), let them wait in torch.distributed.barrier() over all "
    "ranks"
)


class ScriptCollectives:
    """Stands before torch's functions.

    A first pass is told from others by how many collectives a rank has entered before: plain scripts enter the same on
    all ranks, in one order.

    Attributes:
        attended: called with a function and its arguments in the place of it, once a model is sharded whose ranks meet
            here; it calls the function.
    """

    def __init__(self) -> None:
        self.attended: Callable[..., object] | None = None
        self._entered = 0  # collectives over all ranks, by this one
        self._has_begun = False  # a training pass since the last of them
        self._counts = self._is_over = False
        self._run_alone: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # by this rank, before all train
        self._all_reduce = dist.all_reduce

    def install(self) -> None:
        """Take the names; scripts may import what stands there one by one."""
        for name in (*_NAMES, _NEW_GROUP):
            replace_name(name, self._standing_for(getattr(dist, name)), dist)
        atexit.register(self._leave)

    def _standing_for(self, original: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(original)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if self.attended is not None and original.__name__ != _NEW_GROUP:
                found: _R = self.attended(original, args, kwargs)  # type: ignore[assignment]  # it returns its result
                return found
            if self._counts and takes_all_ranks(args, kwargs):
                with contextlib.suppress(dist.DistError):  # the store is gone, and with it whoever would wait
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

    def begin(self) -> None:
        """Count from here on, where all ranks wrap a model of which rank 0 may run passes by itself."""
        self._counts = not self._is_over

    def end(self) -> None:
        """Count no more: a model is sharded, and who runs it is told otherwise."""
        self._counts, self._is_over = False, True

    def _leave(self) -> None:
        if self._counts and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it whoever would wait
                self._enter()

    def _key(self, what: str) -> str:
        return f"first_pass_{what}_{self._entered}"

    def all_begin(self, model: nn.Module) -> bool:
        """Wait until all ranks begin a training pass, and tell whether they do, and not this one alone.

        Args:
            model: of the pass.

        Raises:
            CommunicationError: some rank does not come.
        """
        if not self._counts:
            return True
        try:
            return self._all_begin(model)
        except dist.DistError as error:
            raise CommunicationError(
                "all ranks must come to the first training pass, the one that keeps the job's store has ended",
                hint="look at what rank 0 printed last",
            ) from error

    def _all_begin(self, model: nn.Module) -> bool:
        store, began = job_store(), time.monotonic()
        is_told = False
        if not self._has_begun:
            store.add(self._key("begun"), 1)
            self._has_begun = True
        wait_s = FIRST_PASS_POLL_S[0]
        while store.add(self._key("begun"), 0) < dist.get_world_size():
            if store.add(self._key("without"), 0):
                self._run_alone.add(model)
                return False
            waited_s = time.monotonic() - began
            if waited_s > LONG_WAIT_S and not is_told:
                is_told = True
                tell(_WAITS)
            if waited_s > dist.default_pg_timeout.total_seconds():
                raise CommunicationError(
                    "all ranks must come to the first training pass or to a collective, some did not for "
                    f"{waited_s:.0f} s",
                    hint="look at what the other ranks printed last",
                )
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, FIRST_PASS_POLL_S[1])
        return True

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of a model that this rank alone has run: the others would never hear of it.

        Raises:
            TrainingError: the optimizer has gradients of such a model.
        """
        held = {item for group in optimizer.param_groups for item in group["params"]} if self._counts else set()
        for model in self._run_alone if held else ():
            if any(item.grad is not None and item in held for item in model.parameters()):
                raise TrainingError(
                    "all ranks must train a model under a plan, this one steps it after a pass that the others did not "
                    "make",
                    hint=f"train on all ranks, or {NO_PLAN}",
                )


def takes_all_ranks(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Tell whether a collective with these arguments is one that this thread enters with all ranks."""
    if not dist.is_initialized() or current_thread() is not main_thread():
        return False
    given = (*args, *kwargs.values())
    is_member = not any(item is dist.GroupMember.NON_GROUP_MEMBER for item in given)  # of others the call does nothing
    if not is_member or kwargs.get("use_local_synchronization"):
        return False
    groups = [item for item in given if isinstance(item, dist.ProcessGroup)]
    return all(dist.get_world_size(group) == dist.get_world_size() for group in groups)
