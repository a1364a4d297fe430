"""All-gather, reduce-scatter and all-reduce over a grid of ranks, in chunks.

Notation: rank (j, k) is local rank k of node j; n nodes, m ranks a node, N = n * m; a block is the
part of the buffer that one rank contributes (all-gather) or ends with (reduce-scatter). A block
is cut into c chunks, so that a chunk is spread inside the node while the next one crosses.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring.grid import Grid
from paro_advise.runtime.ho_ring.grouped import GroupedSchedule
from paro_advise.runtime.ho_ring.groups import Subgroups
from paro_advise.runtime.ho_ring.rails import Rails, Sent, make_rails
from paro_advise.runtime.ho_ring.spans import span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Below this a chunk costs more in messages than it wins in overlap (measured on the lab).
_MIN_CHUNK_BYTES = 512 << 10
_MAX_CHUNKS = 16
# Local partial sums are received this many blocks ahead; bounds the scratch memory.
_BLOCKS_AHEAD = 2
# The node exchanges this many chunks more than the one that goes on the ring.
_CHUNKS_AHEAD = 1

_COMBINE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.Tensor.add_,
    dist.ReduceOp.AVG: torch.Tensor.add_,
    dist.ReduceOp.MAX: lambda total, part: torch.maximum(total, part, out=total),
}


class Pending(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block until it is done."""


class HoRing:
    """Collectives of one group of ranks.

    Every rank of the group must make it, at the same point and with the same arguments, and call
    the same collectives in the same order. The buffers of N blocks may be given flat, or shaped
    (nodes, ranks per node, S) with contiguous blocks at any stride: a caller that keeps its blocks
    in another order passes a permuted view.

    Attributes:
        sent_between, sent_inside: what this rank has sent between and inside nodes.

    Args:
        group: the group; None for all ranks.
        ranks_per_node: ranks that share a node, in order of the group; 1 makes plain rings.
        num_chunks: chunks per block; None to choose by size.
        grouped: send and receive in batches; None for what the backend wants, see grouped.py.
        subgroups: where to find or make communicators, shared with collectives that never run at
            the same time; None to make own ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int,
        num_chunks: int | None = None,
        grouped: bool | None = None,
        subgroups: Subgroups | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        grid = Grid.of(len(ranks), ranks.index(dist.get_rank()), ranks_per_node)
        in_batches = grouped if grouped is not None else dist.get_backend(group) == "nccl"
        if subgroups is None:
            is_world = len(ranks) == dist.get_world_size()
            subgroups = Subgroups([[ranks[place] for place in rail] for rail in grid.rails] if is_world else ())
        rails = make_rails(grid, ranks, subgroups)
        self._set_up(grid, rails, ranks, num_chunks=num_chunks, grouped=in_batches)

    @classmethod
    def over(cls, grid: Grid, rails: Rails, ranks: Sequence[int]) -> HoRing:
        """Return the collectives over communicators that exist already.

        Args:
            grid: of the group.
            rails: this rank's.
            ranks: global ranks of the group, for profiles.
        """
        made = cls.__new__(cls)
        cls._set_up(made, grid, rails, ranks, num_chunks=None, grouped=False)
        return made

    def _set_up(self, grid: Grid, rails: Rails, ranks: Sequence[int], *, num_chunks: int | None, grouped: bool) -> None:
        self.grid = grid
        self.rails = rails
        self._num_chunks = num_chunks
        self._tag = 0
        self._ranks = ranks
        self.sent_between, self.sent_inside = Sent(), Sent()
        self._grouped = GroupedSchedule(grid, rails, self.sent_between, self.sent_inside) if grouped else None

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
        grid = self.grid
        size = block.numel()
        mine = blocks[grid.node, grid.local]
        if mine.data_ptr() != block.data_ptr():
            mine.copy_(block.view(-1))
        chunks = self._chunks(size, block.element_size())
        if self._grouped:
            self._grouped.all_gather(blocks, chunks)
            return
        base = self._tags(grid.num_nodes * len(chunks))
        pending: list[Pending] = []
        coming: dict[tuple[int, int], Pending] = {}
        for step in range(1, grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                target = blocks[(grid.node - step) % grid.num_nodes, grid.local, low:high]
                coming[step, number] = self._from_ring(target, base + step * len(chunks) + number)
        for node in range(grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                for peer in grid.peers:
                    target = blocks[(grid.node - node) % grid.num_nodes, peer, low:high]
                    pending.append(self._from_peer(target, peer, base + node * len(chunks) + number))
        for step in range(grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                if step:
                    coming[step, number].wait()
                piece = blocks[(grid.node - step) % grid.num_nodes, grid.local, low:high]
                if step < grid.num_nodes - 1:
                    pending.append(self._to_ring(piece, base + (step + 1) * len(chunks) + number))
                pending += [self._to_peer(piece, peer, base + step * len(chunks) + number) for peer in grid.peers]
        for work in pending:
            work.wait()

    def reduce_scatter(self, output: torch.Tensor, blocks: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
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
        combine = _combiner(op, output.dtype)
        with span("reduce_scatter", output, blocks.numel(), output.numel(), self._ranks):
            self._reduce_scatter(output, parts, combine)
            if op == dist.ReduceOp.AVG:
                output.div_(self.grid.size)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        parts: torch.Tensor,
        combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        grid = self.grid
        size = output.numel()
        chunks = self._chunks(size, output.element_size())
        if self._grouped:
            self._grouped.reduce_scatter(output, parts, chunks, combine)
            return
        base = self._tags(grid.num_nodes * len(chunks))
        scratch = _Scratch(self, parts, chunks, base)
        sums = torch.empty(2, size, dtype=output.dtype, device=output.device)
        coming: dict[int, Pending] = {}
        pending: list[Pending] = []
        for step in range(grid.num_nodes):
            scratch.receive_ahead(step)
            owner = (grid.node - 1 - step) % grid.num_nodes
            is_last = step == grid.num_nodes - 1
            total = output.view(-1) if is_last else torch.empty_like(sums[0])
            arrived = dict(coming)
            if not is_last:
                for number, (low, high) in enumerate(chunks):
                    coming[number] = self._from_ring(sums[step % 2, low:high], base + step * len(chunks) + number)
            for number, (low, high) in enumerate(chunks):
                scratch.send_ahead(step, number)
                piece = total[low:high]
                piece.copy_(parts[owner, grid.local, low:high])
                for local_part in scratch.parts_of(step, number):
                    combine(piece, local_part)
                if step:
                    arrived[number].wait()
                    combine(piece, sums[(step - 1) % 2, low:high])
                if not is_last:
                    pending.append(self._to_ring(piece, base + step * len(chunks) + number))
        for work in pending + scratch.sends:
            work.wait()

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
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
        combine = _combiner(op, flat.dtype)
        blocks = padded.view(self.grid.num_nodes, self.grid.ranks_per_node, size)
        block = torch.empty(size, dtype=flat.dtype, device=flat.device)
        with span("all_reduce", flat, flat.numel(), flat.numel(), self._ranks):
            self._reduce_scatter(block, blocks, combine)
            if op == dist.ReduceOp.AVG:
                block.div_(self.grid.size)
            self._all_gather(blocks, block)
            if padded is not flat:
                flat.copy_(padded[: flat.numel()])

    def _chunks(self, size: int, element_bytes: int) -> list[tuple[int, int]]:
        """Cut a block of ``size`` elements into nearly equal chunks (element ranges)."""
        wanted = self._num_chunks or min(_MAX_CHUNKS, size * element_bytes // _MIN_CHUNK_BYTES)
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

    def _tags(self, count: int) -> int:
        """Reserve message tags; equal on all ranks because all call the same collectives."""
        first = self._tag
        self._tag = (self._tag + count) % (1 << 24)
        return first

    def _from_ring(self, target: torch.Tensor, tag: int) -> Pending:
        pending: Pending = self.rails.ring.recv([target], (self.grid.node - 1) % self.grid.num_nodes, tag)
        return pending

    def _to_ring(self, piece: torch.Tensor, tag: int) -> Pending:
        self.sent_between.add(piece)
        pending: Pending = self.rails.ring.send([piece], (self.grid.node + 1) % self.grid.num_nodes, tag)
        return pending

    def _from_peer(self, target: torch.Tensor, peer: int, tag: int) -> Pending:
        pending: Pending = self.rails.inside.recv([target], peer, tag)
        return pending

    def _to_peer(self, piece: torch.Tensor, peer: int, tag: int) -> Pending:
        self.sent_inside.add(piece)
        pending: Pending = self.rails.inside.send([piece], peer, tag)
        return pending


class _Scratch:
    """The parts of a node's blocks that its local ranks send each other during a reduce-scatter."""

    def __init__(self, ring: HoRing, parts: torch.Tensor, chunks: list[tuple[int, int]], base: int) -> None:
        self._ring = ring
        self._grid = ring.grid
        self._chunks = chunks
        self._base = base
        self._ahead = min(_BLOCKS_AHEAD, self._grid.num_nodes)
        shape = (self._ahead, max(0, self._grid.ranks_per_node - 1), parts.shape[-1])
        self._buffer = torch.empty(shape, dtype=parts.dtype, device=parts.device)
        self._coming: dict[tuple[int, int], list[Pending]] = {}
        self._posted = 0
        self.sends: list[Pending] = []
        self._parts = parts
        self._sent = 0

    def send_ahead(self, step: int, number: int) -> None:
        """Send the peers their parts of this chunk and the next few.

        All at once they would take the processor from the traffic between nodes, which is the slower.
        """
        count = len(self._chunks)
        while self._sent < min(step * count + number + 1 + _CHUNKS_AHEAD, self._grid.num_nodes * count):
            step_, number_ = divmod(self._sent, count)
            low, high = self._chunks[number_]
            owner = (self._grid.node - 1 - step_) % self._grid.num_nodes
            self.sends += [
                self._ring._to_peer(self._parts[owner, peer, low:high], peer, self._base + self._sent)  # noqa: SLF001 - one algorithm, two classes
                for peer in self._grid.peers
            ]
            self._sent += 1

    def receive_ahead(self, step: int) -> None:
        """Post the receives of this block and the next ones; earlier blocks have been used up."""
        while self._posted < min(step + self._ahead, self._grid.num_nodes):
            place = self._buffer[self._posted % self._ahead]
            for number, (low, high) in enumerate(self._chunks):
                tag = self._base + self._posted * len(self._chunks) + number
                self._coming[self._posted, number] = [
                    self._ring._from_peer(place[row, low:high], peer, tag)  # noqa: SLF001
                    for row, peer in enumerate(self._grid.peers)
                ]
            self._posted += 1

    def parts_of(self, step: int, number: int) -> list[torch.Tensor]:
        """Return the peers' parts of a chunk, waiting for them."""
        low, high = self._chunks[number]
        place = self._buffer[step % self._ahead]
        found = []
        for row, work in enumerate(self._coming.pop((step, number))):
            work.wait()
            found.append(place[row, low:high])
        return found


def _combiner(op: Any, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    if op not in _COMBINE:
        raise UsageError(f"a reduction must be SUM, AVG or MAX, got {op}")
    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        raise UsageError(f"an average needs a floating-point type, got {dtype}", hint="use SUM and divide")
    return _COMBINE[op]
