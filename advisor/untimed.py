"""What logs and dumps without step times add: volumes, links, metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis import CollectiveEntry, StateEntry
from paro_advise.advisor.links import Link, fit_links
from paro_advise.advisor.rank_facts import read_table
from paro_advise.advisor.regimes import Verdict
from paro_advise.advisor.state_summary import StateSummary
from paro_advise.advisor.states import STATES, Evidence, Regime, State
from paro_advise.advisor.units import bytes_text, gbps_text
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def log_collectives(found: RankSet) -> tuple[CollectiveEntry, ...]:
    """Return the kinds of collectives in logs and dumps with their counts; times are unknown."""
    import polars as pl

    tables = [read_table(facts.collectives_ipc) for facts in found.untimed]
    if not tables:
        return ()
    keys = ["state", "detail", "op", "bytes", "group_size", "evidence"]
    grouped = pl.concat(tables).group_by(keys).agg(pl.len().alias("count"))
    order = ["count", *keys]
    grouped = grouped.sort(order, descending=[True] + [False] * len(keys), nulls_last=True).head(60)
    return tuple(
        CollectiveEntry(
            state=row["state"],
            detail=row["detail"],
            op=row["op"],
            bytes=row["bytes"],
            group_size=row["group_size"],
            span="unknown",
            count=float(row["count"]),
            p50_us=None,
            p95_us=None,
            p99_us=None,
            exposed_us=None,
            evidence=row["evidence"],
        )
        for row in grouped.iter_rows(named=True)
    )


def log_verdict(found: RankSet, links: Sequence[Link]) -> Verdict:
    """Say what inputs without step times tell: a hang, volumes, links."""
    dumps = [facts for facts in found.untimed if facts.source.kind == SourceKind.FLIGHT_RECORDER]
    hangs = sum(notice.code == "Q250" for facts in dumps for notice in facts.notices)
    tables = [read_table(facts.collectives_ipc) for facts in found.untimed]
    count = sum(map(len, tables))
    volume = sum(float(table["bytes"].sum() or 0) for table in tables)
    parts = []
    if hangs:
        parts.append(f"The run probably hung: {hangs} of {len(dumps)} dumps hold collectives that never ended")
    if count:
        parts.append(f"{count} collectives of {bytes_text(volume)} were counted")
    known = [link for link in links if link.busbw_gbps]
    if known:
        best = max(known, key=lambda link: link.busbw_gbps or 0.0)
        parts.append(f"{best.op} over {best.group_size} ranks reaches {gbps_text(best.busbw_gbps)} bus bandwidth")
    for facts in found.untimed:
        median_ms = facts.header.metadata.get("median_iteration_ms")
        if median_ms:
            parts.append(f"iterations take {median_ms} ms (median of the training log)")
            break
    parts.append("the inputs do not time what happens inside a step, so what limits it cannot be told")
    text = "; ".join(parts) + "."
    return Verdict(regime=Regime.UNKNOWN, limiting_state=None, text=text[0].upper() + text[1:], case="")
