"""Tables of logs and dumps, filled row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.plural import plural
from paro_advise.trace_parsers.constants import MAX_ROWS
from paro_advise.trace_parsers.tables import (
    COLLECTIVE_COLUMNS,
    LINK_SAMPLE_COLUMNS,
    Cell,
    ParsedSource,
    empty_table,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import polars as pl

    from paro_advise.trace_parsers.bytes.readable import Readable
    from paro_advise.trace_parsers.notice import NoticeList
    from paro_advise.trace_parsers.tables import EventTables, SourceFile, SourceHeader


class RowBuffer:
    """Collects rows of one of the tables in tables.py; cells not given are unknown.

    Attributes:
        num_rows: rows kept.
        num_dropped: rows beyond MAX_ROWS.
    """

    def __init__(self, columns: dict[str, str]) -> None:
        self._columns = columns
        self._data: dict[str, list[Cell]] = {name: [] for name in columns}
        self._texts: dict[str, str] = {}
        self.num_rows = 0
        self.num_dropped = 0

    def add(self, **cells: Cell) -> None:
        """Append one row."""
        if self.num_rows >= MAX_ROWS:
            self.num_dropped += 1
            return
        self.num_rows += 1
        for name, kind in self._columns.items():
            cell = cells.pop(name, "" if kind == "str" else None)
            # The same few texts come again and again, each time as a new object.
            self._data[name].append(self._texts.setdefault(cell, cell) if type(cell) is str else cell)
        if cells:
            raise KeyError(f"no such columns: {sorted(cells)}")

    def column(self, name: str) -> list[Cell]:
        """Return the cells of one column; changes to it change the table."""
        return self._data[name]

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of one column, without the cells that hold none."""
        return [cell for cell in self._data[name] if isinstance(cell, int | float)]

    def convert(self, name: str, to_new: Callable[[float], float]) -> None:
        """Replace the numbers of one column."""
        column = self._data[name]
        column[:] = [to_new(cell) if isinstance(cell, int | float) else cell for cell in column]

    def table(self) -> pl.DataFrame:
        """Return the rows, collectives by start with untimed ones last in file order."""
        frame = table_of(self._columns, self._data)
        if self._columns is COLLECTIVE_COLUMNS and self.num_rows:
            frame = frame.sort("start_us", nulls_last=True, maintain_order=True)
        return frame


def warn_of_limits(notices: NoticeList, data: Readable, *buffers: RowBuffer) -> None:
    """Add a notice of what the limits of reading cost."""
    if data.num_cut_lines:
        notices.warn("Q200", f"cut short: {plural(data.num_cut_lines, 'line')} longer than 1 MiB")
    if dropped := sum(buffer.num_dropped for buffer in buffers):
        notices.warn(
            "Q202",
            f"{plural(dropped, 'row')} beyond the first {MAX_ROWS:,} left out",
            "record fewer steps, or pass the files of fewer ranks",
        )


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
    return ParsedSource(
        source=source,
        header=header,
        collectives=collectives.table() if collectives else empty_table(COLLECTIVE_COLUMNS),
        link_samples=link_samples.table() if link_samples else empty_table(LINK_SAMPLE_COLUMNS),
        events=events,
        num_micro_batches=None,
        notices=notices.by_code(),
        num_events=num_events,
    )
