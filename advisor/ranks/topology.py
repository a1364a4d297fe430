"""Which ranks share a node, and how that is known."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.core.span import GroupSpan
from paro_advise.errors import UsageError
from paro_advise.trace_parsers.rank_lists import ranks_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.advisor.ranks.run import Run
    from paro_advise.trace_parsers.tables import SourceHeader

_TELLS = {"hosts": "by the names of hosts", "metadata": "by the launcher or the devices of each rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of a run.

    Attributes:
        gpus_per_node: ranks on one node, None when unknown.
        source: "flag", "hosts", "metadata", "groups" or "" (unknown).
        node_of: rank to node index for every rank of the world that is known.
        ranks_follow: ranks of a node follow each other, as groups of ranks in a row need it; None when nothing tells.
        overruled: what the inputs tell and the user says otherwise, "" for nothing.
    """

    gpus_per_node: int | None
    source: str
    node_of: Mapping[int, int]
    ranks_follow: bool | None = None
    overruled: str = ""


def find_topology(run: Run, gpus_per_node: int | None = None, launched_per_node: int | None = None) -> Topology:
    """Find nodes from, in this order: the user, the launcher, host names, device lists, group sizes, logs.

    Args:
        run: all ranks.
        gpus_per_node: ranks per node as the user says, None to infer. Fewer ranks than that lie on one node.
        launched_per_node: ranks per node as the launcher said to a capture, None when it did not.

    Raises:
        UsageError: the world is larger than the user's number and no multiple of it.
    """
    world = range(run.world_size or (max((rank for rank, _ in run.timed), default=-1) + 1))
    if gpus_per_node:
        if len(world) > gpus_per_node and len(world) % gpus_per_node:
            raise UsageError(f"--gpus-per-node must divide the {len(world)} ranks of the run, got {gpus_per_node}")
        stated = _place_ranks(min(gpus_per_node, len(world) or gpus_per_node), "flag", run, world)
        told = find_topology(run, None, launched_per_node)
        is_other = told.gpus_per_node not in (None, stated.gpus_per_node) and told.source in _TELLS
        return replace(stated, overruled=f"{told.gpus_per_node}, {_TELLS[told.source]}") if is_other else stated
    if launched_per_node and (run.world_size or launched_per_node) % launched_per_node == 0:
        return _place_ranks(launched_per_node, "metadata", run, world)
    found = _of_traces(run, world)
    found = found if found.gpus_per_node else _of_logs(run, world) or found
    return found if run.world_size else replace(found, ranks_follow=None)


def _hosts(run: Run) -> dict[int, str]:
    """Return the host of each rank with a trace, {} when not all traces name theirs."""
    hosts = {rank: item.header.host for rank, item in run.timed if item.header.host}
    return hosts if len(hosts) == len(run.timed) else {}


def _are_ranks_named(run: Run) -> bool:
    """Tell whether traces say which rank they are of; others are numbered as they come."""
    return all(item.header.rank is not None for _, item in run.timed)


def _number_nodes(hosts: Mapping[int, str]) -> dict[int, int]:
    """Return the node of each rank, numbered by its lowest rank."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts.values()))}
    return {rank: numbers[name] for rank, name in hosts.items()}


def _place_ranks(per_node: int, source: str, run: Run, world: range) -> Topology:
    """Return nodes of so many ranks: those that follow each other, unless the hosts say otherwise.

    Hosts may be the names of containers, several to a node, and of machines of one name: they overrule only where
    they are nodes of so many ranks, all of them, or dealt out in turn as far as they are known.
    """
    nodes, hosts = len(world) // per_node, _hosts(run) if _are_ranks_named(run) else {}
    if nodes <= 1:
        return _regular(per_node, source, world)
    in_turn = {rank: rank % nodes for rank in world}
    is_named = len(set(hosts.values())) > 1
    if not is_named or not _splits(hosts, per_node):
        follow = is_named and not _agree(hosts, in_turn)
        return replace(_regular(per_node, source, world), ranks_follow=follow or None)
    if len(set(hosts.values())) < len(hosts) and _agree(hosts, in_turn):
        return Topology(gpus_per_node=per_node, source=source, node_of=in_turn, ranks_follow=False)
    if len(hosts) == len(world) and set(Counter(hosts.values()).values()) == {per_node}:
        return Topology(gpus_per_node=per_node, source=source, node_of=_number_nodes(hosts), ranks_follow=False)
    return _regular(per_node, source, world)


def _splits(hosts: Mapping[int, str], per_node: int) -> bool:
    """Tell whether ranks of one node, were they in a row, are on several hosts."""
    return len({(rank // per_node, host) for rank, host in hosts.items()}) > len({rank // per_node for rank in hosts})


def _agree(hosts: Mapping[int, str], node_of: Mapping[int, int]) -> bool:
    """Tell whether ranks share a host where they share a node, and only there."""
    pairs = {(node_of[rank], host) for rank, host in hosts.items()}
    return len(pairs) == len({node for node, _ in pairs}) == len({host for _, host in pairs})


def _of_traces(run: Run, world: range) -> Topology:
    hosts = _hosts(run)
    is_whole = len(run.timed) == len(world)
    if not hosts or (len(set(hosts.values())) == 1 and not is_whole):
        return _of_devices(run, world)
    node_of = _number_nodes(hosts)
    by_hosts = Topology(
        gpus_per_node=max(Counter(node_of.values()).values()) if is_whole else None,
        source="hosts",
        node_of=node_of,
        ranks_follow=_follow(hosts, is_whole=is_whole) if _are_ranks_named(run) else None,
    )
    return by_hosts if is_whole else _of_devices_and_hosts(run, world, hosts) or by_hosts


def _of_devices_and_hosts(run: Run, world: range, hosts: Mapping[int, str]) -> Topology | None:
    """Return nodes of as many ranks as devices or groups tell, where they are those of the hosts; None elsewhere.

    Hosts of some ranks do not tell how many ranks a node has, and may be the names of containers.
    """
    told = _of_devices(run, world)
    per_node = told.gpus_per_node
    if not per_node or not run.world_size or run.world_size % per_node or not _are_ranks_named(run):
        return None
    found = _place_ranks(per_node, told.source, run, world)
    return found if _agree(hosts, found.node_of) else None


def _of_devices(run: Run, world: range) -> Topology:
    """Return nodes of so many ranks as a node has devices in use, or as its shard groups have."""
    headers = [(rank, item.header) for rank, item in run.timed]
    counts = {header.gpus_per_node for _, header in headers if header.gpus_per_node}
    if len(counts) == 1 and (count := counts.pop()) and (count > 1 or run.world_size == 1):
        count = _used_per_node(headers, count, len(world)) if _are_ranks_named(run) else count
        return _regular(min(count, len(world)) if len(world) else count, "metadata", world)
    shard_sizes = {
        group.size
        for _, header in headers
        for group in header.groups
        if group.size < len(world) and "shard" in group.description
    }
    if len(shard_sizes) == 1:
        # A shard group smaller than the world is laid inside a node by those who set it.
        return _regular(shard_sizes.pop(), "groups", world)
    return Topology(gpus_per_node=None, source="", node_of={})


def _used_per_node(headers: Sequence[tuple[int, SourceHeader]], num_devices: int, world_size: int) -> int:
    """Return how many of a node's devices have ranks: fewer than there are, where indexes begin anew before.

    Where several numbers explain the indexes of the ranks with a trace, the largest. Ranks that see one device each all
    call it 0, which tells nothing.
    """
    index_of = {rank: header.device_index for rank, header in headers}
    if None in index_of.values() or not any(index_of.values()):
        return num_devices
    fits = [
        size
        for size in range(2, num_devices + 1)
        if world_size % size == 0 and all(index == rank % size for rank, index in index_of.items())
    ]
    return max(fits, default=num_devices)


def _follow(hosts: Mapping[int, str], *, is_whole: bool) -> bool | None:
    """Tell whether no host comes back after another one; of a part of the ranks, None where none does."""
    runs = [host for host, _ in itertools.groupby(hosts[rank] for rank in sorted(hosts))]
    return False if len(runs) > len(set(runs)) else True if is_whole else None


def _of_logs(run: Run, world: range) -> Topology | None:
    """Return what NCCL's own logs say about nodes, None when they do not."""
    for item in run.untimed:
        header = item.header
        per_node = header.gpus_per_node
        if not per_node and header.num_nodes and header.world_size:
            per_node = header.world_size // header.num_nodes
        if per_node:
            return _place_ranks(per_node, "metadata", run, world or range(per_node))
    return None


def _regular(per_node: int, source: str, world: range) -> Topology:
    node_of = {rank: rank // per_node for rank in world}
    return Topology(
        gpus_per_node=per_node, source=source, node_of=node_of, ranks_follow=True if len(world) <= per_node else None
    )


def span_columns(table: pl.DataFrame, topology: Topology, world_size: int | None) -> list[pl.Series]:
    """Return each collective's span: intra, inter, mixed or "" when unknown, and on how many nodes its ranks lie."""
    import polars as pl

    kind = ["group_ranks", "group_size", "way"]
    keys = table.select(kind).unique(maintain_order=True)
    spans: list[str] = []
    counts: list[int | None] = []
    for text, size, way in keys.iter_rows():
        ranks = [int(rank) for rank in way.split(">")] if way else ranks_in(text)
        if not ranks and size and size == world_size:
            ranks = list(range(size))
        nodes = [topology.node_of.get(rank) for rank in ranks]
        spans.append(_span(nodes))
        counts.append(len(set(nodes)) if spans[-1] else None)
    keys = keys.with_columns(pl.Series("span", spans, dtype=pl.String), pl.Series("num_nodes", counts, dtype=pl.Int64))
    joined = table.select(kind).join(keys, on=kind, how="left", nulls_equal=True, maintain_order="left")
    return [joined["span"].fill_null(""), joined["num_nodes"]]


def _span(nodes: Sequence[int | None]) -> str:
    """Return where the traffic of a group with ranks on these nodes runs."""
    if not nodes or None in nodes:
        return ""
    distinct = len(set(nodes))
    if distinct == 1:
        return GroupSpan.INTRA
    return GroupSpan.INTER if distinct == len(nodes) else GroupSpan.MIXED
