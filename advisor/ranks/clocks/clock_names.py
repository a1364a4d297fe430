"""Which ranks share a clock, by what is known of their machines, and which do not although they name one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.ranks.constants import SAME_CLOCK_US, STEADY_SHARE
from paro_advise.core.collective import Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.advisor.ranks.run import Run
    from paro_advise.advisor.ranks.topology import Topology

ENDING_APART = (Op.BROADCAST, Op.REDUCE, Op.GATHER, Op.SCATTER, Op.SEND, Op.RECV, Op.SEND_RECV)


def clock_names(run: Run, topology: Topology, machines: Sequence[Sequence[int]] = ()) -> dict[int, str]:
    """Return a name of each rank's clock, the same for those that share one.

    Ranks under one kernel share its clock, whatever their hosts are called. Where none is known, those of one host do,
    and those of one node where metadata or the user tell the nodes: machines may have one name, and a node containers
    of several.

    Args:
        run: whose ranks.
        topology: which ranks share a node.
        machines: the ranks under each kernel; () where step logs do not tell.
    """
    kernel_of = {rank: f"kernel {number}" for number, ranks in enumerate(machines) for rank in ranks}
    node_of = {rank: f"node {node}" for rank, node in topology.node_of.items()}
    is_told = topology.source == "metadata"
    parts_hosts = is_told or topology.source == "flag"
    clock_of = {}
    for rank, item in run.timed:
        node, host = node_of.get(rank), item.header.host
        if rank in kernel_of:
            clock_of[rank] = kernel_of[rank]
        elif host:
            clock_of[rank] = f"{host} {node}" if node and parts_hosts else host
        else:
            clock_of[rank] = node if node and is_told else f"rank {rank}"
    return clock_of


def parted_ranks(table: pl.DataFrame, clock_of: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks of clocks on which collectives end at times that differ, by the same all the time."""
    import polars as pl

    names = pl.Series("clock", [clock_of[rank] for rank in clock_of], dtype=pl.String)
    clocks = pl.DataFrame({"rank": list(clock_of), "clock": names}, schema_overrides={"rank": pl.Int64})
    together = table.filter(pl.col("match").is_not_null() & ~pl.col("op").is_in([op.value for op in ENDING_APART]))
    apart = (
        together.join(clocks, on="rank")
        .with_columns(pl.col("finish_us").median().over("match", "clock").alias("middle_us"))
        .with_columns((pl.col("finish_us") - pl.col("middle_us")).alias("apart_us"))
        .filter(pl.len().over("match", "clock") > 1)
        .group_by("rank", "clock")
        .agg(
            pl.col("apart_us").median(),
            (pl.col("apart_us") - pl.col("apart_us").median()).abs().median().alias("spread_us"),
        )
        .with_columns(pl.col("apart_us").abs())
        .filter((pl.col("apart_us") > SAME_CLOCK_US / 2) & (pl.col("spread_us") < STEADY_SHARE * pl.col("apart_us")))
    )
    found = set(apart["clock"])
    return tuple(rank for rank, clock in clock_of.items() if clock in found)
