"""What a collective costs: time by algorithm on a cluster of equal nodes.

One model for all: a message of b bytes inside a node takes alpha_a + b / B_a, between nodes
alpha_e + b / B_e, where B_e is the port of a whole node that its ranks share, and B_a is a rank's.
V is the whole buffer (nccl-tests' convention); n nodes of m ranks, N = n * m, node-major.

Sources: ring: Patarasu and Yuan, 2009. Binomial tree, recursive doubling and halving: Thakur,
Rabenseifner and Gropp, 2005. All-reduce by halving and doubling: Rabenseifner, 2004. Hierarchical
by leaders, two hops and HO-Ring: reference strategies, section 5.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Operation(StrEnum):
    """A collective."""

    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Algorithm(StrEnum):
    """A way to do it."""

    RING = "ring"
    TREE = "tree"
    BUTTERFLY = "butterfly"  # recursive doubling or halving
    RABENSEIFNER = "rabenseifner"
    LEADERS = "leaders"  # hierarchical, one rank of each node on the wire
    TWO_HOP = "two_hop"
    HO_RING = "ho_ring"
    PAIRWISE = "pairwise"
    SERVER = "server"  # parameter server: the baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A cluster of equal nodes, or the part of it that a group of ranks lies on.

    Attributes:
        num_nodes: nodes (n).
        ranks_per_node: ranks on each (m).
        inter_alpha_us, intra_alpha_us: latency of a message.
        inter_gbps: what the port of a node carries in one direction, 1e9 bytes/s.
        intra_gbps: what a rank sends inside its node, 1e9 bytes/s.

    Raises (on construction):
        UsageError: a number that no cluster has.
    """

    num_nodes: int
    ranks_per_node: int
    inter_alpha_us: float
    inter_gbps: float
    intra_alpha_us: float
    intra_gbps: float

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node", "inter_gbps", "intra_gbps"):
            if not getattr(self, name) > 0:
                raise UsageError(f"network.{name} must be positive, got {getattr(self, name)}")
        for name in ("inter_alpha_us", "intra_alpha_us"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"network.{name} must not be negative, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """Return the number of ranks (N)."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a collective asks of the links; its time follows from their latency and bandwidth.

    Attributes:
        inter_messages, inter_bytes: rounds between nodes, and bytes through one node's port.
        intra_messages, intra_bytes: rounds inside nodes, and bytes that one rank sends there.
        overlapped_rounds: the two go on at once in this many rounds between nodes, with one more round
            inside nodes; 0 for one after the other.
    """

    inter_messages: float = 0.0
    inter_bytes: float = 0.0
    intra_messages: float = 0.0
    intra_bytes: float = 0.0
    overlapped_rounds: int = 0

    def __mul__(self, times: float) -> Effort:
        """Return the effort of doing it several times, one after the other."""
        return Effort(
            inter_messages=times * self.inter_messages,
            inter_bytes=times * self.inter_bytes,
            intra_messages=times * self.intra_messages,
            intra_bytes=times * self.intra_bytes,
            overlapped_rounds=self.overlapped_rounds,
        )

    def us(self, inter_alpha_us: Any, inter_gbps: Any, intra_alpha_us: Any, intra_gbps: Any) -> Any:
        """Return the time; all arguments are numbers, or arrays of one shape."""
        inter = self.inter_messages * inter_alpha_us + self.inter_bytes / (inter_gbps * 1e3)
        intra = self.intra_messages * intra_alpha_us + self.intra_bytes / (intra_gbps * 1e3)
        if not self.overlapped_rounds:
            return inter + intra
        once = intra / (self.overlapped_rounds + 1)
        more = intra - once
        return inter + (more - inter) * (more > inter) + once


def _ring(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """One ring over all ranks: every round waits for its slowest hop."""
    ranks = nodes * local
    match operation:
        case Operation.ALL_GATHER | Operation.REDUCE_SCATTER:
            rounds = ranks - 1
        case _:  # all-reduce; a chain of N blocks: the last leaves after N rounds and takes N - 2 more hops
            rounds = 2 * (ranks - 1)
    if nodes > 1:
        return Effort(inter_messages=rounds, inter_bytes=rounds * num_bytes / ranks)
    return Effort(intra_messages=rounds, intra_bytes=rounds * num_bytes / ranks)


def _tree(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Binomial tree, inside nodes last: whole messages, or halves at each level for gather and scatter."""
    inter_rounds, intra_rounds = _rounds(nodes), _rounds(local)
    if operation in (Operation.GATHER, Operation.SCATTER):
        return Effort(
            inter_messages=inter_rounds,
            inter_bytes=num_bytes * (nodes - 1) / nodes,
            intra_messages=intra_rounds,
            intra_bytes=num_bytes / nodes * (local - 1) / local,
        )
    once = Effort(
        inter_messages=inter_rounds,
        inter_bytes=inter_rounds * num_bytes,
        intra_messages=intra_rounds,
        intra_bytes=intra_rounds * num_bytes,
    )
    return once * 2 if operation == Operation.ALL_REDUCE else once


def _butterfly(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Recursive doubling or halving; between nodes all ranks of a node exchange at once."""
    inter_rounds, intra_rounds = _rounds(nodes), _rounds(local)
    whole = operation == Operation.ALL_REDUCE  # the whole buffer in every round
    outside = inter_rounds * num_bytes if whole else num_bytes * (nodes - 1) / nodes
    inside = intra_rounds * num_bytes if whole else num_bytes * (local - 1) / (nodes * local)
    return Effort(
        inter_messages=inter_rounds, inter_bytes=local * outside, intra_messages=intra_rounds, intra_bytes=inside
    )


def _rabenseifner(_: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling; far partners move least."""
    # After halving inside the node, each rank has 1/m left to exchange with other nodes.
    once = Effort(
        inter_messages=_rounds(nodes),
        inter_bytes=num_bytes * (nodes - 1) / nodes,
        intra_messages=_rounds(local),
        intra_bytes=num_bytes * (local - 1) / local,
    )
    return once * 2


def _leaders(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Inside each node to a leader, a ring of leaders, and back inside the node."""
    spread = _rounds(local)
    if operation == Operation.ALL_REDUCE:
        return Effort(
            inter_messages=2 * (nodes - 1),
            inter_bytes=2 * num_bytes * (nodes - 1) / nodes,
            intra_messages=2 * spread,
            intra_bytes=2 * spread * num_bytes,
        )
    return Effort(
        inter_messages=nodes - 1,
        inter_bytes=num_bytes * (nodes - 1) / nodes,
        intra_messages=local - 1 + spread,
        intra_bytes=num_bytes * (local - 1) / (nodes * local) + spread * num_bytes,
    )


def _two_hop(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """All ranks of a node on the wire, one stage after the other (the sequential hierarchical ring)."""
    once = Effort(
        inter_messages=nodes - 1,
        inter_bytes=num_bytes * (nodes - 1) / nodes,
        intra_messages=local - 1,
        intra_bytes=num_bytes * (local - 1) / local,
    )
    return once * 2 if operation == Operation.ALL_REDUCE else once


def _ho_ring(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """The two stages overlap: n - 1 rounds of the slower one, and one more inside the node."""
    once = Effort(
        inter_messages=nodes - 1,
        inter_bytes=num_bytes * (nodes - 1) / nodes,
        intra_messages=nodes * (local - 1),
        intra_bytes=num_bytes * (local - 1) / local,
        overlapped_rounds=nodes - 1,
    )
    return once * 2 if operation == Operation.ALL_REDUCE else once


def _pairwise(_: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Every rank sends 1/N of its buffer to each other one; the port carries what leaves the node."""
    ranks = nodes * local
    return Effort(
        inter_messages=ranks - local,
        inter_bytes=local * (ranks - local) * num_bytes / ranks,
        intra_messages=local - 1,
        intra_bytes=(local - 1) * num_bytes / ranks,
    )


def _server(operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """All ranks send to one and get the result back; its port carries everything."""
    far, near = nodes * local - local, local - 1
    once = Effort(inter_messages=far, inter_bytes=far * num_bytes, intra_messages=near, intra_bytes=near * num_bytes)
    return once * 2 if operation == Operation.ALL_REDUCE else once


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0


_PARTS = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER)
_ROOTED = (Operation.BROADCAST, Operation.REDUCE)
_MODELS: dict[Algorithm, tuple[Callable[[Operation, float, int, int], Effort], frozenset[Operation]]] = {
    Algorithm.RING: (_ring, frozenset({*_PARTS, *_ROOTED, Operation.ALL_REDUCE})),
    Algorithm.TREE: (_tree, frozenset({*_ROOTED, Operation.GATHER, Operation.SCATTER, Operation.ALL_REDUCE})),
    Algorithm.BUTTERFLY: (_butterfly, frozenset({*_PARTS, Operation.ALL_REDUCE})),
    Algorithm.RABENSEIFNER: (_rabenseifner, frozenset({Operation.ALL_REDUCE})),
    Algorithm.LEADERS: (_leaders, frozenset({*_PARTS, Operation.ALL_REDUCE})),
    Algorithm.TWO_HOP: (_two_hop, frozenset({*_PARTS, Operation.ALL_REDUCE})),
    Algorithm.HO_RING: (_ho_ring, frozenset({*_PARTS, Operation.ALL_REDUCE})),
    Algorithm.PAIRWISE: (_pairwise, frozenset({Operation.ALL_TO_ALL})),
    Algorithm.SERVER: (_server, frozenset({Operation.ALL_REDUCE, Operation.REDUCE, Operation.BROADCAST})),
}


def algorithms_of(operation: Operation) -> tuple[Algorithm, ...]:
    """Return the algorithms that do a collective."""
    return tuple(algorithm for algorithm, (_, operations) in _MODELS.items() if operation in operations)


def effort_of(algorithm: Algorithm, operation: Operation, num_bytes: float, nodes: int, local: int) -> Effort:
    """Return what a collective asks of the links.

    Args:
        algorithm: how.
        operation: what.
        num_bytes: of the whole buffer; for all-to-all of one rank's.
        nodes, local: nodes and ranks on each; a single rank takes no effort.

    Raises:
        UsageError: the algorithm does not do this collective.
    """
    model, operations = _MODELS[algorithm]
    if operation not in operations:
        raise UsageError(
            f"{algorithm} must be one that does {operation}, got none",
            hint=f"use {', '.join(algorithms_of(operation))}",
        )
    return model(operation, num_bytes, nodes, local) if nodes * local > 1 else Effort()


def collective_us(algorithm: Algorithm, operation: Operation, num_bytes: float, network: Network) -> float:
    """Return the time of a collective; see ``effort_of``."""
    effort = effort_of(algorithm, operation, num_bytes, network.num_nodes, network.ranks_per_node)
    found = effort.us(network.inter_alpha_us, network.inter_gbps, network.intra_alpha_us, network.intra_gbps)
    return float(found)


def cheapest(
    operation: Operation, num_bytes: float, network: Network, allowed: Iterable[Algorithm] | None = None
) -> tuple[Algorithm, float]:
    """Return the fastest algorithm and its time, us."""
    names = [name for name in algorithms_of(operation) if allowed is None or name in set(allowed)]
    times = {name: collective_us(name, operation, num_bytes, network) for name in names}
    best = min(times, key=lambda name: times[name])
    return best, times[best]


def lower_bound_us(operation: Operation, num_bytes: float, network: Network) -> float:
    """Return what no algorithm can beat (reference strategies, section 5.3), without latency.

    Each node must receive the part of the buffer that it lacks through its port at least once.
    """
    trips = 2 if operation == Operation.ALL_REDUCE else 1
    port = num_bytes * (network.num_nodes - 1) / network.num_nodes / (network.inter_gbps * 1e3)
    inlets = network.intra_gbps + (network.inter_gbps / network.ranks_per_node if network.num_nodes > 1 else 0.0)
    rank = num_bytes * (network.size - 1) / network.size / (inlets * 1e3)
    return trips * max(port if network.num_nodes > 1 else 0.0, rank)
