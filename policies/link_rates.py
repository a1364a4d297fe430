"""Bus bandwidths of a cluster by operation and group shape, from benchmarks of whole nodes.

What benchmarks list is all ranks of n nodes in one group. Groups with fewer ranks of each node have fewer network
cards: the part of a byte's time that the cards take grows with the cards that are missing (docs/prediction.md,
rates by group shape).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

INSIDE, BETWEEN = "inside", "between"  # nodes
RATED = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)
# Of a measured time, the most that counts as latency: the rest moved bytes; assumed.
_LATENCY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What collectives reach on a cluster.

    Attributes:
        ranks_per_node: of the benchmark, which used all of them.
        num_bytes: of its message, the whole buffer.
        gbps: by operation, (number of nodes, nccl-tests' bus bandwidth in 1e9 bytes/s), nodes rising.
        sums_in_network: all-reduces are as listed; else as slow as scatter and gather after each other.
        stated: of these, "inside" nodes and "between" them, what is a link's own rate and no benchmark's: of no
            message, so that no latency is in it.

    Raises (on construction):
        UsageError: no rate, or one that is no positive number.
    """

    ranks_per_node: int
    num_bytes: float
    gbps: Mapping[Op, tuple[tuple[int, float], ...]]
    sums_in_network: bool = True
    stated: frozenset[tuple[Op, str]] = frozenset()

    def __post_init__(self) -> None:
        listed = [pair for pairs in self.gbps.values() for pair in pairs]
        if not listed or any(op not in RATED for op in self.gbps):
            names = ", ".join(op.value for op in RATED)
            raise UsageError(
                f"link rates must be given for one or more of {names}, got {', '.join(self.gbps) or 'none'}"
            )
        for nodes, rate in listed:
            if nodes < 1 or not 0 < rate < math.inf:
                raise UsageError(f"a link rate must be a positive number for 1 node or more, got {rate} for {nodes}")

    @property
    def card_gbps(self) -> float | None:
        """Return what one rank's share of a node's network cards moves: the best gather or scatter between nodes."""
        rings = (Op.ALL_GATHER, Op.REDUCE_SCATTER)
        ops = [op for op in rings if op in self.gbps] or list(self.gbps)
        best = max((rate for op in ops for nodes, rate in self.gbps[op] if nodes > 1), default=None)
        return best / self.ranks_per_node if best else None

    def busbw_gbps(self, op: Op, nodes: int, local: int) -> float:
        """Return the bus bandwidth of a collective.

        Args:
            op: all-gather, reduce-scatter or all-reduce.
            nodes: that its group spans.
            local: ranks of the group on each.
        """
        if op == Op.ALL_REDUCE and not self.sums_in_network and len(self.gbps) > 1:
            parts = [1 / self.busbw_gbps(part, nodes, local) for part in RATED if part != op and part in self.gbps]
            return len(parts) / sum(parts)
        listed = _at(self._pairs(op), nodes)
        card = self.card_gbps
        missing = card is not None and nodes > 1 and local < self.ranks_per_node
        if not missing or card is None:
            return listed
        return 1 / (1 / listed + (1 / local - 1 / self.ranks_per_node) / card)

    def wire_gbps(self, op: Op, nodes: int, local: int, hop_us: float) -> float:
        """Return the bandwidth that is left when latency is counted on its own.

        Args:
            op, nodes, local: see ``busbw_gbps``.
            hop_us: latency of one of the messages that follow each other.
        """
        busbw, size = self.busbw_gbps(op, nodes, local), nodes * local
        if size == 1 or (self._listed(op), INSIDE if nodes == 1 else BETWEEN) in self.stated:
            return busbw
        trips = 2 if op == Op.ALL_REDUCE else 1
        sent = trips * self.num_bytes * (size - 1) / size
        whole = sent / (busbw * 1e3)
        return sent / (whole - min(trips * (size - 1) * hop_us, _LATENCY_SHARE * whole)) / 1e3

    def _listed(self, op: Op) -> Op:
        """Return the operation whose rates count for another one."""
        return op if self.gbps.get(op) else next(other for other in RATED if other in self.gbps)

    def _pairs(self, op: Op) -> tuple[tuple[int, float], ...]:
        return self.gbps[self._listed(op)]


def _at(pairs: tuple[tuple[int, float], ...], nodes: int) -> float:
    """Return the rate at a number of nodes: between listed ones on a straight line of logarithms, beyond them held.

    Links inside a node say nothing of those between several, where some are listed.
    """
    several = tuple(pair for pair in pairs if pair[0] > 1)
    if nodes > 1 and several:
        pairs = several
    below = [pair for pair in pairs if pair[0] <= nodes]
    above = [pair for pair in pairs if pair[0] >= nodes]
    low, high = (below or above[:1])[-1], (above or below[-1:])[0]
    if low[0] == high[0]:
        return low[1]
    share = math.log(nodes / low[0]) / math.log(high[0] / low[0])
    return math.exp((1 - share) * math.log(low[1]) + share * math.log(high[1]))
