"""Tables as bytes: how they travel between processes and lie in the cache."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl


def read_table(data: bytes) -> pl.DataFrame:
    """Read a table back from an Arrow IPC stream."""
    import polars as pl

    return pl.read_ipc_stream(io.BytesIO(data))


def table_bytes(table: pl.DataFrame) -> bytes:
    """Return a table as an Arrow IPC stream."""
    buffer = io.BytesIO()
    table.write_ipc_stream(buffer, compression="zstd")
    return buffer.getvalue()
