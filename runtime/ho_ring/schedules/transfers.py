"""Messages of one rank to its neighbours on a grid, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.runtime.ho_ring.rails import Rails, Sent

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from paro_advise.runtime.ho_ring.grid import Grid


class Transfers:
    """Point-to-point messages over the rails of a rank.

    Args:
        grid: where the ranks lie.
        rails: this rank's communicators; one that does not exist must not be used.

    Attributes:
        sent_between, sent_inside: inter-node and intra-node messages of this rank.
    """

    def __init__(self, grid: Grid, rails: Rails) -> None:
        self.grid = grid
        self._rails = rails
        self._before = (grid.node - 1) % grid.num_nodes
        self._after = (grid.node + 1) % grid.num_nodes
        self.sent_between, self.sent_inside = Sent(), Sent()

    def receive_from_node_before(self, target: torch.Tensor, tag: int) -> dist.Work:
        """Begin to receive from the rank before this one on the ring."""
        assert self._rails.ring is not None
        return self._rails.ring.recv([target], self._before, tag)

    def send_to_next_node(self, piece: torch.Tensor, tag: int) -> dist.Work:
        """Begin to send to the next rank of the ring."""
        assert self._rails.ring is not None
        self.sent_between.add(piece)
        return self._rails.ring.send([piece], self._after, tag)

    def receive_from_peer(self, target: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive from another local rank of this node."""
        assert self._rails.inside is not None
        return self._rails.inside.recv([target], peer, tag)

    def send_to_peer(self, piece: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send to another local rank of this node."""
        assert self._rails.inside is not None
        self.sent_inside.add(piece)
        return self._rails.inside.send([piece], peer, tag)
