"""Which process group each of gloo's worker threads serves (docs/traces.md, gloo).

gloo gives every group its own pair of worker threads, made one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from paro_advise.core.collective import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.kineto.gloo import GlooPair
    from paro_advise.trace_parsers.tables import ProcessGroup

_REPLICA = "replica"
# A size, _REPLICA or None for every other group; and whether only groups count that are not the default one.
_Key: TypeAlias = tuple[int | str | None, bool]


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
    candidates = _Candidates(list(distinct.values()))
    chosen = {number: candidates.choose(pool) for number, pool in pools.items()}
    return {thread: group for thread, number in pool_of.items() if (group := chosen[number]) is not None}


class _Candidates:
    """The groups that pools may serve, by what pools reveal: a size, being a replica, or nothing."""

    def __init__(self, groups: Sequence[ProcessGroup]) -> None:
        self._groups = groups
        self._keys = [self._keys_of(group) for group in groups]
        self._all: dict[_Key, dict[int, None]] = {}
        for number, keys in enumerate(self._keys):
            for key in keys:
                self._all.setdefault(key, {})[number] = None
        self._free = {key: dict(numbers) for key, numbers in self._all.items()}

    @staticmethod
    def _keys_of(group: ProcessGroup) -> list[_Key]:
        kinds = (_REPLICA,) if "replicate" in group.description else (group.size, None)
        is_specific = group.description != "default_pg"
        return [(kind, specific) for kind in kinds for specific in (False, is_specific)]

    def choose(self, pool: _Pool) -> ProcessGroup | None:
        """Return the only group that a pool may serve, of several that which no other pool took; None if none is."""
        if len(pool.sizes) > 1 and not pool.is_replica:
            return None
        kind = _REPLICA if pool.is_replica else next(iter(pool.sizes), None)
        fitting = self._all.get((kind, False), {})
        if len(fitting) > 1:
            among = self._free if self._free[kind, False] else self._all
            specific = among.get((kind, True)) if pool.sizes else None
            fitting = specific or among[kind, False]
        if len(fitting) != 1:
            return None
        (number,) = fitting
        for key in self._keys[number]:
            self._free[key].pop(number, None)
        return self._groups[number]


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
