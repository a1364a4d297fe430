"""The backend's own collectives behind the interface of HO-Ring."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from typing import Self

    import torch


class NativeGroup:
    """Collectives of one group; buffers of N blocks may be views in another order, as HO-Ring takes them.

    Args:
        group: its communicator, which nothing else uses.
    """

    # The backend does not count what it sends.
    sent_between = sent_inside = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Self | None:
        """Return the collectives of a group; None where there is none."""
        return cls(group) if group is not None else None

    def all_gather(self, output: torch.Tensor, block: torch.Tensor) -> None:
        """Gather every rank's block into the output, in order of the group."""
        flat = output.view(-1) if output.is_contiguous() else output.new_empty(output.numel())
        self._group._allgather_base(flat, block.reshape(-1).contiguous()).wait()  # noqa: SLF001 - in all versions
        if not output.is_contiguous():
            output.copy_(flat.view(output.shape))

    def reduce_scatter(self, output: torch.Tensor, blocks: torch.Tensor) -> None:
        """Sum the buffers of all ranks; each rank gets its block."""
        flat = blocks.reshape(-1).contiguous()
        self._group._reduce_scatter_base(output.view(-1), flat, dist.ReduceScatterOptions()).wait()  # noqa: SLF001

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._group.allreduce([tensor]).wait()
