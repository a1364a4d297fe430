"""All-gather, reduce-scatter and all-reduce over a grid of ranks, in chunks.

Notation: rank (j, k) is local rank k of node j; n nodes, m ranks a node, N = n * m; a block is the
part of the buffer that one rank contributes (all-gather) or ends with (reduce-scatter). A block
is cut into c chunks, so that a chunk is spread inside the node while the next one crosses.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring.constants import MAX_CHUNKS, MIN_CHUNK_BYTES
from paro_advise.runtime.ho_ring.grid import Grid
from paro_advise.runtime.ho_ring.groups import Subgroups, runs_in_order
from paro_advise.runtime.ho_ring.rails import Rails, make_rails
from paro_advise.runtime.ho_ring.schedules.grouped import GroupedSchedule
from paro_advise.runtime.ho_ring.schedules.reductions import combiner
from paro_advise.runtime.ho_ring.schedules.tagged import TaggedSchedule
from paro_advise.runtime.ho_ring.schedules.transfers import Transfers
from paro_advise.runtime.ho_ring.spans import span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.ho_ring.schedules.reductions import Combine, Reduction


class HoRing:
    """Collectives of one group of ranks.

    Every rank of the group must make it, at the same point and with the same arguments, and call
    the same collectives in the same order. The buffers of N blocks may be given flat, or shaped
    (nodes, ranks per node, S) with contiguous blocks at any stride: a caller that keeps its blocks
    in another order passes a permuted view.

    Attributes:
        sent_between, sent_inside: inter-node and intra-node messages of this rank.

    Args:
        group: the group; None for all ranks.
        ranks_per_node: ranks that share a node, in order of the group; 1 makes plain rings.
        num_chunks: chunks per block; None to choose by size.
        grouped: send and receive in batches; None for what the backend wants, see grouped.py.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int,
        num_chunks: int | None = None,
        grouped: bool | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        grid = Grid.of(len(ranks), ranks.index(dist.get_rank()), ranks_per_node)
        in_batches = runs_in_order(group) if grouped is None else grouped
        is_world = len(ranks) == dist.get_world_size()
        rails = make_rails(grid, ranks, Subgroups((grid.rings, grid.nodes) if is_world else ()))
        self._set_up(grid, rails, ranks, num_chunks=num_chunks, grouped=in_batches)

    @classmethod
    def over(cls, grid: Grid, rails: Rails, ranks: Sequence[int], *, grouped: bool = False) -> HoRing:
        """Return the collectives over communicators that exist already.

        Args:
            grid: of the group.
            rails: this rank's.
            ranks: global ranks of the group, for profiles.
            grouped: see HoRing.
        """
        made = cls.__new__(cls)
        cls._set_up(made, grid, rails, ranks, num_chunks=None, grouped=grouped)
        return made

    def _set_up(self, grid: Grid, rails: Rails, ranks: Sequence[int], *, num_chunks: int | None, grouped: bool) -> None:
        self.grid = grid
        self.rails = rails
        self._num_chunks = num_chunks
        self._ranks = ranks
        transfers = Transfers(grid, rails)
        self.sent_between, self.sent_inside = transfers.sent_between, transfers.sent_inside
        self._schedule = (
            GroupedSchedule(grid, rails, self.sent_between, self.sent_inside) if grouped else TaggedSchedule(transfers)
        )

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.grid.size

    def all_gather(self, output: torch.Tensor, block: torch.Tensor) -> None:
        """Gather every rank's block into the output, in order of the group.

        Args:
            output: N * S elements, flat or (nodes, ranks per node, S).
            block: S elements, contiguous; may be this rank's place in the output.

        Raises:
            UsageError: the sizes do not fit.
        """
        blocks = self._blocks(output, block, "an all-gather's output")
        with span("all_gather", block, block.numel(), output.numel(), self._ranks):
            self._all_gather(blocks, block)

    def _all_gather(self, blocks: torch.Tensor, block: torch.Tensor) -> None:
        mine = blocks[self.grid.node, self.grid.local]
        if mine.data_ptr() != block.data_ptr():
            mine.copy_(block.view(-1))
        self._schedule.all_gather(blocks, self._chunks(block))

    def reduce_scatter(self, output: torch.Tensor, blocks: torch.Tensor, op: Reduction = dist.ReduceOp.SUM) -> None:
        """Reduce the buffers of all ranks; each rank gets its block.

        The partial sum of a block starts on the node after its owner's, goes round the ring and
        grows by each node's part, which the node reduces while the sum is on its way.

        Args:
            output: S elements, contiguous; must not lie in ``blocks``.
            blocks: N * S elements, flat or (nodes, ranks per node, S); not changed.
            op: SUM, AVG (floating point only) or MAX.

        Raises:
            UsageError: the sizes do not fit, or the reduction is not supported.
        """
        parts = self._blocks(blocks, output, "a reduce-scatter's input")
        combine = combiner(op, output.dtype)
        with span("reduce_scatter", output, blocks.numel(), output.numel(), self._ranks):
            self._reduce_scatter(output, parts, combine)
            if op == dist.ReduceOp.AVG:
                output.div_(self.grid.size)

    def _reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, combine: Combine) -> None:
        self._schedule.reduce_scatter(output, parts, self._chunks(output), combine)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor of any size over all ranks, in place: a reduce-scatter and an all-gather.

        Args:
            tensor: contiguous.
            op: SUM, AVG or MAX.
        """
        flat = tensor.view(-1)
        size = -(-flat.numel() // self.grid.size)
        padded = flat
        if size * self.grid.size != flat.numel():
            padded = flat.new_zeros(size * self.grid.size)
            padded[: flat.numel()].copy_(flat)
        combine = combiner(op, flat.dtype)
        blocks = padded.view(self.grid.num_nodes, self.grid.ranks_per_node, size)
        block = torch.empty(size, dtype=flat.dtype, device=flat.device)
        with span("all_reduce", flat, flat.numel(), flat.numel(), self._ranks):
            self._reduce_scatter(block, blocks, combine)
            if op == dist.ReduceOp.AVG:
                block.div_(self.grid.size)
            self._all_gather(blocks, block)
            if padded is not flat:
                flat.copy_(padded[: flat.numel()])

    def _chunks(self, block: torch.Tensor) -> list[tuple[int, int]]:
        """Cut a block into nearly equal chunks (element ranges)."""
        size = block.numel()
        wanted = self._num_chunks or min(MAX_CHUNKS, size * block.element_size() // MIN_CHUNK_BYTES)
        count = max(1, min(wanted, size))
        edges = [size * number // count for number in range(count + 1)]
        return list(itertools.pairwise(edges))

    def _blocks(self, large: torch.Tensor, small: torch.Tensor, what: str) -> torch.Tensor:
        """Return a buffer as (nodes, ranks per node, S) after checking it."""
        grid = self.grid
        shape = (grid.num_nodes, grid.ranks_per_node, small.numel())
        if large.numel() != small.numel() * grid.size or large.dtype != small.dtype:
            expected = f"{small.numel() * grid.size} elements of {small.dtype}"
            raise UsageError(f"{what} must hold {expected}, got {large.numel()} of {large.dtype}")
        if not small.is_contiguous():
            raise UsageError("buffers of a collective must be contiguous")
        if large.shape == shape and large.numel() and large.stride(2) == 1:
            return large
        if not large.is_contiguous():
            raise UsageError("buffers of a collective must be contiguous")
        return large.view(shape)
