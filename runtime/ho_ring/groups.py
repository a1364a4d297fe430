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


def subgroup(ranks: Sequence[int], description: str) -> dist.ProcessGroup | None:
    """Make a group; only its members take part.

    ``dist.new_group`` alone would wait the backend's 30 minutes for a rank that is gone.

    Returns:
        The group; None for fewer than two ranks.
    """
    if len(ranks) < 2:
        return None
    return dist.new_group(
        list(ranks), timeout=group_timeout(), use_local_synchronization=True, group_desc=f"paro_advise_{description}"
    )
