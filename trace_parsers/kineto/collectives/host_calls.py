"""Host calls that issue collectives: ``record_param_comms`` rows and ``c10d::`` operators."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.kineto.collectives.sizes import buffer_bytes
from paro_advise.trace_parsers.kineto.events import CommArgs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.kineto.columns import HostColumns

CALL_NAMES = ("record_param_comms", "paro_param_comms", "c10d::")
COMMS_ROWS = ("record_param_comms", "paro_param_comms")
NO_ARGS = CommArgs()
_NUM_NESTED = 3  # calls; how many of those begun last may enclose a launch; c10d in record_param_comms in a c10d row


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A host row that issues collectives: ``record_param_comms`` or a ``c10d::`` operator.

    Attributes:
        args: as recorded; traces before torch 2.1, or without shapes, leave them empty.
    """

    start_us: float
    end_us: float
    tid: int
    name: str
    external: int
    args: CommArgs

    @property
    def tells(self) -> bool:
        """Tell whether it says what it sends."""
        return self.args.collective is not None or self.args.input_dims is not None


def rows_of_names(raw: HostColumns, beginnings: str | tuple[str, ...]) -> list[int]:
    """Return the places of host rows whose names begin so, in order of the file."""
    import numpy as np

    names = raw.names.values_in_order()
    fits = np.fromiter((name.startswith(beginnings) for name in names), dtype=bool, count=len(names))
    return np.flatnonzero(fits[np.frombuffer(raw.name, dtype=np.uint32)]).tolist() if names else []


def host_calls(raw: HostColumns, origin_us: float) -> list[HostCall]:
    """Return the calls of collectives among host rows, in order of the file; times from ``origin_us``."""
    names = raw.names.values_in_order()
    described = dict(raw.comm)
    plain = rows_of_names(raw, CALL_NAMES)
    rows = sorted({*plain, *(row for row in described if names[raw.name[row]].startswith((*CALL_NAMES, "nccl:")))})
    calls = []
    for row in rows:
        begin = raw.start[row] - origin_us
        calls.append(
            HostCall(
                start_us=begin,
                end_us=begin + max(0.0, raw.duration[row]),
                tid=raw.tid[row],
                name=names[raw.name[row]],
                external=raw.external[row],
                args=described.get(row, NO_ARGS),
            )
        )
    return calls


def calls_by_external(calls: Sequence[HostCall]) -> dict[int, HostCall]:
    """Return the call of each external id.

    ``record_param_comms`` carries the arguments; a plain c10d row only stands in for it.
    """
    out: dict[int, HostCall] = {}
    for call in calls:
        known = out.get(call.external)
        is_better = known is None or (call.tells, call.name in COMMS_ROWS) >= (known.tells, known.name in COMMS_ROWS)
        if call.external >= 0 and is_better:
            out[call.external] = call
    return out


def enclosing_calls(calls: Sequence[HostCall], launches: Sequence[tuple[float, int]]) -> list[HostCall | None]:
    """Return the call open on the launching thread at each launch (time_us, tid), the innermost that tells its size.

    Older traces link a kernel to its launch only; the call around the launch carries the arguments. Of a gather the
    ``nccl:`` row shows what a rank gives, the ``c10d::`` row around it the whole as well (torch 1.12 to 2.0).
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
        around = [call for call in reversed(nearest) if call.end_us >= time]
        telling = [call for call in around if call.tells]
        sized = (call for call in telling if buffer_bytes(op_of_name(call.name), call.args) is not None)
        out.append(next(sized, next(iter([*telling, *around]), None)))
    return out
