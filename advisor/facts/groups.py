"""Process groups that were not recorded, taken for what the rest of a trace says they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import SCALAR_ELEMENTS
from paro_advise.core.collective import Op
from paro_advise.core.model_state import State
from paro_advise.core.plural import plural
from paro_advise.trace_parsers.notice import Notice, Severity
from paro_advise.trace_parsers.rank_lists import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import polars as pl

    from paro_advise.trace_parsers.tables import SourceHeader

# What hybrid sharding sends in groups of its mesh, by whether these hold shards or copies.
_OF_SHARDS = {
    (State.PARAMETER.value, Op.ALL_GATHER.value),
    (State.OPTIMIZER.value, Op.ALL_GATHER.value),
    (State.GRADIENT.value, Op.REDUCE_SCATTER.value),
}
_OF_COPIES = {(State.GRADIENT.value, Op.ALL_REDUCE.value)}


def with_default_group(
    collectives: pl.DataFrame, header: SourceHeader, windows: Sequence[tuple[str, float, float]] = ()
) -> tuple[pl.DataFrame, tuple[Notice, ...]]:
    """Take collectives whose group was not recorded, nor any other group of the run, for ones of all ranks.

    Of those beside all recorded steps (name, begin, end in us) nothing is said: a profiler that warms up records
    their kernels and not what issued them, and no figure of a step counts them.
    """
    import polars as pl

    is_open = pl.col("group_size").is_null() & (pl.col("group_name") == "") & (pl.col("group_ranks") == "")
    told = collectives.filter(is_open & (pl.col("op") != Op.BARRIER.value))
    if told.is_empty() or not header.world_size or len(header.groups) > 1:
        return collectives, ()
    in_a_step = [pl.col("start_us").is_between(low, high) for _, low, high in windows]
    num_open = len(told.filter(pl.any_horizontal(in_a_step) | pl.col("start_us").is_null()) if in_a_step else told)
    size = pl.when(is_open).then(pl.lit(header.world_size, dtype=pl.Int64)).otherwise("group_size").alias("group_size")
    if not num_open:
        return collectives.with_columns(size), ()
    notice = Notice(
        code="Q321",
        severity=Severity.INFO,
        message=f"the groups of {plural(num_open, 'collective')} are not recorded; all {header.world_size} ranks are "
        "assumed",
        help="torch 2.1 or later records them",
    )
    return collectives.with_columns(size), (notice,)


def with_mesh_groups(table: pl.DataFrame, header: SourceHeader) -> tuple[pl.DataFrame, tuple[Notice, ...]]:
    """Take groups whose ranks were not recorded for those of hybrid sharding, where it is all that uses smaller groups.

    Parameters are gathered and gradients scattered in groups of one size, gradients summed in groups of another, and
    both sizes together make the world: ranks in a row share shards, ranks a row apart hold copies, as a mesh of
    (copies, shards) lays them out (torch.distributed.device_mesh, and FSDP1's groups of a node).

    Args:
        table: attributed collectives of one rank.
        header: of its trace.
    """
    import polars as pl

    rank, world = header.rank, header.world_size
    if rank is None or not world:
        return table, ()
    part = table.filter(pl.col("group_size").is_between(2, world - 1))
    if part.is_empty() or (part["group_ranks"] != "").any():
        return table, ()
    kinds = part.select("state", "op", "group_size").unique()
    sizes: dict[bool, set[int]] = {True: set(), False: set()}
    for state, op, size in kinds.iter_rows():
        if (state, op) in _OF_SHARDS | _OF_COPIES:
            sizes[(state, op) in _OF_SHARDS].add(size)
        elif not _are_scalars(part.filter((pl.col("state") == state) & (pl.col("op") == op))):
            return table, ()
    if len(sizes[True]) != 1 or len(sizes[False]) != 1:
        return table, ()
    (shards,), (copies,) = sizes[True], sizes[False]
    if shards * copies != world:
        return table, ()
    row = ranks_text(range(rank // shards * shards, (rank // shards + 1) * shards))
    apart = ranks_text(range(rank % shards, world, shards))
    of_copies = pl.col("group_size") == copies
    if shards == copies:
        of_copies &= (pl.col("state") == State.GRADIENT.value) & (pl.col("op") == Op.ALL_REDUCE.value)
    ranks = (
        pl.when(~pl.col("group_size").is_between(2, world - 1).fill_null(value=False))
        .then("group_ranks")
        .when(of_copies)
        .then(pl.lit(apart))
        .otherwise(pl.lit(row))
    )
    notice = Notice(
        code="Q321",
        severity=Severity.INFO,
        message=f"which ranks form the groups of {plural(len(part), 'collective')} is not recorded; hybrid sharding's "
        f"are assumed: shards among {shards} ranks in a row, copies {shards} ranks apart",
        help="later versions of torch record them",
    )
    return table.with_columns(ranks.alias("group_ranks")), (notice,)


def _are_scalars(rows: pl.DataFrame) -> bool:
    """Tell whether collectives move norms, losses or flags only."""
    most = rows["bytes"].max()
    return most is not None and float(most) <= 8 * SCALAR_ELEMENTS  # type: ignore[arg-type]
