"""What a lab should look like."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.errors import UsageError
from paro_advise.runtime.lab.constants import MAX_NODES


class Isolation(StrEnum):
    """How nodes are kept apart."""

    NAMESPACES = "namespaces"  # by root: real ports with limited rates
    USER_NAMESPACES = "user_namespaces"  # the same without root
    LOOPBACK = "loopback"  # not apart at all: every rank on loopback, nothing limited


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec:
    """A cluster of equal nodes, of which one may have a slower port and one rank may be slow.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: processes per node.
        port_mbit: rate of each node's port in each direction, 1e6 bits/s.
        slow_node: node with another port rate, None for none.
        slow_port_mbit: its rate.
        slow_rank: global rank that is slowed, None for none.
        slow_factor: how many times longer it takes for the same work.
    """

    nodes: int = 2
    ranks_per_node: int = 2
    port_mbit: float = 400.0
    slow_node: int | None = None
    slow_port_mbit: float | None = None
    slow_rank: int | None = None
    slow_factor: float = 1.3

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise UsageError(f"lab.nodes must be 1 to {MAX_NODES}, got {self.nodes}")
        if self.ranks_per_node < 1:
            raise UsageError(f"lab.ranks_per_node must be at least 1, got {self.ranks_per_node}")
        if self.port_mbit <= 0:
            raise UsageError(f"lab.port_mbit must be positive, got {self.port_mbit}")
        if (self.slow_node is None) != (self.slow_port_mbit is None):
            raise UsageError("lab.slow_node and lab.slow_port_mbit go together")
        if self.slow_node is not None and not 0 <= self.slow_node < self.nodes:
            raise UsageError(f"lab.slow_node must be below {self.nodes}, got {self.slow_node}")
        if self.slow_port_mbit is not None and self.slow_port_mbit <= 0:
            raise UsageError(f"lab.slow_port_mbit must be positive, got {self.slow_port_mbit}")
        if self.slow_rank is not None and not 0 <= self.slow_rank < self.world_size:
            raise UsageError(f"lab.slow_rank must be below {self.world_size}, got {self.slow_rank}")
        if self.slow_factor < 1:
            raise UsageError(f"lab.slow_factor must be at least 1, got {self.slow_factor}")

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.nodes * self.ranks_per_node

    def port_mbit_of(self, node: int) -> float:
        """Return the port rate of a node, 1e6 bits/s."""
        if node == self.slow_node and self.slow_port_mbit is not None:
            return self.slow_port_mbit
        return self.port_mbit
