"""What a collective costs: time by algorithm on a cluster of equal nodes.

One model for all: a message of b bytes inside a node takes alpha_a + b / B_a, between nodes
alpha_e + b / B_e, where B_e is the port of a whole node that its ranks share, and B_a is a rank's.
A streamed ring sends slices on as they come: its hops' latencies add up, its bytes take the slower link.
V is the whole buffer (nccl-tests' convention); n nodes of m ranks, N = n * m, node-major.

Sources: ring: Patarasu and Yuan, 2009. HO-Ring: PaRO (arXiv 2310.06003); docs/strategies.md, HO-Ring. Trees: NCCL,
src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.core.collective import Op
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# none; latency between nodes of a tree's hop, 8.5 us, to that of a ring's, 4 us (NCCL, src/graph/tuning.cc, LL128)
_TREE_HOP = 8.5 / 4.0
# A quantity of the links or a time (us): one number, or an array of draws.
Draws: TypeAlias = "float | NDArray[np.float64]"


class RingAlgorithm(StrEnum):
    """A way to do a collective."""

    RING = "ring"  # one ring over all ranks
    HO_RING = "ho_ring"  # hierarchical overlapped ring


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a collective asks of the links; its time follows from their latency and bandwidth.

    Attributes:
        inter_messages, inter_bytes: inter-node rounds, and bytes through one node's port.
        intra_messages, intra_bytes: intra-node rounds, and bytes that one rank sends there.
        overlapped_rounds: the two go on at once in this many inter-node rounds, with one more round
            inside nodes; 0 for one after the other.
        is_streamed: bytes go through both at once, in slices that rounds do not wait for.
        in_flight: messages that take turns on one port, or on one link where all stay inside a node: the latency of
            one passes while the others move.
    """

    inter_messages: float = 0.0
    inter_bytes: float = 0.0
    intra_messages: float = 0.0
    intra_bytes: float = 0.0
    overlapped_rounds: int = 0
    is_streamed: bool = False
    in_flight: float = 1.0

    def __mul__(self, times: float) -> Effort:
        """Return the effort of doing it several times, one after the other."""
        return Effort(
            inter_messages=times * self.inter_messages,
            inter_bytes=times * self.inter_bytes,
            intra_messages=times * self.intra_messages,
            intra_bytes=times * self.intra_bytes,
            overlapped_rounds=self.overlapped_rounds,
            is_streamed=self.is_streamed,
            in_flight=self.in_flight,
        )

    def us(self, inter_alpha_us: Draws, inter_gbps: Draws, intra_alpha_us: Draws, intra_gbps: Draws) -> Draws:
        """Return the time; all arguments are numbers, or arrays of one shape."""
        inter_latency, inter_wire = self.inter_messages * inter_alpha_us, self.inter_bytes / (inter_gbps * 1e3)
        intra_latency, intra_wire = self.intra_messages * intra_alpha_us, self.intra_bytes / (intra_gbps * 1e3)
        if self.is_streamed:
            return inter_latency + intra_latency + larger(inter_wire, intra_wire)
        inter = larger(
            inter_wire + min(1.0, self.inter_messages) * inter_alpha_us, inter_latency + inter_wire / self.in_flight
        )
        turns = 1.0 if self.inter_messages else self.in_flight
        intra = larger(intra_wire + min(1.0, self.intra_messages) * intra_alpha_us, intra_latency + intra_wire / turns)
        if not self.overlapped_rounds:
            return inter + intra
        once = intra / (self.overlapped_rounds + 1)
        return larger(inter, intra - once) + once


def larger(first: Draws, second: Draws) -> Draws:
    """Return the larger of two numbers, or of each pair of two arrays."""
    if isinstance(first, float) and isinstance(second, float):
        return max(first, second)
    import numpy as np

    return np.maximum(first, second)


def smaller(first: Draws, second: Draws) -> Draws:
    """Return the smaller of two numbers, or of each pair of two arrays."""
    if isinstance(first, float) and isinstance(second, float):
        return min(first, second)
    import numpy as np

    return np.minimum(first, second)


def effort_of(
    algorithm: RingAlgorithm,
    operation: Op,
    num_bytes: float,
    nodes: int,
    local: int,
    *,
    is_streamed: bool = False,
    sums_by_trees: bool = False,
) -> Effort:
    """Return what an all-gather, a reduce-scatter or an all-reduce asks of the links.

    Args:
        algorithm: how.
        operation: what.
        num_bytes: of the whole buffer.
        nodes, local: nodes and ranks on each; a single rank takes no effort.
        is_streamed: a ring sends slices on as they come, as NCCL's does; else each round ends with its slowest hop.
        sums_by_trees: streamed all-reduces over several nodes run as trees.

    Raises:
        UsageError: another operation.
    """
    if operation not in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE):
        raise UsageError(f"a cost must be asked of an all-gather, reduce-scatter or all-reduce, got {operation}")
    if nodes * local == 1:
        return Effort()
    if sums_by_trees and is_streamed and nodes > 1 and (algorithm, operation) == (RingAlgorithm.RING, Op.ALL_REDUCE):
        return _tree(num_bytes, nodes, local)
    if algorithm == RingAlgorithm.HO_RING:
        once = _ho_ring(num_bytes, nodes, local)
    else:
        once = _streamed_ring(num_bytes, nodes, local) if is_streamed else _ring(num_bytes, nodes, local)
    return once * 2 if operation == Op.ALL_REDUCE else once


def _ring(num_bytes: float, nodes: int, local: int) -> Effort:
    """One ring over all ranks: every round waits for its slowest hop."""
    ranks = nodes * local
    rounds = ranks - 1
    if nodes > 1:
        return Effort(inter_messages=rounds, inter_bytes=rounds * num_bytes / ranks)
    return Effort(intra_messages=rounds, intra_bytes=rounds * num_bytes / ranks)


def _streamed_ring(num_bytes: float, nodes: int, local: int) -> Effort:
    """One ring over all ranks whose last byte comes after all hops: n - 1 between nodes and the others inside.

    Each rank receives and sends all bytes inside its node, too (NCCL, src/graph/tuning.cc: the latency of rings, and
    the lower of both bandwidths).
    """
    ranks = nodes * local
    moved = (ranks - 1) * num_bytes / ranks
    return Effort(
        inter_messages=nodes - 1,
        inter_bytes=moved if nodes > 1 else 0.0,
        intra_messages=ranks - nodes,
        intra_bytes=moved if local > 1 else 0.0,
        is_streamed=True,
    )


def _tree(num_bytes: float, nodes: int, local: int) -> Effort:
    """An all-reduce up and down two trees of nodes, each a chain inside (NCCL, src/graph/tuning.cc: latency of trees).

    Each tree carries half of the bytes, and a node has two children in one of them: its port takes in all bytes on
    the way up and once more on the way down. Of two nodes each is the other's child once: all bytes pass once.
    """
    moved = 2 * num_bytes * (nodes * local - 1) / (nodes * local)
    return Effort(
        inter_messages=2 * tree_depth(nodes),
        inter_bytes=moved * tree_port_share(nodes, nodes * local),
        intra_messages=2 * (local - 1),
        intra_bytes=moved if local > 1 else 0.0,
        is_streamed=True,
    )


def tree_depth(nodes: int) -> float:
    """Return how many hops of a ring between nodes those of a tree take as long as, from its leaves to its root."""
    return _TREE_HOP * math.log2(nodes)


def tree_port_share(nodes: int, ranks: int) -> float:
    """Return the bytes that an all-reduce by trees moves through a node's port, to those of one by a ring.

    On 2 x 8 H100 a public table has 361.75 GB/s for all-reduces and 184.61 for gathers (Ultra-Scale Playbook, 256 MB).
    """
    return ranks / (2 * (ranks - 1)) if nodes == 2 else 1.0


def _ho_ring(num_bytes: float, nodes: int, local: int) -> Effort:
    """The two stages overlap: n - 1 rounds of the slower one, and one more inside the node."""
    return Effort(
        inter_messages=nodes - 1,
        inter_bytes=num_bytes * (nodes - 1) / nodes,
        intra_messages=nodes * (local - 1),
        intra_bytes=num_bytes * (local - 1) / local,
        overlapped_rounds=nodes - 1,
    )
