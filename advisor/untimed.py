"""What logs and dumps without step times add: volumes, links, metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis import StateEntry
from paro_advise.advisor.links import Link, fit_links
from paro_advise.advisor.rank_facts import read_table
from paro_advise.advisor.state_summary import StateSummary
from paro_advise.advisor.states import STATES, Evidence, Regime, State

if TYPE_CHECKING:
    from paro_advise.advisor.ranks import RankSet


def log_links(found: RankSet) -> tuple[list[Link], int]:
    """Fit links to the samples of benchmarks and loggers.

    Returns:
        The links, and the number of samples whose bandwidth is impossible.
    """
    import polars as pl

    frames = []
    for facts in found.untimed:
        table = read_table(facts.link_samples_ipc)
        if len(table):
            frames.append(table)
    if not frames:
        return [], 0
    nodes, size = pl.col("num_nodes"), pl.col("group_size")
    span = (
        pl.when(nodes.is_null())
        .then(pl.lit(""))
        .when(nodes == 1)
        .then(pl.lit("intra"))
        .when(nodes == size)
        .then(pl.lit("inter"))
        .otherwise(pl.lit("mixed"))
    )
    samples = (
        pl.concat(frames)
        .filter((size > 1) & (pl.col("bytes") > 0) & (pl.col("time_us") > 0))
        .select("op", span.alias("span"), "group_size", "bytes", "time_us", pl.lit(value=False).alias("lone"))
    )
    return fit_links(samples)


def log_states(found: RankSet) -> dict[State, StateSummary]:
    """Count the collectives of logs per state; their times are unknown."""
    import polars as pl

    tables = [read_table(facts.collectives_ipc) for facts in found.untimed]
    rows = pl.concat(tables) if tables else None
    out = {}
    for state in STATES:
        part = rows.filter(pl.col("state") == state.value) if rows is not None else None
        count = len(part) if part is not None else 0
        out[state] = StateSummary(
            entry=StateEntry(
                count=float(count),
                bytes=float(part["bytes"].sum()) if part is not None and count else None,
                total_us=None,
                exposed_us=None,
                hidden_us=None,
                transfer_us=None,
                wait_us=None,
                regime=(Regime.UNKNOWN if count else Regime.ABSENT).value,
                evidence=Evidence.NONE.value,
                text="the input carries no times" if count else f"no {state} communication was seen",
            ),
            regime=Regime.UNKNOWN if count else Regime.ABSENT,
        )
    return out


def log_metadata(found: RankSet) -> dict[str, str]:
    """Merge what the inputs say about themselves; the first to speak wins."""
    merged: dict[str, str] = {}
    for facts in (*(item for _, item in found.timed), *found.untimed):
        for key, value in facts.header.metadata.items():
            merged.setdefault(key, value)
    return dict(sorted(merged.items())[:200])
