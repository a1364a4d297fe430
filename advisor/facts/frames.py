"""Tables of collectives: as bytes between processes and in the cache, and what they send."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import UNSIZED_SHARE

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


def mean_bytes(rows: pl.DataFrame, rank_steps: int) -> float | None:
    """Return the bytes of collectives per rank and step; None where sizes are missing that may matter.

    Args:
        rows: collectives of some kind, of one rank or several; ``bytes`` is null where a size was not recorded.
        rank_steps: steps of all ranks.
    """
    without = rows.filter(rows["bytes"].is_null())
    told = rows
    are_few = len(without) <= UNSIZED_SHARE * len(rows) and _time_us(without) <= UNSIZED_SHARE * _time_us(rows)
    if len(without) and not are_few:
        # Ranks may have been recorded with other settings; each speaks for itself.
        told = rows.filter(~rows["rank"].is_in(without["rank"].unique().to_list()))
        if not len(told):
            return None
        rank_steps = max(1, round(rank_steps * told["rank"].n_unique() / rows["rank"].n_unique()))
    return float(told["bytes"].sum()) / rank_steps


def _time_us(rows: pl.DataFrame) -> float:
    return float((rows["end_us"] - rows["start_us"]).sum())
