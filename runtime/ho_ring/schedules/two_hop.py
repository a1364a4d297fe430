"""Collectives as two native ones, one inter-node and one intra-node: fewer inter-node bytes.

Sequential and without chunks, so that it costs few messages: better than HO-Ring where latency counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from paro_advise.runtime.ho_ring.schedules.reductions import reduce_options, replace_average, scatter_options

if TYPE_CHECKING:
    import torch

    from paro_advise.runtime.ho_ring.grid import Grid
    from paro_advise.runtime.ho_ring.rails import Rails
    from paro_advise.runtime.ho_ring.schedules.reductions import Reduction


class TwoHop:
    """Collectives of one group of ranks, over the rails of its grid.

    Args:
        grid: more than one node of more than one rank.
        rails: this rank's communicators.
    """

    def __init__(self, grid: Grid, rails: Rails) -> None:
        assert rails.ring is not None
        assert rails.inside is not None
        self._grid = grid
        self._ring = rails.ring
        self._inside = rails.inside

    def all_gather(self, output: torch.Tensor, block: torch.Tensor) -> None:
        """Gather every rank's block, in order of the group: (N * S) from (S)."""
        nodes, local = self._grid.num_nodes, self._grid.ranks_per_node
        column = block.new_empty(nodes * block.numel())
        self._ring._allgather_base(column, block.view(-1)).wait()  # noqa: SLF001 - its name in all versions
        columns = block.new_empty(local * column.numel())
        self._inside._allgather_base(columns, column).wait()  # noqa: SLF001
        output.view(nodes, local, -1).copy_(columns.view(local, nodes, -1).transpose(0, 1))

    def reduce_scatter(self, output: torch.Tensor, blocks: torch.Tensor, op: Reduction = dist.ReduceOp.SUM) -> None:
        """Reduce the buffers of all ranks; each rank gets its block: (S) from (N * S)."""
        nodes, local = self._grid.num_nodes, self._grid.ranks_per_node
        columns = blocks.view(nodes, local, -1).transpose(0, 1).reshape(-1)
        column = blocks.new_empty(columns.numel() // local)
        options = scatter_options(replace_average(op))
        self._inside._reduce_scatter_base(column, columns, options).wait()  # noqa: SLF001
        self._ring._reduce_scatter_base(output.view(-1), column, options).wait()  # noqa: SLF001
        if op == dist.ReduceOp.AVG:
            output.div_(self._grid.size)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over all ranks, in place: intra-node, inter-node, and intra-node again."""
        local = self._grid.ranks_per_node
        flat = tensor.view(-1)
        padded = flat
        size = -(-flat.numel() // local)
        if size * local != flat.numel():
            padded = flat.new_zeros(size * local)
            padded[: flat.numel()].copy_(flat)
        slab = flat.new_empty(size)
        summed = replace_average(op)
        self._inside._reduce_scatter_base(slab, padded, scatter_options(summed)).wait()  # noqa: SLF001
        self._ring.allreduce([slab], reduce_options(summed)).wait()
        if op == dist.ReduceOp.AVG:
            slab.div_(self._grid.size)
        self._inside._allgather_base(padded, slab).wait()  # noqa: SLF001
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])
