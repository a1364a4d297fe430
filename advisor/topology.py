"""Which ranks share a node, and how that is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.rank_facts import RankFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of a run.

    Attributes:
        gpus_per_node: ranks on one node, None when unknown.
        source: "flag", "hosts", "metadata", "groups" or "" (unknown).
        node_of: rank to node index for every rank of the world that is known.
    """

    gpus_per_node: int | None
    source: str
    node_of: Mapping[int, int]

    def span(self, ranks: Sequence[int]) -> str:
        """Return where a group's traffic runs: intra, inter, mixed, or "" when unknown."""
        nodes = [self.node_of.get(rank) for rank in ranks]
        if not nodes or None in nodes:
            return ""
        distinct = len(set(nodes))
        if distinct == 1:
            return "intra"
        return "inter" if distinct == len(nodes) else "mixed"


def find_topology(ranks: Sequence[tuple[int, RankFacts]], world_size: int | None, flag: int | None) -> Topology:
    """Find nodes from, in this order: the user, host names, device lists, group sizes.

    Args:
        ranks: (rank, facts).
        world_size: None when unknown.
        flag: ranks per node as the user says, or None.
    """
    world = range(world_size or (max((rank for rank, _ in ranks), default=-1) + 1))
    if flag:
        if len(world) and len(world) % flag:
            raise UsageError(f"--gpus-per-node must divide the {len(world)} ranks of the run, got {flag}")
        return _regular(flag, "flag", world)
    hosts = {rank: facts.header.host for rank, facts in ranks if facts.header.host}
    names = sorted(set(hosts.values()), key=lambda name: min(r for r, n in hosts.items() if n == name))
    if hosts and len(hosts) == len(ranks) and (len(names) > 1 or len(ranks) == len(world)):
        node_of = {rank: names.index(name) for rank, name in hosts.items()}
        sizes = {list(node_of.values()).count(node) for node in set(node_of.values())}
        full = len(ranks) == len(world)
        return Topology(gpus_per_node=max(sizes) if full else None, source="hosts", node_of=node_of)
    counts = {facts.header.gpus_per_node for _, facts in ranks if facts.header.gpus_per_node}
    if len(counts) == 1 and (count := counts.pop()) and (count > 1 or len(world) == 1):
        return _regular(min(count, len(world)) if len(world) else count, "metadata", world)
    shard_sizes = {
        group.size
        for _, facts in ranks
        for group in facts.header.groups
        if group.size < len(world) and "shard" in group.description
    }
    if len(shard_sizes) == 1:
        # A shard group smaller than the world is laid inside a node by those who set it.
        return _regular(shard_sizes.pop(), "groups", world)
    return Topology(gpus_per_node=None, source="", node_of={})


def _regular(per_node: int, source: str, world: range) -> Topology:
    return Topology(gpus_per_node=per_node, source=source, node_of={rank: rank // per_node for rank in world})
