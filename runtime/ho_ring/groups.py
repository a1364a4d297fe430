"""Process groups made from the default one, with its timeout."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_group

from paro_advise.runtime.base_methods import wrap_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import timedelta

_DESCRIPTION = "paro_advise"
_given_name: ContextVar[str] = ContextVar("name of the group that is made", default="")


def backends_of(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend of each device type that a group communicates from, None for the default group.

    The name of the group's own backend says less: ``init_process_group()`` gives "undefined", or all at once.
    """
    found = group or _get_default_group()
    return {device.type: found._get_backend(device).name() for device in found._device_types}  # noqa: SLF001 - no public way


def runs_in_order(group: dist.ProcessGroup | None = None) -> bool:
    """Tell whether a backend of a group runs a communicator's messages in the order of their calls, as NCCL does."""
    return any(name != "gloo" for name in backends_of(group).values())


def group_timeout() -> timedelta | None:
    """Return the timeout that the default group was made with; None where it does not tell."""
    group = _get_default_group()
    devices = group._device_types  # noqa: SLF001 - there is no public way to ask for the timeout
    backends = [group._get_backend(device) for device in devices]  # noqa: SLF001
    timeouts = [getattr(getattr(backend, "options", None), "_timeout", None) for backend in backends]
    return min((timeout for timeout in timeouts if timeout is not None), default=None)


def largest(values: Sequence[int]) -> list[int]:
    """Return the largest of each number over all ranks, which all call it at once.

    Its cost grows with the logarithm of the ranks, unlike a gather of everyone's.
    """
    devices = sorted(backends_of())
    # On the host where that can be: no device has to be waited for.
    own = _get_default_group().bound_device_id or torch.accelerator.current_accelerator()
    found = torch.tensor(values, dtype=torch.int64, device=own if devices and "cpu" not in devices and own else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [int(value) for value in found.tolist()]


def are_alike(values: Sequence[int]) -> bool:
    """Tell whether numbers are the same on all ranks, which all call it at once."""
    found = largest([*values, *(-value for value in values)])
    return found == [*values, *(-value for value in values)]


class Subgroups:
    """Communicators of collectives that run one after the other: equal ranks share one.

    A communicator costs threads with gloo, device memory with NCCL, and a set-up over the network. A rank makes
    those that it is of, not those of all others.

    Args:
        partitions: each the ranks of the world in groups; made now, by all ranks of the world.
    """

    # How often sets of ranks have made a group, of each default group.
    times_made: ClassVar[WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]] = WeakKeyDictionary()

    def __init__(self, partitions: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for groups in partitions:
            mine = next(tuple(ranks) for ranks in groups if dist.get_rank() in ranks)
            # All ranks decide alike: where a communicator is split all take part.
            if len(groups[0]) > 1 and mine not in self._made:
                self._made[mine] = _own_of(groups, mine)

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these ranks, which this one is of; one that is new is made by its members.

        Returns:
            The group; None for fewer than two ranks.
        """
        if len(ranks) < 2:
            return None
        if tuple(ranks) not in self._made:
            self._made[tuple(ranks)] = _new_group(ranks)
        return self._made[tuple(ranks)]


def _own_of(groups: Sequence[Sequence[int]], mine: Sequence[int]) -> dist.ProcessGroup | None:
    """Make this rank's group of a partition, in one call where the backend can split a communicator."""
    if not _splits():
        return _new_group(mine)
    with _named(mine):
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(ranks) for ranks in groups], timeout=group_timeout(), group_desc=_DESCRIPTION
        )
    return split


def _splits() -> bool:
    """Tell whether the default group can be split: NCCL's, where it is bound to a device."""
    group = _get_default_group()
    if group.bound_device_id is None:
        return False
    return bool(group._get_backend(group.bound_device_id).supports_splitting)  # noqa: SLF001 - no public way


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a group by its members, with the default one's timeout, not the 30 minutes of the backend."""
    with _named(ranks):
        made: dist.ProcessGroup | None = dist.new_group(
            list(ranks), timeout=group_timeout(), use_local_synchronization=True, group_desc=_DESCRIPTION
        )
    return made


@contextmanager
def _named(ranks: Sequence[int]) -> Iterator[None]:
    """Let torch name the next group by its ranks and by how often they have made one, which its members agree on.

    Torch itself counts all groups that a rank knows, which differs where scripts have made groups on some ranks only,
    and falls where groups are destroyed: under a name that comes again stand the addresses of the group that had it,
    where nobody listens any more.
    """
    counts = Subgroups.times_made.setdefault(_get_default_group(), Counter())
    name = hashlib.sha1(
        f"{_DESCRIPTION} {list(ranks)} {counts[tuple(ranks)]}".encode(), usedforsecurity=False
    ).hexdigest()
    counts[tuple(ranks)] += 1
    wrap_once(distributed_c10d, "_process_group_name", _asking_for_given_name)
    token = _given_name.set(name)
    try:
        yield
    finally:
        _given_name.reset(token)


def _asking_for_given_name(usual: Callable[[list[int], bool], str]) -> Callable[[list[int], bool], str]:
    """Return torch's way to name a group, which has no public one, with the name that this thread gives to it first."""

    @functools.wraps(usual)
    def given_name(ranks: list[int], use_hashed_name: bool) -> str:  # noqa: FBT001 - as torch calls it
        return _given_name.get() or usual(ranks, use_hashed_name)

    return given_name
