"""Where the ranks of a group lie: nodes times local ranks, node by node."""

from __future__ import annotations

from dataclasses import dataclass

from paro_advise.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A regular grid of ranks.

    Attributes:
        num_nodes: nodes (n).
        ranks_per_node: ranks on each (m).
        index: this rank's place in the group, node-major: node * m + local.

    Raises (on construction):
        UsageError: the index lies outside the grid.
    """

    num_nodes: int
    ranks_per_node: int
    index: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1 or not 0 <= self.index < self.size:
            raise UsageError(
                f"grid.index must lie in a grid of {self.num_nodes} x {self.ranks_per_node} ranks, got {self.index}"
            )

    @classmethod
    def of(cls, size: int, index: int, ranks_per_node: int) -> Grid:
        """Lay a group out on nodes.

        Args:
            size: ranks of the group.
            index: this rank's place in it.
            ranks_per_node: must divide the size.

        Raises:
            UsageError: it does not.
        """
        if ranks_per_node < 1 or size % ranks_per_node:
            raise UsageError(
                f"ranks_per_node must divide the group, got {ranks_per_node} for a group of {size} ranks",
                hint="use 1 for a plain ring over all ranks",
            )
        return cls(num_nodes=size // ranks_per_node, ranks_per_node=ranks_per_node, index=index)

    @property
    def size(self) -> int:
        """Return the number of ranks (N)."""
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """Return this rank's node."""
        return self.index // self.ranks_per_node

    @property
    def local(self) -> int:
        """Return this rank's place inside its node."""
        return self.index % self.ranks_per_node

    def at(self, node: int, local: int) -> int:
        """Return the place in the group of a node's local rank; nodes count round the ring."""
        return (node % self.num_nodes) * self.ranks_per_node + local

    @property
    def peers(self) -> tuple[int, ...]:
        """Return the other local ranks of this node, each starting with another one.

        Rotated so that no rank is everybody's first partner.
        """
        m = self.ranks_per_node
        return tuple((self.local + step) % m for step in range(1, m))

    @property
    def rings(self) -> list[list[int]]:
        """Return the places in the group of each local rank over the nodes."""
        return [[self.at(node, local) for node in range(self.num_nodes)] for local in range(self.ranks_per_node)]

    @property
    def nodes(self) -> list[list[int]]:
        """Return the places in the group of each node's ranks."""
        return [[self.at(node, local) for local in range(self.ranks_per_node)] for node in range(self.num_nodes)]
