"""HO-Ring's schedule for backends that match messages by tag, such as gloo.

Receives are posted ahead, and what has arrived is passed on chunk by chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from paro_advise.runtime.ho_ring.constants import BLOCKS_AHEAD, CHUNKS_AHEAD, NUM_TAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from paro_advise.runtime.ho_ring.schedules.reductions import Combine
    from paro_advise.runtime.ho_ring.schedules.transfers import Transfers

    Chunks: TypeAlias = Sequence[tuple[int, int]]


class TaggedSchedule:
    """All-gather and reduce-scatter by single messages.

    Args:
        transfers: of this rank.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._grid = transfers.grid
        self._tag = 0

    def _reserve_tags(self, count: int) -> int:
        """Return the first of some message tags; equal on all ranks because all call the same collectives."""
        first = self._tag
        self._tag = (self._tag + count) % NUM_TAGS
        return first

    def all_gather(self, blocks: torch.Tensor, chunks: Chunks) -> None:
        """Spread every rank's block over (nodes, ranks per node, S); the own one is in place."""
        grid, transfers = self._grid, self._transfers
        base = self._reserve_tags(grid.num_nodes * len(chunks))
        coming = self._receive_from_ring(blocks, chunks, base)
        pending = self._receive_from_peers(blocks, chunks, base)
        for step in range(grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                if step:
                    coming[step, number].wait()
                piece = blocks[(grid.node - step) % grid.num_nodes, grid.local, low:high]
                if step < grid.num_nodes - 1:
                    pending.append(transfers.send_to_next_node(piece, base + (step + 1) * len(chunks) + number))
                tag = base + step * len(chunks) + number
                pending += [transfers.send_to_peer(piece, peer, tag) for peer in grid.peers]
        for work in pending:
            work.wait()

    def _receive_from_ring(self, blocks: torch.Tensor, chunks: Chunks, base: int) -> dict[tuple[int, int], dist.Work]:
        """Post the receives of a gather between nodes, by (step, chunk)."""
        grid = self._grid
        coming = {}
        for step in range(1, grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                target = blocks[(grid.node - step) % grid.num_nodes, grid.local, low:high]
                tag = base + step * len(chunks) + number
                coming[step, number] = self._transfers.receive_from_node_before(target, tag)
        return coming

    def _receive_from_peers(self, blocks: torch.Tensor, chunks: Chunks, base: int) -> list[dist.Work]:
        """Post the receives of a gather inside the node."""
        grid = self._grid
        pending = []
        for node in range(grid.num_nodes):
            for number, (low, high) in enumerate(chunks):
                for peer in grid.peers:
                    target = blocks[(grid.node - node) % grid.num_nodes, peer, low:high]
                    pending.append(self._transfers.receive_from_peer(target, peer, base + node * len(chunks) + number))
        return pending

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, chunks: Chunks, combine: Combine) -> None:
        """Reduce (nodes, ranks per node, S) of all ranks to this rank's block."""
        grid, transfers = self._grid, self._transfers
        base = self._reserve_tags(grid.num_nodes * len(chunks))
        scratch = _NodeParts(transfers, parts, chunks, base)
        sums = torch.empty(2, output.numel(), dtype=output.dtype, device=output.device)
        coming: dict[int, dist.Work] = {}
        pending: list[dist.Work] = []
        for step in range(grid.num_nodes):
            scratch.receive_ahead(step)
            owner = (grid.node - 1 - step) % grid.num_nodes
            is_last = step == grid.num_nodes - 1
            total = output.view(-1) if is_last else torch.empty_like(sums[0])
            arrived = dict(coming)
            if not is_last:
                for number, (low, high) in enumerate(chunks):
                    tag = base + step * len(chunks) + number
                    coming[number] = transfers.receive_from_node_before(sums[step % 2, low:high], tag)
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
                    pending.append(transfers.send_to_next_node(piece, base + step * len(chunks) + number))
        for work in pending + scratch.sends:
            work.wait()


class _NodeParts:
    """The parts of a node's blocks that its local ranks send each other during a reduce-scatter."""

    def __init__(self, transfers: Transfers, parts: torch.Tensor, chunks: Chunks, base: int) -> None:
        self._transfers = transfers
        self._grid = transfers.grid
        self._chunks = chunks
        self._base = base
        self._ahead = min(BLOCKS_AHEAD, self._grid.num_nodes)
        shape = (self._ahead, max(0, self._grid.ranks_per_node - 1), parts.shape[-1])
        self._buffer = torch.empty(shape, dtype=parts.dtype, device=parts.device)
        self._coming: dict[tuple[int, int], list[dist.Work]] = {}
        self._posted = 0
        self.sends: list[dist.Work] = []
        self._parts = parts
        self._num_sent = 0

    def send_ahead(self, step: int, number: int) -> None:
        """Send the peers their parts of this chunk and the next few.

        All at once they would take the processor from the inter-node traffic, which is the slower.
        """
        count = len(self._chunks)
        while self._num_sent < min(step * count + number + 1 + CHUNKS_AHEAD, self._grid.num_nodes * count):
            step_, number_ = divmod(self._num_sent, count)
            low, high = self._chunks[number_]
            owner = (self._grid.node - 1 - step_) % self._grid.num_nodes
            tag = self._base + self._num_sent
            self.sends += [
                self._transfers.send_to_peer(self._parts[owner, peer, low:high], peer, tag) for peer in self._grid.peers
            ]
            self._num_sent += 1

    def receive_ahead(self, step: int) -> None:
        """Post the receives of this block and the next ones; earlier blocks have been used up."""
        while self._posted < min(step + self._ahead, self._grid.num_nodes):
            place = self._buffer[self._posted % self._ahead]
            for number, (low, high) in enumerate(self._chunks):
                tag = self._base + self._posted * len(self._chunks) + number
                self._coming[self._posted, number] = [
                    self._transfers.receive_from_peer(place[row, low:high], peer, tag)
                    for row, peer in enumerate(self._grid.peers)
                ]
            self._posted += 1

    def parts_of(self, step: int, number: int) -> list[torch.Tensor]:
        """Return the peers' parts of a chunk, waiting for them."""
        low, high = self._chunks[number]
        place = self._buffer[step % self._ahead]
        parts = []
        for row, work in enumerate(self._coming.pop((step, number))):
            work.wait()
            parts.append(place[row, low:high])
        return parts
