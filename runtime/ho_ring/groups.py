"""Process groups made from the default one, with its timeout."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _world

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

_DESCRIPTION = "paro_advise"


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

    # Groups that a rank knew when it made its last one, of the present default group.
    _known: ClassVar[tuple[weakref.ref[dist.ProcessGroup], int] | None] = None

    def __init__(self, partitions: Iterable[Sequence[Sequence[int]]] = ()) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        wanted = [groups for groups in partitions if len(groups[0]) > 1]
        if not wanted:
            return
        by_members, rank = self._names_differ(), dist.get_rank()
        for groups in wanted:
            mine = next(tuple(ranks) for ranks in groups if rank in ranks)
            if mine not in self._made:
                self._made[mine] = _own_of(groups, mine, by_members=by_members)
        self._remember()

    @classmethod
    def _remember(cls) -> None:
        cls._known = weakref.ref(_get_default_group()), len(_world.pg_names)

    @classmethod
    def _names_differ(cls) -> bool:
        """Tell whether groups that their members make get one name on all ranks, and no group before had it.

        Torch names them by their ranks and by how many groups a rank knows. Scripts may have made groups on some ranks
        only, or destroyed some, so that a number comes again.
        """
        now, before = len(_world.pg_names), 0
        if cls._known is not None and cls._known[0]() is _get_default_group():
            before = cls._known[1]
        most, least, comes_again = largest([now, -now, int(now < before)])
        return most == -least and not comes_again

    def of(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Return the group of these ranks, which this one is of; one that is new is made by its members.

        Those must have made equally many groups before, since torch numbers groups on each rank by itself.

        Returns:
            The group; None for fewer than two ranks.
        """
        if len(ranks) < 2:
            return None
        if tuple(ranks) not in self._made:
            self._made[tuple(ranks)] = _new_group(ranks, by_members=True)
        return self._made[tuple(ranks)]


def _own_of(groups: Sequence[Sequence[int]], mine: Sequence[int], *, by_members: bool) -> dist.ProcessGroup | None:
    """Make this rank's group of a partition, in one call where the backend can split a communicator."""
    if by_members and _splits():
        split: dist.ProcessGroup | None = dist.split_group(
            split_ranks=[list(ranks) for ranks in groups], timeout=group_timeout(), group_desc=_DESCRIPTION
        )
        return split
    if by_members:
        return _new_group(mine, by_members=True)
    made = {tuple(ranks): _new_group(ranks, by_members=False) for ranks in groups}
    return made[tuple(mine)]


def _splits() -> bool:
    """Tell whether the default group can be split: NCCL's, where it is bound to a device."""
    group = _get_default_group()
    if group.bound_device_id is None:
        return False
    return bool(group._get_backend(group.bound_device_id).supports_splitting)  # noqa: SLF001 - no public way


def _new_group(ranks: Sequence[int], *, by_members: bool) -> dist.ProcessGroup | None:
    """Make a group with the default one's timeout, not the 30 minutes of the backend."""
    made: dist.ProcessGroup | None = dist.new_group(
        list(ranks), timeout=group_timeout(), use_local_synchronization=by_members, group_desc=_DESCRIPTION
    )
    return made
