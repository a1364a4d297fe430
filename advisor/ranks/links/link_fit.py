"""Latency and bus bandwidth of the links, fitted to the transfers of a run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.clocks.clock_alignment import ranks_taking_part, unpaired_transfers
from paro_advise.advisor.ranks.constants import (
    IMPOSSIBLE_GBPS,
    LATENCY_BYTES,
    MAX_FITTED_SIZES,
    UNLIKE_BENCHMARKS,
)
from paro_advise.advisor.ranks.links.latency import Fabric, Pace, pace_of, tell_latency
from paro_advise.advisor.ranks.links.line import line_of, overlapped_line
from paro_advise.advisor.ranks.links.link import LatencySource, Link, SumAlgorithm
from paro_advise.core.collective import GLOO, Op, bus_factor
from paro_advise.core.plural import plural
from paro_advise.core.span import GroupSpan
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.source import Source
    from paro_advise.advisor.ranks.topology import Topology


def find_links(aligned: AlignedRun | None, run: Run, fabric: Fabric) -> tuple[list[Link], int]:
    """Fit the links of traces, and those that only logs know; tell latency from bandwidth where anything does.

    Returns:
        The links, and the number of samples left out because their bandwidth is impossible.
    """
    links, num_impossible = fit_links(samples_of(aligned.table), fabric) if aligned else ([], 0)
    alone: list[Link] = []
    for is_alone in (True, False):
        logged = _logged_samples([item for item in run.untimed if item.header.is_benchmark == is_alone])
        more, num_more = fit_links(logged, fabric, is_alone=is_alone) if logged is not None else ([], 0)
        known = {(link.op, link.span, link.group_size) for link in links}
        more = [link for link in more if (link.op, link.span, link.group_size) not in known]
        links, alone = links + more, alone + (more if is_alone else [])
        num_impossible += num_more
    return tell_latency(links, fabric, alone), num_impossible


def unlike_benchmarks(run: Run) -> list[Notice]:
    """Say which benchmarks of one collective differ so much that they are of unlike links or settings."""
    import polars as pl

    benchmarks = [item.link_samples for item in run.untimed if item.header.is_benchmark and len(item.link_samples)]
    if len(benchmarks) < 2:
        return []
    samples = pl.concat([table.with_columns(source=pl.lit(place)) for place, table in enumerate(benchmarks)])
    samples = samples.filter(_are_of_links())
    reached: dict[tuple[str, int], list[float]] = {}
    for (op, size, _), part in samples.group_by("op", "group_size", "num_nodes", maintain_order=True):
        wire_per_byte = bus_factor(str(op), int(str(size)))
        by_size = part.group_by("bytes").agg(pl.col("source").n_unique()).sort("source", "bytes", descending=True)
        # Smaller messages are slower on any link: compared is a size that most have measured.
        common = by_size.filter(pl.col("bytes") * wire_per_byte >= LATENCY_BYTES).head(1)
        alike = part.join(common.select("bytes"), on="bytes", how="semi").group_by("source", maintain_order=True)
        times_us = alike.agg(pl.col("time_us").median())["time_us"].to_numpy()
        found = [] if not len(times_us) else (common["bytes"][0] * wire_per_byte / times_us / 1e3).tolist()
        if found and max(found) > UNLIKE_BENCHMARKS * min(found):
            reached.setdefault((str(op), int(str(size))), []).extend(found)
    return [
        Notice(
            code="Q341",
            severity=Severity.WARNING,
            message=f"{len(rates)} benchmarks of {op} over {plural(size, 'rank')} move {min(rates):.3g} to "
            f"{max(rates):.3g} GB/s at one size, {_num_slow(rates)} of them less than half of the fastest: links or "
            "settings differ, and the middle of all is used",
            help="give those of the nodes and the settings of the run",
        )
        for (op, size), rates in sorted(reached.items())
    ]


def _num_slow(rates: Sequence[float]) -> int:
    return sum(2 * rate < max(rates) for rate in rates)


def fabric_of(run: Run, topology: Topology) -> Fabric:
    """Return what the inputs say about the machines."""
    headers = [item.header for _, item in run.timed] + [item.header for item in run.untimed]
    return Fabric(
        is_gloo=next((header.backend for header in headers if header.backend), None) == GLOO,
        device_name=next((header.device_name for header in headers if header.device_name), None),
        ranks_per_node=topology.gpus_per_node,
    )


def _logged_samples(logs: Sequence[Source]) -> pl.DataFrame | None:
    """Return the samples of benchmarks or loggers, None where there are none."""
    import polars as pl

    frames = [item.link_samples for item in logs if len(item.link_samples)]
    if not frames:
        return None
    nodes, size = pl.col("num_nodes"), pl.col("group_size")
    span = (
        pl.when(nodes.is_null())
        .then(pl.lit(""))
        .when(nodes == 1)
        .then(pl.lit(GroupSpan.INTRA.value))
        .when(nodes == size)
        .then(pl.lit(GroupSpan.INTER.value))
        .otherwise(pl.lit(GroupSpan.MIXED.value))
    )
    samples = pl.concat(frames).filter(_are_of_links()).with_columns(span.alias("span"))
    same = ("op", "span", "group_size", "num_nodes", "bytes")
    is_known = pl.col("seq").is_not_null() & (pl.col("group_name") != "")
    # What each rank measured of one collective holds its waiting for others; the last to arrive waited for none.
    joined = (
        samples.filter(is_known)
        .group_by(*same, "group_name", "seq", maintain_order=True)
        .agg(pl.col("time_us").min(), pl.col("rank").n_unique().alias("ranks"))
        .select(*same, "time_us", (pl.col("ranks") == 1).alias("lone"), (pl.col("ranks") < size).alias("partial"))
    )
    as_measured = samples.filter(~is_known).select(
        *same, "time_us", pl.lit(value=False).alias("lone"), pl.lit(value=False).alias("partial")
    )
    return pl.concat([as_measured, joined])


def _are_of_links() -> pl.Expr:
    """Tell which samples are of bytes on a link; what goes over it of a collective that nobody names is not known."""
    import polars as pl

    is_sent = (pl.col("group_size") > 1) & (pl.col("bytes") > 0) & (pl.col("time_us") > 0)
    return is_sent & (pl.col("op") != Op.UNKNOWN)


def samples_of(table: pl.DataFrame) -> pl.DataFrame:
    """Reduce rows of all ranks to one transfer per collective.

    Args:
        table: AlignedRun.table with a ``span`` column.

    Returns:
        op, span, group_size, num_nodes, bytes, time_us, name (of its kernel), lone (bool: one rank only, so the time
        may hold waiting), partial (bool: some of its ranks have no trace, likewise).
    """
    import polars as pl

    known = table.filter(
        pl.col("bytes").is_not_null() & (pl.col("bytes") > 0) & (pl.col("group_size") > 1)
    ).with_columns(
        (pl.col("end_us") - pl.col("start_us")).alias("duration_us"),
        ranks_taking_part().alias("group_size"),
    )
    joined = (
        known.filter(pl.col("match").is_not_null())
        .group_by("match", maintain_order=True)
        .agg(
            pl.col("op").first(),
            pl.col("span").first(),
            pl.col("group_size").first(),
            pl.col("num_nodes").first(),
            pl.col("bytes").first(),
            pl.col("name").first(),
            # The last arrival's own duration is the cleanest: it holds no wait by construction.
            pl.min_horizontal(pl.col("transfer_us").median(), pl.col("duration_us").min()).alias("time_us"),
            pl.lit(value=False).alias("lone"),
            (pl.col("joined_ranks").first() < pl.col("group_size").first()).alias("partial"),
        )
        .drop("match")
    )
    lone = known.filter(pl.col("match").is_null() & ~unpaired_transfers()).select(
        "op",
        "span",
        "group_size",
        "num_nodes",
        "bytes",
        "name",
        pl.col("duration_us").alias("time_us"),
        pl.lit(value=True).alias("lone"),
        pl.lit(value=True).alias("partial"),
    )
    return pl.concat([joined, lone]).filter(pl.col("time_us") > 0)


def fit_links(samples: pl.DataFrame, fabric: Fabric, *, is_alone: bool = False) -> tuple[list[Link], int]:
    """Fit one link per operation, span, size of the group and its number of nodes.

    Args:
        samples: see ``samples_of``.
        fabric: says by which formula a collective's messages take their time.
        is_alone: nothing else ran beside them, as in a benchmark.

    Returns:
        The links, and the number of samples left out because their bandwidth is impossible.
    """
    links, num_impossible = [], 0
    kind = ("op", "span", "group_size", *(["num_nodes"] if "num_nodes" in samples.columns else []))
    for key, part in samples.sort(*kind, "bytes", "time_us").group_by(*kind, maintain_order=True):
        op, span, group_size = str(key[0]), GroupSpan(key[1] or GroupSpan.UNKNOWN), int(str(key[2]))
        num_nodes = None if key[3:] in ((), (None,)) else int(str(key[3]))
        wire = part["bytes"].to_numpy() * bus_factor(op, group_size)
        time_us = part["time_us"].to_numpy()
        possible = wire <= IMPOSSIBLE_GBPS * 1e3 * time_us  # no time is too short to be multiplied
        num_impossible += int((~possible).sum())
        if possible.any():
            lone = bool(part["lone"].all())
            pace = pace_of(op, span, group_size, fabric)
            link = _fit(op, span, group_size, wire[possible], time_us[possible], pace, lone=lone, is_alone=is_alone)
            partial = "partial" in part.columns and bool(part["partial"].mean() > 0.5)  # type: ignore[operator]
            least_gbps = _least_gbps(wire[possible], time_us[possible]) if partial else None
            names_it = op == Op.ALL_REDUCE and "name" in part.columns
            algorithm = _algorithm(part) if names_it else SumAlgorithm.UNKNOWN
            bounded = replace(link, is_lower_bound=partial, least_gbps=least_gbps)
            links.append(replace(bounded, num_nodes=num_nodes, algorithm=algorithm))
    return links, num_impossible


def _algorithm(part: pl.DataFrame) -> SumAlgorithm:
    """Return by which algorithm most bytes of all-reduces moved.

    NCCL has kernels of its own for trees; any other algorithm runs in those that it names for rings (NCCL,
    src/device/generate.py, best_kernel).
    """
    import polars as pl

    for found, mark in ((SumAlgorithm.TREE, "_TREE_"), (SumAlgorithm.RING, "_RING_")):
        named = part.filter(pl.col("name").str.contains(mark, literal=True))
        if 2 * named["bytes"].sum() > part["bytes"].sum():
            return found
    return SumAlgorithm.UNKNOWN


def _least_gbps(wire: NDArray[np.float64], time_us: NDArray[np.float64]) -> float:
    """Return the bandwidth that is sure where times may hold waiting for ranks without a trace.

    All of a time beyond the transfer may be waiting, so no latency is taken off: that would leave too much bandwidth.
    """
    return float(np.quantile(wire / time_us, 0.9)) / 1e3


def _fit(
    op: str,
    span: GroupSpan,
    group_size: int,
    wire: NDArray[np.float64],
    time_us: NDArray[np.float64],
    pace: Pace,
    *,
    lone: bool,
    is_alone: bool,
) -> Link:
    # Waiting and contention only ever add time, so the lower part of each size is the link; in benchmarks neither is,
    # and what differs are nodes and settings.
    sizes, typical = _typical(wire, time_us, quantile=0.5 if is_alone else 0.1 if lone else 0.25)
    line = line_of(sizes, typical, is_alone=is_alone)
    if pace.turns > 1 and line.alpha_us is not None and line.per_byte is not None:
        line = overlapped_line(sizes, typical, pace)
    if line.per_byte and line.per_byte * IMPOSSIBLE_GBPS < 1e-3:  # sizes of which the time says nothing
        line = replace(line, per_byte=None)
    middle = len(sizes) // 2
    whole_us, per_byte = line.alpha_us or 0.0, line.per_byte or 0.0
    large = wire >= LATENCY_BYTES
    # A quick one may take no longer than the typical latency: at least a tenth of its time moved its bytes.
    # Where messages take turns, how much of it is seen depends on the whole of it, of which there is doubt.
    doubt_us = line.doubt_us if pace.turns > 1 else 0.0
    single = np.concatenate(
        [
            wire[large] / np.maximum(time_us[large] - seen, 0.1 * time_us[large]) / 1e3
            for whole in {max(0.0, whole_us - doubt_us), whole_us, whole_us + doubt_us}
            for seen in (pace.seen_us(whole, per_byte * wire[large]),)
        ]
    )
    busbw = 1e-3 / line.per_byte if line.per_byte else None
    # Noise may put the line beyond the quantiles: a range holds its own estimate.
    is_moved = len(single) > 0 and line.per_byte is not None
    spread = [*np.quantile(single, (0.1, 0.9)).tolist(), *([busbw] if busbw else [])] if is_moved else []
    least = float(typical.min())  # no message takes less than its latency
    ends = (max(0.0, whole_us - line.doubt_us), whole_us, max(whole_us, min(whole_us + line.doubt_us, least)))
    low, alpha, high = pace.seen_us(ends, per_byte * float(sizes[middle])).tolist()
    return Link(
        op=op,
        span=span,
        group_size=group_size,
        num_samples=len(wire),
        alpha_us=None if line.alpha_us is None else alpha,
        busbw_gbps=busbw,
        busbw_low_gbps=min(spread, default=None),
        busbw_high_gbps=max(spread, default=None),
        source="measured",
        alpha_low_us=None if line.alpha_us is None else low,
        alpha_high_us=least if line.alpha_us is None and len(sizes) > 1 else None if line.alpha_us is None else high,
        latency_source=LatencySource.UNKNOWN if line.alpha_us is None else LatencySource.MEASURED,
        typical_bytes=float(sizes[middle] / max(bus_factor(op, group_size), 1e-9)),
        typical_us=float(typical[middle]),
        hidden_us=0.0 if line.alpha_us is None else whole_us - alpha,
    )


def _typical(
    wire: NDArray[np.float64], time_us: NDArray[np.float64], *, quantile: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return distinct sizes and a low quantile of their times.

    Beyond 64 sizes (all-to-all, list collectives) neighbours share a bin, represented by its
    middle, so that the fit over pairs of sizes stays small.
    """
    order = np.argsort(wire, kind="stable")
    wire, time_us = wire[order], time_us[order]
    distinct, first = np.unique(wire, return_index=True)
    if len(distinct) > MAX_FITTED_SIZES:
        first = first[np.linspace(0, len(distinct) - 1, MAX_FITTED_SIZES, dtype=np.int64)]
        first = np.unique(first)
    edges = np.append(first, len(wire))
    sizes, times = [], []
    for low, high in itertools.pairwise(edges):
        middle = float(np.median(wire[low:high]))
        sizes.append(middle)
        times.append(float(np.quantile(time_us[low:high], quantile)))
    return np.array(sizes), np.array(times)
