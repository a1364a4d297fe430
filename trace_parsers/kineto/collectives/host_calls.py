"""Host calls that issue collectives: ``record_param_comms`` rows and ``c10d::`` operators."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.kineto.columns import HostColumns
    from paro_advise.trace_parsers.kineto.events import CommArgs

CALL_NAMES = ("record_param_comms", "paro_param_comms", "c10d::")
_COMMS_ROWS = ("record_param_comms", "paro_param_comms")
_NUM_NESTED = 3  # calls; how many of those begun last may enclose a launch; c10d in record_param_comms in a c10d row


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A host row with arguments: ``record_param_comms`` or a ``c10d::`` operator."""

    start_us: float
    end_us: float
    tid: int
    name: str
    external: int
    args: CommArgs


def host_calls(raw: HostColumns, origin_us: float) -> list[HostCall]:
    """Return the calls of collectives among host rows, in order of the file; times from ``origin_us``."""
    names = raw.names.values_in_order()
    calls = []
    for row, args in raw.comm:
        name = names[raw.name[row]]
        if name.startswith((*CALL_NAMES, "nccl:")):
            begin = raw.start[row] - origin_us
            call = HostCall(
                start_us=begin,
                end_us=begin + max(0.0, raw.duration[row]),
                tid=raw.tid[row],
                name=name,
                external=raw.external[row],
                args=args,
            )
            calls.append(call)
    return calls


def calls_by_external(calls: Sequence[HostCall]) -> dict[int, HostCall]:
    """Return the call of each external id.

    ``record_param_comms`` carries the arguments; a plain c10d row only stands in for it.
    """
    out: dict[int, HostCall] = {}
    for call in calls:
        if call.external >= 0 and (call.name in _COMMS_ROWS or call.external not in out):
            out[call.external] = call
    return out


def enclosing_calls(calls: Sequence[HostCall], launches: Sequence[tuple[float, int]]) -> list[HostCall | None]:
    """Return the innermost call open on the launching thread at each launch (time_us, tid).

    Older traces link a kernel to its launch only; the call around the launch carries the arguments.
    """
    by_tid: dict[int, list[HostCall]] = {}
    for call in sorted(calls, key=lambda item: item.start_us):
        by_tid.setdefault(call.tid, []).append(call)
    starts = {tid: [call.start_us for call in group] for tid, group in by_tid.items()}
    out: list[HostCall | None] = []
    for time, tid in launches:
        group = by_tid.get(tid, [])
        place = bisect_right(starts.get(tid, []), time) if time == time else 0  # NaN when unknown
        nearest = group[max(0, place - _NUM_NESTED) : place]
        out.append(next((call for call in reversed(nearest) if call.end_us >= time), None))
    return out
