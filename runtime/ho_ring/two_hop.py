"""Collectives as two native ones, one between nodes and one inside: fewer bytes between nodes.

Sequential and without chunks, so that it costs few messages: better than HO-Ring where latency counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from paro_advise.runtime.ho_ring.grid import Grid
    from paro_advise.runtime.ho_ring.rails import Rails


class TwoHop:
    """Collectives of one group of ranks, over the rails of its grid.

    Args:
        grid: more than one node of more than one rank.
        rails: this rank's communicators.
    """

    def __init__(self, grid: Grid, rails: Rails) -> None:
        self._grid = grid
        self._rails = rails

    def all_gather(self, output: torch.Tensor, block: torch.Tensor) -> None:
        """Gather every rank's block, in order of the group: (N * S) from (S)."""
        nodes, local = self._grid.num_nodes, self._grid.ranks_per_node
        column = block.new_empty(nodes * block.numel())
        self._rails.ring._allgather_base(column, block.view(-1)).wait()  # noqa: SLF001 - its name in all versions
        columns = block.new_empty(local * column.numel())
        self._rails.inside._allgather_base(columns, column).wait()  # noqa: SLF001
        output.view(nodes, local, -1).copy_(columns.view(local, nodes, -1).transpose(0, 1))

    def reduce_scatter(self, output: torch.Tensor, blocks: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce the buffers of all ranks; each rank gets its block: (S) from (N * S)."""
        nodes, local = self._grid.num_nodes, self._grid.ranks_per_node
        columns = blocks.view(nodes, local, -1).transpose(0, 1).reshape(-1)
        column = blocks.new_empty(columns.numel() // local)
        options = dist.ReduceScatterOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._rails.inside._reduce_scatter_base(column, columns, options).wait()  # noqa: SLF001
        self._rails.ring._reduce_scatter_base(output.view(-1), column, options).wait()  # noqa: SLF001
        if op == dist.ReduceOp.AVG:
            output.div_(self._grid.size)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over all ranks, in place: inside, between, and inside again."""
        local = self._grid.ranks_per_node
        flat = tensor.view(-1)
        padded = flat
        size = -(-flat.numel() // local)
        if size * local != flat.numel():
            padded = flat.new_zeros(size * local)
            padded[: flat.numel()].copy_(flat)
        scatter, whole = dist.ReduceScatterOptions(), dist.AllreduceOptions()
        scatter.reduceOp = whole.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        slab = flat.new_empty(size)
        self._rails.inside._reduce_scatter_base(slab, padded, scatter).wait()  # noqa: SLF001
        self._rails.ring.allreduce([slab], whole).wait()
        if op == dist.ReduceOp.AVG:
            slab.div_(self._grid.size)
        self._rails.inside._allgather_base(padded, slab).wait()  # noqa: SLF001
        if padded is not flat:
            flat.copy_(padded[: flat.numel()])
