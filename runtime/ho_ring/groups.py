"""Process groups made from the default one, with its timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta


def group_timeout() -> timedelta | None:
    """Return the timeout that the default group was made with; None where it does not tell."""
    group = _get_default_group()
    devices = group._device_types  # noqa: SLF001 - there is no public way to ask for the timeout
    backends = [group._get_backend(device) for device in devices]  # noqa: SLF001
    timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]  # noqa: SLF001
    return min(timeouts, default=None)


class Subgroups:
    """Communicators of collectives that run one after the other: equal ranks share one.

    A communicator costs threads with gloo, device memory with NCCL, and a set-up over the network.

    Args:
        known: ranks of each group that is made now, by all ranks of the world in this order, members or not.
    """

    def __init__(self, known: Iterable[Sequence[int]] = ()) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for ranks in known:
            if len(ranks) > 1 and tuple(ranks) not in self._made:
                self._made[tuple(ranks)] = _new_group(ranks, by_members=False)

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


def _new_group(ranks: Sequence[int], *, by_members: bool) -> dist.ProcessGroup | None:
    """Make a group with the default one's timeout, not the 30 minutes of the backend."""
    made: dist.ProcessGroup | None = dist.new_group(
        list(ranks), timeout=group_timeout(), use_local_synchronization=by_members, group_desc="paro_advise"
    )
    return made
