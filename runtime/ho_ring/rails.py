"""The two communicators of a rank, and the count of what it sends over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    import torch.distributed as dist

    from paro_advise.runtime.ho_ring.grid import Grid
    from paro_advise.runtime.ho_ring.groups import Subgroups


@dataclass(slots=True)
class Sent:
    """What one rank has sent so far.

    Attributes:
        messages: point-to-point messages.
        num_bytes: their payload.
    """

    messages: int = 0
    num_bytes: int = 0

    def add(self, piece: torch.Tensor) -> None:
        """Count one message."""
        self.messages += 1
        self.num_bytes += piece.numel() * piece.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rails:
    """The two communicators of a rank.

    Each is its own group, so that inter-node and intra-node traffic runs at once.

    Attributes:
        ring: over the nodes for this local rank, rank = node; None on a single node.
        inside: of this node, rank = local rank; None with one rank a node.
    """

    ring: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None


def make_rails(grid: Grid, ranks: Sequence[int], subgroups: Subgroups) -> Rails:
    """Find or make this rank's two groups; only their members take part."""
    over_nodes = [ranks[place] for place in grid.rings[grid.local]]
    of_node = [ranks[place] for place in grid.nodes[grid.node]]
    return Rails(ring=subgroups.of(over_nodes), inside=subgroups.of(of_node))
