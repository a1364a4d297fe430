"""What logs and dumps without step times add: volumes, links, metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.model import CollectiveEntry
from paro_advise.advisor.analysis.regimes import Regime, Verdict
from paro_advise.advisor.ranks.link_fit import Link, fit_links, samples_of
from paro_advise.advisor.wording.quantities import bytes_text, gbps_text, time_text
from paro_advise.trace_parsers.tables import SourceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.ranks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


def all_links(aligned: AlignedRun | None, run: Run) -> tuple[list[Link], int]:
    """Fit the links of traces, and those that only logs know.

    Returns:
        The links, and the number of samples whose bandwidth is impossible.
    """
    links, num_impossible = fit_links(samples_of(aligned.table)) if aligned else ([], 0)
    more, num_more = _log_links(run)
    known = {(link.op, link.span, link.group_size) for link in links}
    return links + [link for link in more if (link.op, link.span, link.group_size) not in known], (
        num_impossible + num_more
    )


def _log_links(run: Run) -> tuple[list[Link], int]:
    """Fit links to the samples of benchmarks and loggers.

    Returns:
        The links, and the number of samples whose bandwidth is impossible.
    """
    import polars as pl

    frames = [item.link_samples for item in run.untimed if len(item.link_samples)]
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


def log_collectives(run: Run) -> tuple[CollectiveEntry, ...]:
    """Return the kinds of collectives in logs and dumps with their counts; times are unknown."""
    import polars as pl

    tables = [item.collectives for item in run.untimed]
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


def log_verdict(run: Run, links: Sequence[Link]) -> Verdict:
    """Say what inputs without step times tell: a hang, volumes, links."""
    dumps = [item.facts for item in run.untimed if item.facts.source.kind == SourceKind.FLIGHT_RECORDER]
    hangs = sum(notice.code == "Q250" for facts in dumps for notice in facts.notices)
    tables = [item.collectives for item in run.untimed]
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
    median_us = next((item.header.median_iteration_us for item in run.untimed if item.header.median_iteration_us), None)
    if median_us:
        parts.append(f"iterations take {time_text(median_us)} (median of the training log)")
    parts.append("these inputs contain no timing within a step, so what limits it cannot be told")
    text = "; ".join(parts) + "."
    return Verdict(regime=Regime.UNKNOWN, limiting_state=None, text=text[0].upper() + text[1:], case="")
