"""SQLite databases that others made.

They are opened read-only, only real tables are read, and all queries share a budget of
virtual-machine steps that grows with the file, so that no crafted schema or damaged page can keep
the reader busy.
"""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import quote

from paro_advise.trace_parsers.bytes.constants import (
    FREE_STEPS,
    MAX_CELL_BYTES,
    MAX_CELL_TEXT,
    MAX_TABLES,
    STEPS_PER_BYTE,
    STEPS_PER_CALL,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Database:
    """A read-only database with a budget.

    Attributes:
        tables: names of real tables to the names of their columns.
        problem: why reading stopped early, "" when it did not.
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._connection = sqlite3.connect(uri, uri=True)
        self._steps_left = FREE_STEPS + STEPS_PER_BYTE * num_bytes
        self.problem = ""
        connection = self._connection
        connection.text_factory = lambda raw: raw[:MAX_CELL_TEXT].decode("utf-8", "replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
        connection.set_progress_handler(self._spend, STEPS_PER_CALL)
        for pragma in ("trusted_schema=OFF", "query_only=ON", "cell_size_check=ON", "mmap_size=0"):
            connection.execute(f"PRAGMA {pragma}")
        self.tables = self._read_schema()

    def _spend(self) -> int:
        self._steps_left -= STEPS_PER_CALL
        return int(self._steps_left < 0)

    def _read_schema(self) -> dict[str, frozenset[str]]:
        tables: dict[str, frozenset[str]] = {}
        # A view or virtual table of a known name would run SQL or code of the file's maker.
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE TABLE%'"
        for (name,) in self._rows(query, (), MAX_TABLES):
            if isinstance(name, str) and re.fullmatch(r"\w{1,100}", name):
                columns = self._rows("SELECT name FROM pragma_table_info(?)", (name,), MAX_TABLES)
                tables[name] = frozenset(str(column) for (column,) in columns)
        return tables

    def _rows(self, query: str, values: Sequence[object], limit: int) -> Iterator[tuple[object, ...]]:
        """Yield rows; on damage or an exhausted budget note the problem and stop."""
        try:
            cursor = self._connection.execute(f"{query} LIMIT {limit}", tuple(values))
            yield from cursor
        except (sqlite3.Error, OverflowError, ValueError) as error:
            self.problem = self.problem or f"{error}"[:200]

    def select(
        self, table: str, columns: Sequence[str], limit: int, where: str = "", values: Sequence[object] = ()
    ) -> Iterator[tuple[object, ...]]:
        """Yield the columns of a table, NULL for those it lacks, nothing when it is absent."""
        known = self.tables.get(table, frozenset())
        if not known:
            return
        wanted = ", ".join(f'"{name}"' if name in known else "NULL" for name in columns)
        yield from self._rows(f'SELECT {wanted} FROM "{table}" {where}', values, limit)

    def named_value(self, table: str, name: str) -> object:
        """Return the value of a (name, value) table, None when it is absent."""
        if not {"name", "value"} <= self.tables.get(table, frozenset()):
            return None
        return next(self.select(table, ("value",), 1, "WHERE name = ?", (name,)), (None,))[0]

    def close(self) -> None:
        """Release the file."""
        self._connection.close()
