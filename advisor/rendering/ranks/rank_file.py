"""All ranks and steps of a large run as a Parquet file, which stands beside its page."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import TYPE_CHECKING

from paro_advise.advisor.rendering.constants import LEAST_MAPPED_RANKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paro_advise.advisor.analysis.model import RankEntry
    from paro_advise.advisor.facts.model import StepFacts

_STEP_COLUMNS = (
    "label", "start_us", "wall_us", "compute_us", "exposed_communication_us", "other_us", "idle_us", "communication_us",
)  # fmt: skip


def rank_file_name(page: str) -> str:
    """Return the name of the file beside a page."""
    return page.removesuffix(".html") + ".ranks.parquet"


def rank_file(ranks: Sequence[RankEntry], steps_of: Mapping[int, Sequence[StepFacts]]) -> bytes | None:
    """Return a row per rank and step with times in us; None for a run whose page shows all of it.

    Args:
        ranks: of the analysis.
        steps_of: each rank's steps.
    """
    import polars as pl

    if len(ranks) < LEAST_MAPPED_RANKS:
        return None
    rows = [
        {"rank": entry.rank, "node": entry.node, "host": entry.host, "wait_us": entry.wait_us}
        | {name: value for name, value in asdict(step).items() if name in _STEP_COLUMNS}
        | {f"exposed_{state}_us": value for state, value in step.state_exposed_us.items()}
        for entry in ranks
        for step in steps_of.get(entry.rank, ())
    ]
    buffer = io.BytesIO()
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(buffer)
    return buffer.getvalue()
