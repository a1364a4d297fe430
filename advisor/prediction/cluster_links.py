"""Collectives as efforts on the links of a cluster, and the time that they take there.

Times are numbers or arrays of draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.ranks.constants import GLOO_HALVES
from paro_advise.core.collective import Op
from paro_advise.policies.collective_cost import Draws, Effort, RingAlgorithm, effort_of, larger
from paro_advise.policies.procedure import Hops, Scope

if TYPE_CHECKING:
    from paro_advise.policies.link_rates import LinkRates

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
        op, algorithm: which, and how.
        nodes, local: nodes that take part, and ranks on each.
        rings: of such groups that go through the ports of the same nodes at the same time.
        size: ranks that take part.
        is_sum: it is the backend's own all-reduce, which may have a bandwidth of its own.
        rank_bytes: that one of them sends.
        is_inside: it stays inside nodes.
        is_in_pod: between nodes, it stays inside a pod.
        is_by_rails: between nodes, each of its rings has one rank a node.
    """

    effort: Effort
    op: Op
    algorithm: RingAlgorithm
    nodes: int
    local: int
    rings: int
    size: int
    is_sum: bool
    rank_bytes: float
    is_inside: bool
    is_in_pod: bool
    is_by_rails: bool


# Collectives one after the other.
Parts = tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedLinks:
    """Rates by operation and group shape, and the tiers' quantities that stand for them.

    Draws and what-ifs change the tiers; rates by shape change in proportion.

    Attributes:
        rates: as listed.
        inter_gbps, intra_gbps: of the tiers, where the rates are as listed.
        inter_alpha_us, intra_alpha_us: latency of a message between and inside nodes, which the rates hold.
    """

    rates: LinkRates
    inter_gbps: float
    intra_gbps: float
    inter_alpha_us: float
    intra_alpha_us: float

    def us(self, part: Part, links: Links) -> Draws:
        """Return the time of a collective alone."""
        between, inside = links.inter_gbps / self.inter_gbps, links.intra_gbps / self.intra_gbps
        if part.nodes == 1:
            rate = inside * self.rates.wire_gbps(part.op, 1, part.local, self.intra_alpha_us)
            return part.effort.us(0.0, 1.0, links.intra_alpha_us, rate)
        if part.algorithm == RingAlgorithm.HO_RING:
            card = between * self.rates.wire_gbps(Op.ALL_GATHER, part.nodes, 1, self.inter_alpha_us)
            near = inside * self.rates.wire_gbps(Op.ALL_GATHER, 1, part.local, self.intra_alpha_us)
            return part.effort.us(links.inter_alpha_us, part.rings * part.local * card, links.intra_alpha_us, near)
        known = _mean_hop(part, self.inter_alpha_us, self.intra_alpha_us)
        rate = between * self.rates.wire_gbps(part.op, part.nodes, part.local, float(known))
        effort, reached = part.effort, part.rings * rate
        hops = effort.inter_messages + effort.intra_messages
        wire_us = larger(effort.inter_bytes / (reached * 1e3), self.way_us(part, links))
        return hops * _mean_hop(part, links.inter_alpha_us, links.intra_alpha_us) + wire_us

    def way_us(self, part: Part, links: Links) -> Draws:
        """Return how long a collective's bytes take a rank's way inside its node."""
        rate = self.rates.wire_gbps(part.op, 1, part.local, self.intra_alpha_us)
        return part.effort.intra_bytes / (rate * links.intra_gbps / self.intra_gbps * 1e3)

    def port_gbps(self, part: Part, links: Links) -> Draws:
        """Return what the ports of the node's ranks that take part move, all rings together."""
        reached = self.rates.busbw_gbps(part.op, part.nodes, part.local) * part.rings
        cards = (self.rates.card_gbps or reached) * part.local * part.rings
        return max(reached, cards) * links.inter_gbps / self.inter_gbps


def _mean_hop(part: Part, inter_alpha_us: Draws, intra_alpha_us: Draws) -> Draws:
    """Return the mean latency of a ring's hops: one of each node's leaves it."""
    return (inter_alpha_us + (part.local - 1) * intra_alpha_us) / part.local


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
        sums_by_nodes: that is so where the ranks of a node add up first, and not among ranks that have a node each.
        rail_gain: what a node's port moves, to what such a ring moves through it.
        compute_slowing: how much longer arithmetic takes while a collective runs beside it on the device.
        root_share: of the arithmetic that its bytes suggest, what the root of the model does on the device.
        host_share: of what the host works while a profiler records, what it works without.
        arithmetic: of the run's arithmetic as its median is known, what it takes where these links are the true ones.
        shaped: rates by group shape, None where the tiers tell all.
    """

    inter_alpha_us: Draws
    inter_gbps: Draws
    intra_alpha_us: Draws
    intra_gbps: Draws
    pod_alpha_us: Draws
    pod_gbps: Draws
    slowdown: float = 1.0
    sum_ratio: Draws = 1.0
    sums_by_nodes: bool = False
    rail_gain: Draws = 1.0
    compute_slowing: Draws = 1.0
    root_share: Draws = 1.0
    host_share: Draws = 1.0
    arithmetic: Draws = 1.0
    shaped: ShapedLinks | None = None

    def typical(self) -> Links:
        """Return numbers for draws: the median of each."""
        import numpy as np

        names = (*LINK_QUANTITIES, "root_share", "host_share", "arithmetic")
        drawn = {name: float(np.median(getattr(self, name))) for name in names}
        by_nodes = self.sums_by_nodes
        return Links(**drawn, slowdown=self.slowdown, sums_by_nodes=by_nodes, shaped=self.shaped)

    def us(self, parts: Parts) -> Draws:
        """Return the time of collectives one after the other."""
        return self.slowdown * sum((self._alone(part) for part in parts), 0.0)

    def _alone(self, part: Part) -> Draws:
        if self.shaped:
            return self.shaped.us(part, self)
        alpha, gbps = self.inter_alpha_us, self.inter_gbps
        if part.is_in_pod:
            alpha, gbps = self.pod_alpha_us, self.pod_gbps
        ratio = self._ratio(part)
        reached = gbps * ratio * (self.rail_gain if part.is_by_rails else 1.0)
        return part.effort.us(alpha, reached, self.intra_alpha_us, self.intra_gbps * ratio)

    def _ratio(self, part: Part) -> Draws:
        is_sum = part.is_sum and (part.local > 1 or not self.sums_by_nodes)
        return self.sum_ratio if is_sum else 1.0

    def port_us(self, part: Part) -> Draws:
        """Return how long the bytes of a collective take a node's port, which others may use beside it."""
        if self.shaped:
            moved = part.effort.inter_bytes / (self.shaped.port_gbps(part, self) * 1e3) if part.nodes > 1 else 0.0
            return self.slowdown * moved
        gbps = self.rail_gain * (self.pod_gbps if part.is_in_pod else self.inter_gbps)
        return self.slowdown * part.effort.inter_bytes / (gbps * self._ratio(part) * 1e3)

    def fabric_us(self, part: Part) -> Draws:
        """Return how long the bytes of a collective take a rank's way inside its node."""
        if self.shaped and part.effort.is_streamed and part.nodes > 1:
            return self.slowdown * self.shaped.way_us(part, self)
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
    is_streamed: bool = False  # rings are, as NCCL's; on CPUs messages take turns on a port
    sums_by_trees: bool = False  # the backend's own all-reduces over several nodes run as trees

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
        together = 1 if self.is_streamed else rings
        more = replace(
            found.effort,
            inter_bytes=found.effort.inter_bytes * rings,
            in_flight=found.effort.in_flight * together,
        )
        return (replace(found, effort=more, rings=rings),)

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
        effort = effort_of(
            self.algorithm,
            operation,
            num_bytes,
            nodes,
            local,
            is_streamed=self.is_streamed,
            sums_by_trees=self.sums_by_trees,
        )
        if not self.is_streamed:
            halves = GLOO_HALVES if self.algorithm == RingAlgorithm.RING else 1
            effort = replace(effort, in_flight=float(halves * (local if nodes > 1 else 1)))
        return Part(
            effort=effort,
            op=operation,
            algorithm=self.algorithm,
            nodes=nodes,
            local=local,
            rings=1,
            size=size,
            is_sum=operation == Op.ALL_REDUCE and self.algorithm == RingAlgorithm.RING,
            rank_bytes=trips * num_bytes * (size - 1) / size,
            is_inside=nodes == 1,
            is_in_pod=in_pod,
            is_by_rails=nodes > 1 and (local == 1 or self.algorithm == RingAlgorithm.HO_RING),
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
