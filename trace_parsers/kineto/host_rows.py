"""The host rows of one trace as arrays, and which annotations enclose a moment on a thread."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kernel_kinds import NORM_OPERATOR, TENSOR_PARALLEL_FUNCTIONS
from paro_advise.trace_parsers.kineto.columns import HostKind
from paro_advise.trace_parsers.kineto.constants import MAX_OPEN_OWNERS
from paro_advise.trace_parsers.tables import HostSpan

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from paro_advise.trace_parsers.kineto.columns import HostColumns

AUTOGRAD_NODE = "autograd::engine::evaluate_function"
_OWNER_NAMES = (
    AUTOGRAD_NODE, "c10d::", "_c10d_functional::", NORM_OPERATOR, "paro_", *TENSOR_PARALLEL_FUNCTIONS,
)  # fmt: skip
_LAUNCH = re.compile(r"^(?:cuda|cu|hip)\w*Launch(?:Cooperative)?Kernel")
_NO_OWNERS = ("nccl:", "gloo:", "ProfilerStep")
NOWHERE = (-1.0, -1)  # (us, thread id); the query of a call that is unknown; no span is open there


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Host rows of one trace as arrays of equal length, sorted by start."""

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]
    tid: NDArray[np.int32]
    name: NDArray[np.uint32]
    kind: NDArray[np.int8]
    external: NDArray[np.int64]
    sequence: NDArray[np.int64]
    correlation: NDArray[np.int64]
    names: tuple[str, ...]

    def select(self, mask: NDArray[np.bool_]) -> list[HostSpan]:
        """Return the rows under a mask as spans, by start."""
        import numpy as np

        return self.spans(np.flatnonzero(mask))

    def spans(self, index: NDArray[np.intp] | list[int]) -> list[HostSpan]:
        """Return some rows as spans, in the order given."""
        import numpy as np

        index = np.asarray(index, dtype=np.intp)
        columns = (self.start_us, self.end_us, self.tid, self.name)
        return [
            HostSpan(start_us=start, end_us=end, tid=tid, name=self.names[name])
            for start, end, tid, name in zip(*(column[index].tolist() for column in columns), strict=True)
        ]

    def kernel_launches(self) -> NDArray[np.intp]:
        """Return the places of the calls that launch kernels whose rows can be told; none where they were not read."""
        import numpy as np

        named = self.mask_of_names(bool(_LAUNCH.match(name)) for name in self.names)
        return np.flatnonzero((self.kind == HostKind.RUNTIME) & named & (self.correlation >= 0))

    def mask_of_names(self, wanted: Iterable[bool]) -> NDArray[np.bool_]:
        """Return a mask over rows from one truth value per distinct name."""
        import numpy as np

        table = np.fromiter(wanted, dtype=bool, count=len(self.names))
        return table[self.name] if len(table) else np.zeros(len(self.name), dtype=bool)


def sort_host_rows(raw: HostColumns, start_us: NDArray[np.float64], duration_us: NDArray[np.float64]) -> HostRows:
    """Return host rows by start, of those that start together the longest first.

    Args:
        raw: as collected.
        start_us: from the start of the trace.
        duration_us: not negative.
    """
    import numpy as np

    order = np.lexsort((-np.frombuffer(raw.duration, dtype=np.float64), start_us))
    return HostRows(
        start_us=start_us[order],
        end_us=(start_us + duration_us)[order],
        tid=np.frombuffer(raw.tid, dtype=np.int32)[order],
        name=np.frombuffer(raw.name, dtype=np.uint32)[order],
        kind=np.frombuffer(raw.kind, dtype=np.int8)[order],
        external=np.frombuffer(raw.external, dtype=np.int64)[order],
        sequence=np.frombuffer(raw.sequence, dtype=np.int64)[order],
        correlation=np.frombuffer(raw.correlation, dtype=np.int64)[order],
        names=tuple(raw.names.values_in_order()),
    )


def owner_mask(rows: HostRows) -> NDArray[np.bool_]:
    """Mark the rows that may enclose the issue of a collective and say what it is for."""
    is_annotation = rows.kind == HostKind.ANNOTATION
    annotations = is_annotation & rows.mask_of_names(not name.startswith(_NO_OWNERS) for name in rows.names)
    named = rows.mask_of_names(name.startswith(_OWNER_NAMES) for name in rows.names)
    mask: NDArray[np.bool_] = annotations | (rows.kind == HostKind.PYTHON) | named
    return mask


def owners_at(rows: HostRows, queries: Sequence[tuple[float, int]]) -> list[str]:
    """Return, for each (time_us, tid), the names of the spans open there, outer to inner.

    Spans come from ``owner_mask``; names are joined with " > ".
    """
    index = _spans_around(rows, queries)
    by_tid: dict[int, list[int]] = {}
    for row, tid in zip(index.tolist(), rows.tid[index].tolist(), strict=True):
        by_tid.setdefault(tid, []).append(row)
    out = [""] * len(queries)
    asked: dict[int, list[int]] = {}
    for number, (_, tid) in enumerate(queries):
        asked.setdefault(tid, []).append(number)
    for tid, numbers in asked.items():
        spans = rows.spans(by_tid.get(tid, []))
        numbers.sort(key=lambda number: queries[number][0])
        times = [queries[number][0] for number in numbers]
        for number, owner in zip(numbers, _open_names(spans, times), strict=True):
            out[number] = owner
    return out


def _spans_around(rows: HostRows, queries: Sequence[tuple[float, int]]) -> NDArray[np.intp]:
    """Return the owners in which some call was issued: a small part of all autograd nodes."""
    import numpy as np

    index = np.flatnonzero(owner_mask(rows))
    asked_us = np.sort(np.array([time for time, _ in queries], dtype=np.float64))
    first = np.searchsorted(asked_us, rows.start_us[index], side="left")
    last = np.searchsorted(asked_us, rows.end_us[index], side="right")
    return index[last > first]


def _open_names(spans: Sequence[HostSpan], times_us: Sequence[float]) -> Iterator[str]:
    """Yield the names of the spans open at each time; both by time, spans of one thread."""
    stack: list[HostSpan] = []
    cursor = 0
    for time_us in times_us:
        while cursor < len(spans) and spans[cursor].start_us <= time_us:
            span = spans[cursor]
            while stack and stack[-1].end_us <= span.start_us:
                stack.pop()
            if len(stack) < MAX_OPEN_OWNERS:
                stack.append(span)
            cursor += 1
        while stack and stack[-1].end_us < time_us:
            stack.pop()
        yield " > ".join(span.name for span in stack if span.end_us >= time_us)
