"""Collectives as efforts on the links of a cluster, and the time that they take there.

Times are numbers or arrays of draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from paro_advise.core.collective import Op
from paro_advise.policies.collective_cost import Draws, Effort, RingAlgorithm, effort_of
from paro_advise.policies.procedure import Hops, Scope

LINK_QUANTITIES = (
    "inter_alpha_us",
    "inter_gbps",
    "intra_alpha_us",
    "intra_gbps",
    "pod_alpha_us",
    "pod_gbps",
    "sum_ratio",
    "rail_gain",
    "compute_slowing",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One collective.

    Attributes:
        effort: what it asks of the links.
        size: ranks that take part.
        is_sum: it is the backend's own all-reduce, which may have a bandwidth of its own.
        rank_bytes: that one of them sends.
        is_inside: it stays inside nodes.
        is_in_pod: between nodes, it stays inside a pod.
        is_by_rails: between nodes, each of its rings has one rank a node.
    """

    effort: Effort
    size: int
    is_sum: bool
    rank_bytes: float
    is_inside: bool
    is_in_pod: bool
    is_by_rails: bool


# Collectives one after the other.
Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Latency and bandwidth of all levels, numbers or arrays of one shape, and a factor on all times.

    Attributes:
        inter_alpha_us, inter_gbps: between nodes, where there are pods between those of different pods; what a ring
            over several ranks of each node moves through a node's port.
        intra_alpha_us, intra_gbps: inside nodes.
        pod_alpha_us, pod_gbps: between nodes of a pod.
        slowdown: on all times.
        sum_ratio: bus bandwidth of an all-reduce to that of a gather or scatter.
        rail_gain: what a node's port moves, to what such a ring moves through it.
        compute_slowing: how much longer arithmetic takes while a collective runs beside it on the device.
    """

    inter_alpha_us: Draws
    inter_gbps: Draws
    intra_alpha_us: Draws
    intra_gbps: Draws
    pod_alpha_us: Draws
    pod_gbps: Draws
    slowdown: float = 1.0
    sum_ratio: Draws = 1.0
    rail_gain: Draws = 1.0
    compute_slowing: Draws = 1.0

    def us(self, parts: Parts) -> Draws:
        """Return the time of collectives one after the other."""
        return self.slowdown * sum((self._alone(part) for part in parts), 0.0)

    def _alone(self, part: Part) -> Draws:
        alpha, gbps = self.inter_alpha_us, self.inter_gbps
        if part.is_in_pod:
            alpha, gbps = self.pod_alpha_us, self.pod_gbps
        ratio = self._ratio(part)
        reached = gbps * ratio * (self.rail_gain if part.is_by_rails else 1.0)
        return part.effort.us(alpha, reached, self.intra_alpha_us, self.intra_gbps * ratio)

    def _ratio(self, part: Part) -> Draws:
        return self.sum_ratio if part.is_sum else 1.0

    def port_us(self, part: Part) -> Draws:
        """Return how long the bytes of a collective take a node's port, which others may use beside it."""
        gbps = self.rail_gain * (self.pod_gbps if part.is_in_pod else self.inter_gbps)
        return self.slowdown * part.effort.inter_bytes / (gbps * self._ratio(part) * 1e3)

    def fabric_us(self, part: Part) -> Draws:
        """Return how long the bytes of a collective take a rank's way inside its node."""
        return self.slowdown * part.effort.intra_bytes / (self.intra_gbps * self._ratio(part) * 1e3)


@dataclass(frozen=True, slots=True)
class StepCollectives:
    """The collectives that a strategy needs on a cluster, as efforts by the bytes of a whole unit."""

    world_size: int
    ranks_per_node: int
    nodes_per_pod: int | None
    group_size: int
    algorithm: RingAlgorithm
    reduce_is_all_reduce: bool

    def _inside(self, operation: Op, num_bytes: float) -> Parts:
        nodes = max(1, self.group_size // self.ranks_per_node)
        local = min(self.group_size, self.ranks_per_node)
        in_pod = self.nodes_per_pod is not None and self.nodes_per_pod % nodes == 0
        return (self._part(operation, num_bytes, nodes, local, in_pod=in_pod),)

    def _across(self, operation: Op, num_bytes: float) -> Parts:
        groups = self.world_size // self.group_size
        if groups == 1:
            return ()
        small = self.group_size < self.ranks_per_node
        nodes = self.world_size // self.ranks_per_node if small else groups
        local = self.ranks_per_node // self.group_size if small else 1
        found = self._part(operation, num_bytes / self.group_size, nodes, local)
        # The rings of all local ranks of a group go through the same ports.
        rings = min(self.group_size, self.ranks_per_node)
        return (replace(found, effort=replace(found.effort, inter_bytes=found.effort.inter_bytes * rings)),)

    def _world(self, operation: Op, num_bytes: float) -> Parts:
        if self.algorithm == RingAlgorithm.HO_RING and self.group_size != self.ranks_per_node:
            return self._inside(operation, num_bytes) + self._across(operation, num_bytes)
        nodes = self.world_size // self.ranks_per_node
        return (self._part(operation, num_bytes, nodes, self.ranks_per_node),)

    def _part(self, operation: Op, num_bytes: float, nodes: int, local: int, *, in_pod: bool = False) -> Part:
        if operation == Op.REDUCE_SCATTER and self.reduce_is_all_reduce:
            operation = Op.ALL_REDUCE
        size = nodes * local
        trips = 2 if operation == Op.ALL_REDUCE else 1
        return Part(
            effort_of(self.algorithm, operation, num_bytes, nodes, local),
            size,
            operation == Op.ALL_REDUCE and self.algorithm == RingAlgorithm.RING,
            trips * num_bytes * (size - 1) / size,
            nodes == 1,
            in_pod,
            nodes > 1 and (local == 1 or self.algorithm == RingAlgorithm.HO_RING),
        )

    def parts(self, hops: Hops, num_bytes: float) -> Parts:
        """Return what collectives in order ask of the links, for the bytes of a whole unit."""
        found: Parts = ()
        for hop in hops:
            match hop.scope:
                case Scope.INSIDE:
                    found += self._inside(hop.op, num_bytes)
                case Scope.ACROSS:
                    found += self._across(hop.op, num_bytes)
                case Scope.WORLD:
                    found += self._world(hop.op, num_bytes)
        return found
