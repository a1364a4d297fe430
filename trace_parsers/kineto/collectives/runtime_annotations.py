"""The ranges that our own runtime leaves, such as ``paro_advise::all_gather Float 8->32 ranks 0:4:1``.

One row is call and duration in one and says everything in its name, so nothing has to be paired. What
HO-Ring sends inside it, point to point, is part of it (docs/traces.md, our runtime's annotations).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.dtypes import dtype_bytes
from paro_advise.errors import HostileInputError
from paro_advise.trace_parsers.kernel_kinds import op_of_name
from paro_advise.trace_parsers.kineto.constants import MAX_NAMED_RANKS, MAX_SPAN_RANKS
from paro_advise.trace_parsers.kineto.host_rows import owners_at
from paro_advise.trace_parsers.rank_lists import ranks_text
from paro_advise.trace_parsers.tables import StatedStrategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.collectives.rows import CollectiveRows
    from paro_advise.trace_parsers.kineto.columns import HostColumns
    from paro_advise.trace_parsers.kineto.host_rows import HostRows
    from paro_advise.trace_parsers.kineto.phases import PhaseClock

OWN_PREFIX = "paro_advise::"
_NUMBER, _WORD, _COUNT = r"\d{1,9}", r"\w{1,40}", r"\d{1,18}"
_COLLECTIVE = re.compile(
    rf"{OWN_PREFIX}({_WORD}) ({_WORD}) ({_COUNT})->({_COUNT}) ranks ({_NUMBER}:{_NUMBER}:{_NUMBER}|[\d,]{{1,100000}})"
)
_STATE = re.compile(rf"{OWN_PREFIX}(?:gradient|optimizer) \((.{{0,1000}})\) ({_COUNT}) ([NIG]{{3}})/(\d{{1,9}})")
# Spans of our runtime's communication threads.
_STATE_SPANS = (f"{OWN_PREFIX}gradient", f"{OWN_PREFIX}optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCollective:
    """What a name says.

    Attributes:
        op: the collective.
        dtype: type of the elements.
        nelems: elements of the full buffer.
        ranks: global ranks of the group.
    """

    op: str
    dtype: str
    nelems: int
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCall:
    """A collective of our runtime on one thread; times from the start of the trace."""

    start_us: float
    end_us: float
    tid: int
    what: OwnCollective


def own_collective(name: str) -> OwnCollective | None:
    """Return what a name says; None for any other name."""
    found = _COLLECTIVE.fullmatch(name)
    if not found:
        return None
    op, dtype, given, got, members = found.groups()
    if ":" in members:
        start, stop, stride = map(int, members.split(":"))
        if not stride or (stop - start) // stride > MAX_SPAN_RANKS:
            return None
        ranks: Sequence[int] = range(start, stop, stride)
    else:
        ranks = tuple(int(part) for part in members.split(",") if part and len(part) <= 9)
    return OwnCollective(op=op, dtype=dtype, nelems=max(int(given), int(got)), ranks=ranks)


def stated_strategy(names: Iterable[str]) -> StatedStrategy | None:
    """Return strategy, group size and trained parameters that our runtime wrote into names, None without them."""
    units: dict[str, int] = {}
    first: tuple[str, str] | None = None
    for name in names:
        if name.startswith(OWN_PREFIX) and (found := _STATE.fullmatch(name)):
            units[found[1]] = int(found[2])
            first = first or (found[3], found[4])
    if first is None:
        return None
    triple, size = first
    return StatedStrategy(
        triple=triple, group_size=int(size) if size.isdecimal() else None, parameters=sum(units.values())
    )


class OwnCalls:
    """Collectives of our runtime in one trace.

    Attributes:
        calls: by start.
    """

    def __init__(self, calls: Iterable[OwnCall]) -> None:
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


def own_calls(raw: HostColumns, origin_us: float, label: str) -> OwnCalls:
    """Return the collectives of our runtime among host rows.

    Args:
        raw: as collected.
        origin_us: start of the trace.
        label: of the trace, for the error.

    Raises:
        HostileInputError: short names stand for more ranks than memory should hold.
    """
    names = raw.names.values_in_order()
    named = {code: what for code, name in enumerate(names) if (what := own_collective(name)) is not None}
    if sum(len(what.ranks) for what in named.values()) > MAX_NAMED_RANKS:
        raise HostileInputError(
            f"the names of a trace's collectives must list at most {MAX_NAMED_RANKS:,} ranks, these list more",
            where=label,
        )
    if not named:
        return OwnCalls(())
    return OwnCalls(
        OwnCall(
            start_us=raw.start[row] - origin_us,
            end_us=raw.start[row] - origin_us + max(0.0, raw.duration[row]),
            tid=raw.tid[row],
            what=named[code],
        )
        for row, code in enumerate(raw.name)
        if code in named
    )


def state_threads(raw: HostColumns) -> set[int]:
    """Return the threads (codes) on which our runtime reduces gradients and updates optimizer states."""
    states = {code for code, name in enumerate(raw.names) if name.startswith(_STATE_SPANS)}
    if not states:
        return set()
    return {tid for tid, code in zip(raw.tid, raw.name, strict=True) if code in states}


def add_own_collectives(out: CollectiveRows, own: OwnCalls, rows: HostRows, clock: PhaseClock) -> None:
    """Add the runtime's collectives to the table."""
    owners = owners_at(rows, [(call.start_us, call.tid) for call in own.calls])
    for call, owner in zip(own.calls, owners, strict=True):
        what = call.what
        element = dtype_bytes(what.dtype)
        members = ranks_text(what.ranks)
        out.add(
            start_us=call.start_us,
            end_us=call.end_us,
            issue_us=call.start_us,
            issue_tid=call.tid,
            op=op_of_name(what.op).value,
            bytes=what.nelems * element if element else None,
            dtype=what.dtype,
            group_size=len(what.ranks),
            group_name=members,
            group_desc="paro_advise",
            group_ranks=members,
            stream=call.tid,
            name=OWN_PREFIX + what.op,
            host_op=OWN_PREFIX + what.op,
            owner=owner,
            phase=clock.phase(call.start_us),
            micro_batch=clock.micro_batch(call.start_us),
        )
