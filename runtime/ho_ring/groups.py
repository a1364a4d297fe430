"""Process groups made from the default one, with its timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta


def group_timeout() -> timedelta | None:
    """Return the timeout that the default group was made with; None where it does not tell."""
    group = _get_default_group()
    devices = group._device_types  # noqa: SLF001 - there is no public way to ask for the timeout
    backends = [group._get_backend(device) for device in devices]  # noqa: SLF001
    timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "options")]  # noqa: SLF001
    return min(timeouts, default=None)


class Subgroups:
    """Groups for collectives that run one after the other: equal ranks share a communicator.

    A communicator costs threads with gloo, device memory with NCCL, and a set-up over the network.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def of(self, ranks: Sequence[int], description: str) -> dist.ProcessGroup | None:
        """Return the group of these ranks, made at the first call; only its members take part.

        ``dist.new_group`` alone would wait the backend's 30 minutes for a rank that is gone.

        Args:
            ranks: global ranks.
            description: of a group that is made, for profiles.

        Returns:
            The group; None for fewer than two ranks.
        """
        if len(ranks) < 2:
            return None
        if (members := tuple(ranks)) not in self._made:
            self._made[members] = dist.new_group(
                list(ranks),
                timeout=group_timeout(),
                use_local_synchronization=True,
                group_desc=f"paro_advise_{description}",
            )
        return self._made[members]
