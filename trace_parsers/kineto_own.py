"""The spans that our own runtime leaves: ``paro_advise::all_gather`` and its like.

One row is call and duration in one and carries NCCL's arguments, so nothing has to be paired. What
HO-Ring sends inside it, point to point, is part of it.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.dtypes import dtype_bytes
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.kineto_events import as_int
from paro_advise.trace_parsers.kineto_phases import owners_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray
    from paro_advise.trace_parsers.kineto_collectives import CollectiveRows, HostCall
    from paro_advise.trace_parsers.kineto_phases import HostRows, PhaseClock

OWN_PREFIX = "paro_advise::"


class OwnCalls:
    """Collectives of our runtime in one trace.

    Attributes:
        calls: by start.
    """

    def __init__(self, calls: Iterable[HostCall]) -> None:
        self.calls = sorted(calls, key=lambda call: call.start_us)
        self._merged: list[tuple[float, float]] = []
        for call in self.calls:
            if self._merged and call.start_us <= self._merged[-1][1]:
                self._merged[-1] = (self._merged[-1][0], max(self._merged[-1][1], call.end_us))
            else:
                self._merged.append((call.start_us, call.end_us))

    def covers(self, time_us: float) -> bool:
        """Tell whether any of them is under way."""
        place = bisect_right(self._merged, (time_us, float("inf"))) - 1
        return place >= 0 and time_us <= self._merged[place][1]

    def mask(self, rows: HostRows) -> NDArray[np.bool_]:
        """Mark host rows that start inside one of them on the same thread."""
        import numpy as np

        marked = np.zeros(len(rows.start_us), dtype=bool)
        for call in self.calls:
            first, last = np.searchsorted(rows.start_us, (call.start_us, call.end_us))
            marked[first:last] |= rows.tid[first:last] == call.tid
        return marked


def add_own_collectives(out: CollectiveRows, own: OwnCalls, rows: HostRows, clock: PhaseClock) -> None:
    """Add the runtime's collectives to the table."""
    owners = owners_at(rows, [(call.start_us, call.tid) for call in own.calls])
    for call, owner in zip(own.calls, owners, strict=True):
        args = call.args
        nelems = max((as_int(args.in_nelems) or 0, as_int(args.out_nelems) or 0))
        dtype = args.dtype if isinstance(args.dtype, str) else ""
        element = dtype_bytes(dtype) if dtype else None
        ranks = args.group_ranks if isinstance(args.group_ranks, str) else ""
        members = [part.strip() for part in ranks.strip("[]").split(",") if part.strip().isdigit()]
        out.add(
            start_us=call.start_us,
            end_us=call.end_us,
            issue_us=call.start_us,
            issue_tid=call.tid,
            op=op_of_name(str(args.collective)).value,
            bytes=nelems * element if element else None,
            dtype=dtype,
            group_size=as_int(args.group_size),
            group_name=",".join(members),
            group_desc="paro_advise",
            group_ranks=",".join(members),
            stream=call.tid,
            name=call.name,
            host_op=call.name,
            owner=owner,
            phase=clock.phase(call.start_us),
            micro_batch=clock.micro_batch(call.start_us),
        )
