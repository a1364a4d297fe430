"""Which process group each of gloo's worker threads serves (docs/traces.md, gloo).

gloo gives every group its own pair of worker threads, made one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.kineto.gloo import GlooPair
    from paro_advise.trace_parsers.tables import ProcessGroup


@dataclass(slots=True)
class _Pool:
    """A pair of worker threads, with what its collectives reveal of their group."""

    sizes: set[int] = field(default_factory=set)  # ranks, by gathers and scatters
    is_replica: bool = False  # it runs all-reduces inside FSDP's reduction


def groups_of_threads(
    pairs: Sequence[GlooPair], owners: Sequence[str], groups: Sequence[ProcessGroup]
) -> dict[int, ProcessGroup]:
    """Return the process group that each gloo worker thread serves.

    A gather or scatter reveals the group's size; an all-reduce inside FSDP's reduction belongs to the
    replica dimension; what is left goes to the one group left.
    """
    distinct = {group.ranks: group for group in reversed(groups) if group.size > 1}
    if not distinct:
        return {}
    threads = sorted({pair.span.thread for pair in pairs})
    if len(distinct) == 1:
        only = next(iter(distinct.values()))
        return dict.fromkeys(threads, only)
    has_replicas = any("replicate" in group.description for group in distinct.values())
    pool_of = _pools_of_threads(threads)
    pools = {number: _Pool() for number in sorted(set(pool_of.values()))}
    for pair, owner in zip(pairs, owners, strict=True):
        pool = pools[pool_of[pair.span.thread]]
        if pair.group_size:
            pool.sizes.add(pair.group_size)
        # FSDP2's annotation, or with a replica dimension FSDP1's.
        is_reduction = "post_backward_reduce" in owner or (has_replicas and "_post_backward_hook" in owner)
        if pair.op == Op.ALL_REDUCE and is_reduction:
            pool.is_replica = True
    chosen: dict[int, ProcessGroup] = {}
    for number, pool in pools.items():
        fitting = _fitting_groups(pool, list(distinct.values()), list(chosen.values()))
        if len(fitting) == 1:
            chosen[number] = fitting[0]
    return {thread: chosen[number] for thread, number in pool_of.items() if number in chosen}


def _fitting_groups(pool: _Pool, groups: Sequence[ProcessGroup], taken: Sequence[ProcessGroup]) -> list[ProcessGroup]:
    """Return the groups that a pool may serve; of several those that no other pool took."""
    fitting = [group for group in groups if _fits(pool, group)]
    if len(fitting) <= 1:
        return fitting
    taken_ranks = {group.ranks for group in taken}
    fitting = [group for group in fitting if group.ranks not in taken_ranks] or fitting
    specific = [group for group in fitting if group.description != "default_pg"]
    return specific if pool.sizes and specific else fitting


def _fits(pool: _Pool, group: ProcessGroup) -> bool:
    is_replica_group = "replicate" in group.description
    if pool.is_replica:
        return is_replica_group
    return not is_replica_group and (not pool.sizes or {group.size} == pool.sizes)


def _pools_of_threads(threads: Sequence[int]) -> dict[int, int]:
    """Join neighbouring thread ids two by two: a group's workers are started together."""
    pools: dict[int, int] = {}
    index = 0
    while index < len(threads):
        pools[threads[index]] = index
        if index + 1 < len(threads) and threads[index + 1] - threads[index] == 1:
            pools[threads[index + 1]] = index
            index += 1
        index += 1
    return pools
