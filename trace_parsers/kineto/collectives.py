"""Builds the collective table of a Kineto trace: NCCL kernels and gloo spans alike."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.kineto.events import CommArgs, as_int
from paro_advise.trace_parsers.kineto.gloo import (
    GlooCall,
    GlooSpan,
    groups_of_threads,
    pair_gloo,
    total_elements,
)
from paro_advise.trace_parsers.kineto.phases import HostRows, PhaseClock, owners_at
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ProcessGroup, table_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

_INTEGERS = re.compile(r"\d+")
_COMMS_ROWS = ("record_param_comms", "paro_param_comms")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommKernel:
    """A device row that communicates."""

    start_us: float
    end_us: float
    stream: int
    name: str
    external: int
    args: CommArgs | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A host row with arguments: ``record_param_comms`` or a ``c10d::`` operator."""

    start_us: float
    end_us: float
    tid: int
    name: str
    external: int
    args: CommArgs


def group_ranks(args: CommArgs, groups: Mapping[str, ProcessGroup]) -> tuple[int, ...]:
    """Return the global ranks of a collective's group, () when they cannot be known.

    Kineto cuts the list at 30 entries; then the group's configuration or start and stride tell.
    """
    size = as_int(args.group_size)
    text = str(args.group_ranks or "")
    listed = tuple(int(number) for number in _INTEGERS.findall(text[:100_000]) if len(number) < 10)
    if listed and "..." not in text and (size is None or len(listed) == size):
        return listed
    known = groups.get(str(args.group_name))
    if known and known.ranks and (size is None or known.size == size):
        return known.ranks
    start, stride = as_int(args.rank_start), as_int(args.rank_stride)
    if start is not None and stride is not None and size is not None and 0 < size <= 1 << 20 and stride > 0:
        return tuple(range(start, start + stride * size, stride))
    return ()


class _GroupTexts:
    """The global ranks of groups as text; the same few groups come again and again."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = groups
        self._known: dict[tuple[str, ...], str] = {}

    def of(self, args: CommArgs) -> str:
        """Return the ranks of a collective's group, comma separated, "" when unknown."""
        asked = (args.group_ranks, args.group_name, args.group_size, args.rank_start, args.rank_stride)
        key = tuple(map(str, asked))
        if key not in self._known:
            self._known[key] = ",".join(map(str, group_ranks(args, self._groups)))
        return self._known[key]


def full_bytes(op: Op, args: CommArgs) -> int | None:
    """Return the bytes of the full buffer in nccl-tests' convention, None when unknown."""
    inputs, outputs = as_int(args.in_nelems), as_int(args.out_nelems)
    size = dtype_bytes(str(args.dtype)) if args.dtype else None
    if size is None or (inputs is None and outputs is None):
        return None
    if op in (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.SEND, Op.RECV, Op.SEND_RECV, Op.GATHER, Op.SCATTER):
        elements = max(inputs or 0, outputs or 0)
    else:
        elements = inputs if inputs else (outputs or 0)
    return elements * size if 0 <= elements < 1 << 56 else None


class CollectiveRows:
    """Collects rows of COLLECTIVE_COLUMNS."""

    def __init__(self) -> None:
        self._data: dict[str, list[Any]] = {name: [] for name in COLLECTIVE_COLUMNS}

    def add(self, **row: Any) -> None:
        """Append one row; missing columns are null, text columns empty."""
        for name, kind in COLLECTIVE_COLUMNS.items():
            self._data[name].append(row.get(name, "" if kind == "str" else None))

    def table(self) -> pl.DataFrame:
        """Return the rows sorted by start, the untimed ones last in order of arrival."""
        return table_of(COLLECTIVE_COLUMNS, self._data).sort("start_us", nulls_last=True, maintain_order=True)


def kernel_collectives(
    kernels: Sequence[CommKernel],
    launched: Sequence[tuple[float, int]],
    calls: Sequence[HostCall],
    rows: HostRows,
    clock: PhaseClock,
    groups: Mapping[str, ProcessGroup],
) -> CollectiveRows:
    """Build rows from NCCL-like kernels and the host calls that launched them.

    Args:
        kernels: by start.
        launched: each kernel's launch as (time_us, tid), (NaN, -1) when unknown.
        calls: host rows of collectives, by which kernels are explained.
        rows: all host rows.
        clock: tells phases.
        groups: process groups by name.
    """
    by_external: dict[int, HostCall] = {}
    for known in calls:
        # `record_param_comms` carries the arguments; a plain c10d row only stands in for it.
        if known.external >= 0 and (known.name in _COMMS_ROWS or known.external not in by_external):
            by_external[known.external] = known
    around = _enclosing(calls, launched)
    issuers = [by_external.get(kernel.external) or found for kernel, found in zip(kernels, around, strict=True)]
    owners = owners_at(rows, [(call.start_us, call.tid) if call else (-1.0, -1) for call in issuers])
    out = CollectiveRows()
    texts = _GroupTexts(groups)
    described: set[int] = set()
    for kernel, call, owner in zip(kernels, issuers, owners, strict=True):
        args = kernel.args or (call.args if call else CommArgs())
        named = [
            str(args.collective or ""),
            call.name if call and call.name.startswith("nccl:") else "",
            kernel.name,
        ]
        op = next((op for op in map(op_of_name, named) if op != Op.UNKNOWN), Op.UNKNOWN)
        # Several kernels of one call share its bytes: only the first one counts them.
        repeated = kernel.external >= 0 and kernel.external in described
        if args.collective is not None and kernel.external >= 0:
            described.add(kernel.external)
        size = as_int(args.group_size)
        issue = call.start_us if call else None
        out.add(
            start_us=kernel.start_us,
            end_us=kernel.end_us,
            issue_us=issue,
            issue_tid=call.tid if call else None,
            op=op.value,
            bytes=None if repeated else (full_bytes(op, args) or _bytes_of_shapes(args, op)),
            dtype=str(args.dtype or _dtype_of(args)),
            group_size=size if size and 0 < size < 1 << 24 else None,
            group_name=str(args.group_name or ""),
            group_desc=str(args.group_desc or ""),
            group_ranks=texts.of(args),
            seq=as_int(args.seq),
            stream=kernel.stream,
            name=kernel.name,
            host_op=_host_op(owner, call.name if call else ""),
            owner=owner,
            phase=clock.phase(issue) if issue is not None else "",
            micro_batch=clock.micro_batch(issue) if issue is not None else None,
        )
    return out


def _enclosing(calls: Sequence[HostCall], launched: Sequence[tuple[float, int]]) -> list[HostCall | None]:
    """Return the innermost call open on the launching thread at each launch.

    Older traces link a kernel to its launch only; the call around the launch tells the rest.
    """
    by_tid: dict[int, list[HostCall]] = {}
    for call in sorted(calls, key=lambda item: item.start_us):
        by_tid.setdefault(call.tid, []).append(call)
    starts = {tid: [call.start_us for call in group] for tid, group in by_tid.items()}
    out: list[HostCall | None] = []
    for time, tid in launched:
        group = by_tid.get(tid, [])
        place = bisect_right(starts.get(tid, []), time) if time == time else 0
        nearest = group[max(0, place - 3) : place]
        out.append(next((call for call in reversed(nearest) if call.end_us >= time), None))
    return out


def _dtype_of(args: CommArgs) -> str:
    types = args.input_type if isinstance(args.input_type, list) else []
    return next((item for item in types if isinstance(item, str) and dtype_bytes(item)), "")


def _bytes_of_shapes(args: CommArgs, op: Op) -> int | None:
    """Return the bytes that the recorded input shapes tell; a gather's output they do not."""
    if op in (Op.ALL_GATHER, Op.UNKNOWN) or not isinstance(args.input_dims, list) or not args.input_dims:
        return None
    elements, size = total_elements(args.input_dims[0]), dtype_bytes(_dtype_of(args) or "?")
    return elements * size if elements and size else None


def _host_op(owner: str, fallback: str) -> str:
    operators = [part for part in owner.split(" > ") if part.startswith("c10d::")]
    return operators[-1] if operators else (fallback if fallback.startswith("c10d::") else "")


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
    owners = owners_at(rows, [(pair.call.start_us, pair.call.tid) if pair.call else (-1.0, -1) for pair in pairs])
    group_of = groups_of_threads(pairs, owners, groups)
    out = CollectiveRows()
    for pair, owner in zip(pairs, owners, strict=True):
        group = group_of.get(pair.span.thread)
        size = pair.group_size or (group.size if group else None)
        element = dtype_bytes(pair.span.dtype) if pair.span.dtype else None
        call = pair.call
        nelems = pair.nelems
        if nelems is None and size and pair.op == Op.ALL_GATHER:
            worker = total_elements(pair.span.dims)
            nelems = worker * size if worker is not None else None
        out.add(
            start_us=pair.span.start_us,
            end_us=pair.span.end_us,
            issue_us=call.start_us if call else None,
            issue_tid=call.tid if call else None,
            op=pair.op.value,
            bytes=nelems * element if nelems is not None and element else None,
            dtype=pair.span.dtype,
            group_size=size,
            group_name=group.name if group else "",
            group_desc=group.description if group else "",
            group_ranks=",".join(map(str, group.ranks)) if group else "",
            stream=pair.span.thread,
            name=pair.span.name,
            host_op=call.name if call else "",
            owner=owner,
            phase=clock.phase(call.start_us) if call else "",
            micro_batch=clock.micro_batch(call.start_us) if call else None,
        )
    unpaired = sum(pair.call is None for pair in pairs)
    return out, unpaired, len(calls) - (len(pairs) - unpaired)
