"""Latency and bus bandwidth of the links, fitted to the transfers of a run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import IMPOSSIBLE_GBPS, LATENCY_BYTES, MAX_FITTED_SIZES, MIN_SIZE_RATIO
from paro_advise.core.collective import bus_factor

if TYPE_CHECKING:
    import polars as pl
    from numpy.typing import NDArray

    from paro_advise.advisor.ranks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A fitted link: transfer time = alpha_us + wire bytes / busbw.

    ``busbw_gbps`` is nccl-tests' bus bandwidth (1e9 bytes/s); ranges are the 10 and 90 %
    quantiles of single collectives. None where the samples cannot tell.
    """

    op: str
    span: str
    group_size: int
    num_samples: int
    alpha_us: float | None
    busbw_gbps: float | None
    busbw_low_gbps: float | None
    busbw_high_gbps: float | None
    source: str


def find_links(aligned: AlignedRun | None, run: Run) -> tuple[list[Link], int]:
    """Fit the links of traces, and those that only logs know.

    Returns:
        The links, and the number of samples left out because their bandwidth is impossible.
    """
    links, num_impossible = fit_links(samples_of(aligned.table)) if aligned else ([], 0)
    logged = _logged_samples(run)
    more, num_more = fit_links(logged) if logged is not None else ([], 0)
    known = {(link.op, link.span, link.group_size) for link in links}
    return links + [link for link in more if (link.op, link.span, link.group_size) not in known], (
        num_impossible + num_more
    )


def _logged_samples(run: Run) -> pl.DataFrame | None:
    """Return the samples of benchmarks and loggers, None where there are none."""
    import polars as pl

    frames = [item.link_samples for item in run.untimed if len(item.link_samples)]
    if not frames:
        return None
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
    return (
        pl.concat(frames)
        .filter((size > 1) & (pl.col("bytes") > 0) & (pl.col("time_us") > 0))
        .select("op", span.alias("span"), "group_size", "bytes", "time_us", pl.lit(value=False).alias("lone"))
    )


def samples_of(table: pl.DataFrame) -> pl.DataFrame:
    """Reduce rows of all ranks to one transfer per collective.

    Args:
        table: AlignedRun.table with a ``span`` column.

    Returns:
        op, span, group_size, bytes, time_us, lone (bool: one rank only, so the time may hold
        waiting).
    """
    import polars as pl

    known = table.filter(
        pl.col("bytes").is_not_null() & (pl.col("bytes") > 0) & (pl.col("group_size") > 1)
    ).with_columns((pl.col("end_us") - pl.col("start_us")).alias("duration_us"))
    joined = (
        known.filter(pl.col("match").is_not_null())
        .group_by("match", maintain_order=True)
        .agg(
            pl.col("op").first(),
            pl.col("span").first(),
            pl.col("group_size").first(),
            pl.col("bytes").first(),
            # The last arrival's own duration is the cleanest: it holds no wait by construction.
            pl.min_horizontal(pl.col("transfer_us").median(), pl.col("duration_us").min()).alias("time_us"),
            pl.lit(value=False).alias("lone"),
        )
        .drop("match")
    )
    lone = known.filter(pl.col("match").is_null()).select(
        "op",
        "span",
        "group_size",
        "bytes",
        pl.col("duration_us").alias("time_us"),
        pl.lit(value=True).alias("lone"),
    )
    return pl.concat([joined, lone]).filter(pl.col("time_us") > 0)


def fit_links(samples: pl.DataFrame) -> tuple[list[Link], int]:
    """Fit one link per operation, span and group size.

    Returns:
        The links, and the number of samples left out because their bandwidth is impossible.
    """
    links, num_impossible = [], 0
    for key, part in samples.sort("op", "span", "group_size", "bytes", "time_us").group_by(
        "op", "span", "group_size", maintain_order=True
    ):
        op, span, group_size = str(key[0]), str(key[1]), int(str(key[2]))
        wire = part["bytes"].to_numpy() * bus_factor(op, group_size)
        time_us = part["time_us"].to_numpy()
        possible = wire / time_us / 1e3 <= IMPOSSIBLE_GBPS
        num_impossible += int((~possible).sum())
        if possible.any():
            lone = bool(part["lone"].all())
            links.append(_fit(op, span, group_size, wire[possible], time_us[possible], lone=lone))
    return links, num_impossible


def _fit(
    op: str,
    span: str,
    group_size: int,
    wire: NDArray[np.float64],
    time_us: NDArray[np.float64],
    *,
    lone: bool,
) -> Link:
    # Waiting and contention only ever add time, so the lower part of each size is the link.
    sizes, typical = _typical(wire, time_us, quantile=0.1 if lone else 0.25)
    alpha, per_byte = _line(sizes, typical)
    large = wire >= LATENCY_BYTES
    single = wire[large] / np.maximum(time_us[large] - (alpha or 0.0), 1e-3) / 1e3
    return Link(
        op=op,
        span=span or "unknown",
        group_size=group_size,
        num_samples=len(wire),
        alpha_us=alpha,
        busbw_gbps=1e-3 / per_byte if per_byte else None,
        busbw_low_gbps=float(np.quantile(single, 0.1)) if len(single) else None,
        busbw_high_gbps=float(np.quantile(single, 0.9)) if len(single) else None,
        source="measured",
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


def _line(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Fit time = alpha + per_byte * size; None for what the sizes cannot tell."""
    if len(sizes) == 1:
        if sizes[0] < LATENCY_BYTES:
            return float(times[0]), None
        return None, float(times[0] / sizes[0])
    if sizes[-1] < LATENCY_BYTES:
        return float(np.median(times)), None
    if sizes[-1] < MIN_SIZE_RATIO * sizes[0]:
        # Over a narrow range noise decides what is latency: say only what moved per second.
        return None, float(np.median(times / sizes))
    gaps = sizes[:, None] - sizes[None, :]
    rises = times[:, None] - times[None, :]
    far = np.abs(gaps) > 0
    slopes = (rises[far] / gaps[far]).ravel()
    # Pairs far apart in size say more about the slope: a weighted median over all pairs.
    weights = np.abs(gaps[far]).ravel()
    order = np.argsort(slopes)
    cumulative = np.cumsum(weights[order])
    slope = float(slopes[order][np.searchsorted(cumulative, cumulative[-1] / 2)])
    if slope <= 0:
        return None, float(times[-1] / sizes[-1])
    alpha = float(np.median(times - slope * sizes))
    if alpha < 0:
        return 0.0, float(np.median(times[-1:] / sizes[-1:]))
    return alpha, slope
