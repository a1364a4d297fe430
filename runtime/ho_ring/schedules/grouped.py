"""HO-Ring's schedule for backends that run a communicator's messages in order, such as NCCL.

There a send waits for its receive on the device, so both directions of a hop are issued as one batch,
and every rank issues the batches of a communicator in the same order. ``wait()`` orders streams and
does not block the host. Checked with gloo only (docs/runtime.md, "GPUs: what ran and what did not").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.ho_ring.grid import Grid
    from paro_advise.runtime.ho_ring.rails import Rails, Sent
    from paro_advise.runtime.ho_ring.schedules.reductions import Combine

    Chunks: TypeAlias = Sequence[tuple[int, int]]
    Message: TypeAlias = tuple[torch.Tensor, int]


class GroupedSchedule:
    """All-gather and reduce-scatter in batches.

    Args:
        grid, rails: of the group.
        sent_between, sent_inside: counters to add to.
    """

    def __init__(self, grid: Grid, rails: Rails, sent_between: Sent, sent_inside: Sent) -> None:
        self._grid = grid
        self._rails = rails
        self._counters = {id(rails.ring): sent_between, id(rails.inside): sent_inside}

    def all_gather(self, blocks: torch.Tensor, chunks: Chunks) -> None:
        """Spread every rank's block over (nodes, ranks per node, S); the own one is in place."""
        grid = self._grid
        arriving: dict[int, list[dist.Work]] = {}
        pending: list[dist.Work] = []
        for step in range(grid.num_nodes):
            mine, behind = (grid.node - step) % grid.num_nodes, (grid.node - step - 1) % grid.num_nodes
            for number, (low, high) in enumerate(chunks):
                for work in arriving.pop(number, []):
                    work.wait()
                piece = blocks[mine, grid.local, low:high]
                if step < grid.num_nodes - 1:
                    arriving[number] = self._hop(piece, blocks[behind, grid.local, low:high])
                receives = [(blocks[mine, peer, low:high], peer) for peer in grid.peers]
                pending += self._batch(self._rails.inside, [(piece, peer) for peer in grid.peers], receives)
        for work in pending:
            work.wait()

    def reduce_scatter(self, output: torch.Tensor, parts: torch.Tensor, chunks: Chunks, combine: Combine) -> None:
        """Reduce (nodes, ranks per node, S) of all ranks to this rank's block."""
        grid = self._grid
        sums = parts.new_empty(2, parts.shape[-1])
        scratch = parts.new_empty(2, max(1, grid.ranks_per_node - 1), parts.shape[-1])
        order = [(step, number) for step in range(grid.num_nodes) for number in range(len(chunks))]
        exchanged = {order[0]: self._exchange(order[0], parts, scratch, chunks)}
        arriving: dict[int, list[dist.Work]] = {}
        totals: list[torch.Tensor] = []  # alive until they are sent
        for place, (step, number) in enumerate(order):
            low, high = chunks[number]
            is_last = step == grid.num_nodes - 1
            if number == 0:
                totals.append(output.view(-1) if is_last else torch.empty_like(sums[0]))
            if place + 1 < len(order):  # one chunk ahead of the ring
                exchanged[order[place + 1]] = self._exchange(order[place + 1], parts, scratch, chunks)
            piece = totals[-1][low:high]
            piece.copy_(parts[(grid.node - 1 - step) % grid.num_nodes, grid.local, low:high])
            for work in exchanged.pop((step, number)):
                work.wait()
            for row in range(grid.ranks_per_node - 1):
                combine(piece, scratch[step % 2, row, low:high])
            if step:
                for work in arriving.pop(number):
                    work.wait()
                combine(piece, sums[(step - 1) % 2, low:high])
            if not is_last:
                arriving[number] = self._hop(piece, sums[step % 2, low:high])

    def _exchange(
        self, turn: tuple[int, int], parts: torch.Tensor, scratch: torch.Tensor, chunks: Chunks
    ) -> list[dist.Work]:
        """Send the peers of the node their parts of a chunk, and get theirs."""
        step, number = turn
        low, high = chunks[number]
        owner = (self._grid.node - 1 - step) % self._grid.num_nodes
        sends = [(parts[owner, peer, low:high], peer) for peer in self._grid.peers]
        receives = [(scratch[step % 2, row, low:high], peer) for row, peer in enumerate(self._grid.peers)]
        return self._batch(self._rails.inside, sends, receives)

    def _hop(self, piece: torch.Tensor, target: torch.Tensor) -> list[dist.Work]:
        """Send to the next node of the ring and receive from the one before."""
        grid = self._grid
        following, before = (grid.node + 1) % grid.num_nodes, (grid.node - 1) % grid.num_nodes
        return self._batch(self._rails.ring, [(piece, following)], [(target, before)])

    def _batch(
        self, rail: dist.ProcessGroup | None, sends: Sequence[Message], receives: Sequence[Message]
    ) -> list[dist.Work]:
        if not sends:
            return []
        for piece, _ in sends:
            self._counters[id(rail)].add(piece)
        messages = [
            dist.P2POp(operation, tensor, group=rail, group_peer=peer)
            for operation, listed in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in listed
        ]
        return dist.batch_isend_irecv(messages)
