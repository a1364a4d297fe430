"""Pairs gloo's worker-thread spans with the ``c10d::`` operators that issued them.

gloo leaves no metadata and no correlation id: a span carries the tensor's shape, an operator the
shapes of its inputs. gloo's reduce-scatter runs as an all-reduce of the whole input and is shown
as what it is for: the operator names the collective, the span times it (docs/traces.md, gloo).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.constants import INT64_MAX
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.kineto.constants import EARLY_US, MAX_DIMENSION

if TYPE_CHECKING:
    from collections.abc import Sequence

_ANY_SIZE = "any"  # the key of all spans of a kind; None is that of those whose size is unknown
_NO_SPANS: deque[int] = deque()
_SPAN_OPS = {
    Op.REDUCE_SCATTER: (Op.ALL_REDUCE, Op.REDUCE_SCATTER),
    Op.RECV: (Op.RECV,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooCall:
    """An issuing operator: ``c10d::*`` with the shapes it recorded, lists in lists of elements."""

    start_us: float
    tid: int
    name: str
    dims: object


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooSpan:
    """A ``gloo:*`` span on a worker thread."""

    start_us: float
    end_us: float
    thread: int
    name: str
    dims: object
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GlooPair:
    """A span and the call it belongs to (None when no call fits).

    Attributes:
        op: the collective, by the call where there is one.
        nelems: elements of the full buffer in nccl-tests' convention, None when unknown.
        group_size: ranks, None when the shapes do not give it.
    """

    span: GlooSpan
    call: GlooCall | None
    op: Op
    nelems: int | None
    group_size: int | None


def total_elements(dims: object, max_depth: int = 3) -> int | None:
    """Return the elements of a shape, a list of shapes, or a list of lists of shapes."""
    if not isinstance(dims, list) or not max_depth:
        return None
    if all(isinstance(item, int) for item in dims):
        return _product(dims)
    parts = [total_elements(item, max_depth - 1) for item in dims]
    return None if any(part is None for part in parts) else sum(part for part in parts if part is not None)


def _product(dims: list[int]) -> int | None:
    """Return the elements of a shape, None where they are more than any tensor has."""
    elements = 1
    for dim in dims:
        elements *= dim
        if not 0 <= dim < MAX_DIMENSION or elements > INT64_MAX:
            return None
    return elements


def _call_shapes(call: GlooCall) -> tuple[int | None, int | None]:
    """Return (elements that the worker sees, group size), None where the shapes do not give them."""
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
    waiting = _WaitingSpans(spans)
    partner: dict[int, GlooCall] = {}
    for call in calls:
        size, _ = _call_shapes(call)
        index = waiting.take(op_of_name(call.name), call.start_us, size)
        if index is not None:
            partner[index] = call
    return [_pair(span, partner.get(index), waiting.ops[index]) for index, span in enumerate(spans)]


class _WaitingSpans:
    """Spans that have no call yet, by kind and size; calls must ask in order of time.

    Attributes:
        ops: the collective that each span names.
    """

    def __init__(self, spans: Sequence[GlooSpan]) -> None:
        self.ops = [op_of_name(span.name) for span in spans]
        self._spans = spans
        self._is_taken = bytearray(len(spans))
        self._queues: dict[tuple[Op, int | str | None], deque[int]] = {}
        for index, op in enumerate(self.ops):
            for size in (_ANY_SIZE, total_elements(spans[index].dims)):
                self._queues.setdefault((op, size), deque()).append(index)

    def take(self, op: Op, call_us: float, nelems: int | None) -> int | None:
        """Take away the first span that fits a call; return its place, None when none fits."""
        sizes = (_ANY_SIZE,) if nelems is None else (nelems, None)
        firsts = [self._first((kind, size), call_us) for kind in _SPAN_OPS.get(op, (op,)) for size in sizes]
        best = min((index for index in firsts if index is not None), default=None)
        if best is not None:
            self._is_taken[best] = True
        return best

    def _first(self, key: tuple[Op, int | str | None], call_us: float) -> int | None:
        queue = self._queues.get(key, _NO_SPANS)
        # What began too early for this call began too early for all that follow.
        while queue and (self._is_taken[queue[0]] or self._spans[queue[0]].start_us < call_us - EARLY_US):
            queue.popleft()
        return queue[0] if queue else None


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
