"""Rows of the collective table of one trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.tables import COLLECTIVE_COLUMNS, table_of

if TYPE_CHECKING:
    import polars as pl

    from paro_advise.trace_parsers.tables import Cell


class CollectiveRows:
    """Collects rows of COLLECTIVE_COLUMNS."""

    def __init__(self) -> None:
        self._data: dict[str, list[Cell]] = {name: [] for name in COLLECTIVE_COLUMNS}

    def add(self, **row: Cell) -> None:
        """Append one row; missing columns are null, text columns empty."""
        for name, kind in COLLECTIVE_COLUMNS.items():
            self._data[name].append(row.get(name, "" if kind == "str" else None))

    def table(self) -> pl.DataFrame:
        """Return the rows sorted by start, the untimed ones last in order of arrival."""
        return table_of(COLLECTIVE_COLUMNS, self._data).sort("start_us", nulls_last=True, maintain_order=True)
