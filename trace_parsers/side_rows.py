"""Guards and row buffers shared by the readers of logs and dumps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, ParsedSource, empty_table, table_of

if TYPE_CHECKING:
    import polars as pl

    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.tables import EventTables, SourceFile, SourceHeader

INT64_MAX = (1 << 63) - 1
MAX_ROWS = 5_000_000
MAX_TEXT = 400

# Of AlltoAll, gather and scatter NCCL is given what one pair of ranks exchanges, of the first two
# what one rank contributes; nccl-tests counts what all ranks together hold.
_PER_RANK_COUNT = {Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER}


def whole(value: object, low: int = 0, high: int = INT64_MAX) -> int | None:
    """Return an integer within [low, high], None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not (math.isfinite(value) and value.is_integer()):
        return None
    return int(value) if low <= value <= high else None


def real(value: object, low: float = 0.0, high: float = 1e18) -> float | None:
    """Return a finite number within [low, high], None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None


def short(value: object, limit: int = MAX_TEXT) -> str:
    """Return text of at most ``limit`` characters, "" for anything that is not text."""
    if not isinstance(value, str):
        return ""
    cut = value[:limit]
    # JSON and pickles can hold halves of surrogate pairs, which no table can.
    return cut if cut.isascii() else cut.encode("utf-8", "replace").decode("utf-8")


def number(text: str) -> float | None:
    """Return the finite, non-negative number that a log printed, None for anything else."""
    try:
        return real(float(text)) if len(text) <= 64 else None
    except ValueError:
        return None


def integer(text: str, base: int = 10) -> int | None:
    """Return the integer in [0, 2^63) that a log printed, None for anything else."""
    try:
        return whole(int(text[:20], base)) if len(text) <= 20 else None
    except ValueError:
        return None


def full_bytes(op: Op, per_rank_bytes: int, group_size: int | None) -> int | None:
    """Return nccl-tests' size of a collective from what one rank passes to NCCL.

    Args:
        op: the collective.
        per_rank_bytes: count times element size as in the NCCL call.
        group_size: ranks of the communicator, None when unknown.
    """
    if op not in _PER_RANK_COUNT:
        return whole(per_rank_bytes)
    return None if group_size is None else whole(per_rank_bytes * group_size)


def bus_factor(op: Op, group_size: int) -> float:
    """Return busbw / algbw by nccl-tests' definition."""
    if op is Op.ALL_REDUCE:
        return 2 * (group_size - 1) / group_size
    if op in _PER_RANK_COUNT:
        return (group_size - 1) / group_size
    return 1.0


def busbw_gbps(op: Op, num_bytes: int, time_us: float, group_size: int | None) -> float | None:
    """Return the bus bandwidth in 1e9 bytes/s, None when it needs an unknown group size.

    Args:
        op: the collective.
        num_bytes: size in nccl-tests' convention.
        time_us: duration, must be positive.
        group_size: ranks of the communicator, None when unknown.
    """
    if group_size is None:
        return None if op is Op.ALL_REDUCE or op in _PER_RANK_COUNT else num_bytes / time_us / 1e3
    return num_bytes / time_us / 1e3 * bus_factor(op, group_size)


class RowBuffer:
    """Collects rows of one of the tables in tables.py; cells not given are unknown.

    Attributes:
        num_rows: rows kept.
        num_dropped: rows beyond MAX_ROWS.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self._columns = columns
        self._data: dict[str, list[Any]] = {name: [] for name in columns}
        self.num_rows = 0
        self.num_dropped = 0

    def add(self, **cells: Any) -> None:
        """Append one row."""
        if self.num_rows >= MAX_ROWS:
            self.num_dropped += 1
            return
        self.num_rows += 1
        for name, kind in self._columns.items():
            self._data[name].append(cells.pop(name, "" if kind == "str" else None))
        if cells:
            raise KeyError(f"no such columns: {sorted(cells)}")

    def column(self, name: str) -> list[Any]:
        """Return the cells of one column; changes to it change the table."""
        return self._data[name]

    def table(self) -> pl.DataFrame:
        """Return the rows, collectives by start with untimed ones last in file order."""
        frame = table_of(self._columns, self._data)
        if self._columns is COLLECTIVE_COLUMNS and self.num_rows:
            frame = frame.sort("start_us", nulls_last=True, maintain_order=True)
        return frame


class NoticeList:
    """Collects notices; those about nothing are left out."""

    def __init__(self) -> None:
        self._notices: list[Notice] = []

    def info(self, code: str, message: str, help_text: str = "") -> None:
        """Add how a result came about."""
        self._add(code, Severity.INFO, message, help_text)

    def warn(self, code: str, message: str, help_text: str = "") -> None:
        """Add a loss or a guess."""
        self._add(code, Severity.WARNING, message, help_text)

    def skipped(self, count: int, what: str) -> None:
        """Add the number of broken records, unless it is 0."""
        if count:
            self.warn("Q201", f"{count} {what} were broken or out of range and left out")

    def reading(self, data: Readable, *buffers: RowBuffer) -> None:
        """Add what the limits of reading cost."""
        if data.num_cut_lines:
            self.warn("Q200", f"{data.num_cut_lines} lines were longer than 1 MiB and cut")
        if dropped := sum(buffer.num_dropped for buffer in buffers):
            self.warn(
                "Q202",
                f"{dropped} rows beyond the first {MAX_ROWS} were left out",
                "record fewer steps, or pass the files of fewer ranks",
            )

    def _add(self, code: str, severity: Severity, message: str, help_text: str) -> None:
        self._notices.append(Notice(code=code, severity=severity, message=message, help=help_text))

    def done(self) -> tuple[Notice, ...]:
        """Return all notices by code."""
        return tuple(sorted(self._notices))


def parsed_source(
    source: SourceFile,
    header: SourceHeader,
    notices: NoticeList,
    num_events: int,
    *,
    collectives: RowBuffer | None = None,
    link_samples: RowBuffer | None = None,
    events: EventTables | None = None,
) -> ParsedSource:
    """Assemble the result of a reader; tables not given are empty."""
    from paro_advise.trace_parsers.tables import LINK_SAMPLE_COLUMNS

    return ParsedSource(
        source=source,
        header=header,
        collectives=collectives.table() if collectives else empty_table(COLLECTIVE_COLUMNS),
        link_samples=link_samples.table() if link_samples else empty_table(LINK_SAMPLE_COLUMNS),
        events=events,
        num_micro_batches=None,
        notices=notices.done(),
        num_events=num_events,
    )
