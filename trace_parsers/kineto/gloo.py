"""Pairs gloo's worker-thread spans with the ``c10d::`` operators that issued them.

gloo leaves no metadata and no correlation id: a span carries the tensor's shape, an operator the
shapes of its inputs. gloo's reduce-scatter runs as an all-reduce of the whole input and is shown
as what it is for: the operator names the collective, the span times it (reference: traces,
runtime section 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.kernel_kinds import op_of_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.tables import ProcessGroup

_SPAN_OPS = {
    Op.REDUCE_SCATTER: (Op.ALL_REDUCE, Op.REDUCE_SCATTER),
    Op.RECV: (Op.RECV,),
}
# A span may be stamped a little before its operator's row, which is opened by the profiler later.
_EARLY_US = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooCall:
    """An issuing operator: ``c10d::*`` with the shapes it recorded."""

    start_us: float
    tid: int
    name: str
    dims: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooSpan:
    """A ``gloo:*`` span on a worker thread."""

    start_us: float
    end_us: float
    thread: int
    name: str
    dims: Any
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooPair:
    """A span and the call it belongs to (None when no call fits)."""

    span: GlooSpan
    call: GlooCall | None
    op: Op
    nelems: int | None  # full buffer, nccl-tests' convention
    group_size: int | None


def total_elements(dims: Any) -> int | None:
    """Return the elements of a shape, a list of shapes, or a list of lists of shapes."""
    if not isinstance(dims, list):
        return None
    if all(isinstance(item, int) for item in dims):
        return prod(dims) if all(0 <= item < 1 << 48 for item in dims) else None
    parts = [total_elements(item) for item in dims]
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


def _call_shapes(call: GlooCall) -> tuple[int | None, int | None]:
    """Return (elements that the worker sees, group size) as far as the shapes tell."""
    op = op_of_name(call.name)
    dims = call.dims if isinstance(call.dims, list) else []
    if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER) and len(dims) >= 2:
        # No profiler records the shapes of a list of lists: what a gather gives, what a scatter takes.
        if dims[0] == [] and op == Op.ALL_GATHER:
            return total_elements(dims[1]), None
        if dims[1] == [] and op == Op.REDUCE_SCATTER:
            return None, None
        first, second = total_elements(dims[0]), total_elements(dims[1])
        if first and second:
            large, small = max(first, second), min(first, second)
            size = large // small if large % small == 0 else None
            return (small if op == Op.ALL_GATHER else large), size
        return None, None
    return (total_elements(dims[0]) if dims else None), None


def pair_gloo(calls: Sequence[GlooCall], spans: Sequence[GlooSpan]) -> list[GlooPair]:
    """Pair spans and calls: same kind, same elements when both say so, in order of time.

    Args:
        calls: by start.
        spans: by start.

    Returns:
        One pair per span, by span start.
    """
    waiting: dict[Op, list[int]] = {}
    span_ops = [op_of_name(span.name) for span in spans]
    span_sizes = [total_elements(span.dims) for span in spans]
    for index, op in enumerate(span_ops):
        waiting.setdefault(op, []).append(index)
    partner: dict[int, GlooCall] = {}
    for call in calls:
        op = op_of_name(call.name)
        size, _ = _call_shapes(call)
        best: int | None = None
        for kind in _SPAN_OPS.get(op, (op,)):
            for index in waiting.get(kind, ()):
                if spans[index].start_us < call.start_us - _EARLY_US:
                    continue
                if size is not None and span_sizes[index] is not None and span_sizes[index] != size:
                    continue
                if best is None or spans[index].start_us < spans[best].start_us:
                    best = index
                break
        if best is not None:
            partner[best] = call
            waiting[span_ops[best]].remove(best)
    return [_pair(span, partner.get(index), span_ops[index]) for index, span in enumerate(spans)]


def _pair(span: GlooSpan, call: GlooCall | None, span_op: Op) -> GlooPair:
    elements = total_elements(span.dims)
    if call is None:
        return GlooPair(span=span, call=None, op=span_op, nelems=elements, group_size=None)
    op = op_of_name(call.name)
    worker, group_size = _call_shapes(call)
    nelems = worker if worker is not None else elements
    if op == Op.ALL_GATHER and nelems is not None:
        nelems = nelems * group_size if group_size else None
    return GlooPair(span=span, call=call, op=op, nelems=nelems, group_size=group_size)


def groups_of_threads(
    pairs: Sequence[GlooPair], owners: Sequence[str], groups: Sequence[ProcessGroup]
) -> dict[int, ProcessGroup]:
    """Tell which process group each gloo worker thread serves.

    gloo gives every group its own pair of worker threads, made one after the other. A gather or
    scatter tells the group's size; an all-reduce inside FSDP's reduction belongs to the replica
    dimension; what is left goes to the one group left.
    """
    distinct = {group.ranks: group for group in reversed(groups) if group.size > 1}
    if not distinct:
        return {}
    threads = sorted({pair.span.thread for pair in pairs})
    if len(distinct) == 1:
        only = next(iter(distinct.values()))
        return dict.fromkeys(threads, only)
    pool_of = _pools(threads)
    sizes: dict[int, set[int]] = {}
    replicas: set[int] = set()
    for pair, owner in zip(pairs, owners, strict=True):
        pool = pool_of[pair.span.thread]
        if pair.group_size:
            sizes.setdefault(pool, set()).add(pair.group_size)
        if pair.op == Op.ALL_REDUCE and "post_backward_reduce" in owner:
            replicas.add(pool)
    chosen: dict[int, ProcessGroup] = {}
    for pool in sorted(set(pool_of.values())):
        size = sizes.get(pool, set())
        fitting = [
            group
            for group in distinct.values()
            if ((not size or {group.size} == size) and ("replicate" in group.description) == (pool in replicas))
            or (pool in replicas and "replicate" in group.description)
        ]
        if len(fitting) > 1:
            taken = {group.ranks for group in chosen.values()}
            fitting = [group for group in fitting if group.ranks not in taken] or fitting
            specific = [group for group in fitting if group.description != "default_pg"]
            fitting = specific if size and specific else fitting
        if len(fitting) == 1:
            chosen[pool] = fitting[0]
    return {thread: chosen[pool] for thread, pool in pool_of.items() if pool in chosen}


def _pools(threads: Sequence[int]) -> dict[int, int]:
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
