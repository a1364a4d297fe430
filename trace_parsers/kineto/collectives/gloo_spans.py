"""Collectives as gloo's worker threads ran them, explained by the operators that issued them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.trace_parsers.kineto.collectives.gloo_groups import groups_of_threads
from paro_advise.trace_parsers.kineto.collectives.host_calls import NO_ARGS, host_calls, rows_of_names
from paro_advise.trace_parsers.kineto.collectives.rows import CollectiveRows
from paro_advise.trace_parsers.kineto.gloo import GlooCall, GlooPair, GlooSpan, pair_gloo, total_elements
from paro_advise.trace_parsers.kineto.host_rows import NOWHERE, owners_at
from paro_advise.trace_parsers.rank_lists import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.kineto.collectives.runtime_annotations import OwnCalls
    from paro_advise.trace_parsers.kineto.columns import HostColumns
    from paro_advise.trace_parsers.kineto.events import CommArgs
    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.kineto.phases import PhaseClock
    from paro_advise.trace_parsers.tables import ProcessGroup

_POINT_TO_POINT = ("gloo:send", "gloo:recv", "gloo:recvAnySource", "c10d::send", "c10d::recv_")


def gloo_spans(raw: HostColumns, origin_us: float, own: OwnCalls) -> tuple[list[GlooSpan], set[int]]:
    """Return gloo's spans by start, and the threads (codes) that run collectives.

    What our runtime's collectives send point to point is part of them and left out.
    """
    names = raw.names.values_in_order()
    threads = raw.tids.values_in_order()
    spans = []
    workers: set[int] = set()
    described = dict(raw.comm)
    for row in rows_of_names(raw, "gloo:"):
        name, args = names[raw.name[row]], described.get(row, NO_ARGS)
        begin = raw.start[row] - origin_us
        if not (name in _POINT_TO_POINT and own.covers(begin)):
            spans.append(_gloo_span(name, begin, raw.duration[row], threads[raw.tid[row]], args))
            if name not in _POINT_TO_POINT:
                workers.add(raw.tid[row])
    spans.sort(key=lambda span: span.start_us)
    return spans, workers


def _gloo_span(name: str, begin_us: float, duration_us: float, thread: object, args: CommArgs) -> GlooSpan:
    types = args.input_type if isinstance(args.input_type, list) else []
    dtype = next((item for item in types if isinstance(item, str) and item), "")
    return GlooSpan(
        start_us=begin_us,
        end_us=begin_us + max(0.0, duration_us),
        thread=thread if isinstance(thread, int) else -1,
        name=name,
        dims=args.input_dims,
        dtype=dtype.removeprefix("TensorList[").rstrip("]"),
    )


def gloo_calls(raw: HostColumns, origin_us: float, own: OwnCalls) -> list[GlooCall]:
    """Return the ``c10d::`` operators by start, without those inside our runtime's collectives."""
    calls = [
        GlooCall(start_us=call.start_us, tid=call.tid, name=call.name, dims=call.args.input_dims)
        for call in host_calls(raw, origin_us)
        if call.name.startswith("c10d::") and not (call.name in _POINT_TO_POINT and own.covers(call.start_us))
    ]
    return sorted(calls, key=lambda call: call.start_us)


def gloo_collectives(
    calls: Sequence[GlooCall],
    spans: Sequence[GlooSpan],
    rows: HostRows,
    clock: PhaseClock,
    groups: Sequence[ProcessGroup],
) -> tuple[CollectiveRows, int, int]:
    """Build rows from gloo spans.

    Returns:
        The rows, the number of spans without a call, and of calls without a span.
    """
    pairs = pair_gloo(calls, spans)
    owners = owners_at(rows, [(pair.call.start_us, pair.call.tid) if pair.call else NOWHERE for pair in pairs])
    group_of = groups_of_threads(pairs, owners, groups)
    # Every collective of a group repeats its text.
    text_of = {thread: ranks_text(group.ranks) for thread, group in group_of.items()}
    out = CollectiveRows()
    for pair, owner in zip(pairs, owners, strict=True):
        thread = pair.span.thread
        _add_pair(out, pair, group_of.get(thread), text_of.get(thread, ""), owner, clock)
    unpaired = sum(pair.call is None for pair in pairs)
    return out, unpaired, len(calls) - (len(pairs) - unpaired)


def _add_pair(
    out: CollectiveRows, pair: GlooPair, group: ProcessGroup | None, ranks: str, owner: str, clock: PhaseClock
) -> None:
    span, call = pair.span, pair.call
    size = pair.group_size or (group.size if group else None)
    out.add(
        start_us=span.start_us,
        end_us=span.end_us,
        issue_us=call.start_us if call else None,
        issue_tid=call.tid if call else None,
        op=pair.op.value,
        bytes=_pair_bytes(pair, size),
        dtype=span.dtype,
        group_size=size,
        group_name=group.name if group else "",
        group_desc=group.description if group else "",
        group_ranks=ranks,
        stream=span.thread,
        name=span.name,
        host_op=call.name if call else "",
        owner=owner,
        phase=clock.phase(call.start_us, pair.op) if call else "",
        micro_batch=clock.micro_batch(call.start_us, pair.op) if call else None,
    )


def _pair_bytes(pair: GlooPair, group_size: int | None) -> int | None:
    """Return the bytes of the full buffer; a gather's worker sees one rank's share of it."""
    element = dtype_bytes(pair.span.dtype) if pair.span.dtype else None
    nelems = pair.nelems
    if nelems is None and group_size and pair.op == Op.ALL_GATHER:
        share = total_elements(pair.span.dims)
        nelems = share * group_size if share is not None else None
    return nelems * element if nelems is not None and element else None
