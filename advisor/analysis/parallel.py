"""Communication of tensor, pipeline, context and expert parallelism, each for itself, by the names of its groups."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import MAJORITY_SHARE
from paro_advise.advisor.analysis.model import ParallelEntry
from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.facts.attribution import AVERAGES, TENSOR_PARALLEL
from paro_advise.advisor.facts.frames import mean_bytes
from paro_advise.advisor.facts.intervals import Intervals
from paro_advise.core.collective import POINT_TO_POINT
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import polars as pl

    from paro_advise.advisor.analysis.model import CollectiveEntry
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run

# As Megatron-LM (core/parallel_state.py) and device meshes of torchtitan name their groups, in the order asked. A group
# over data parallel ranks, which may span others too, is none of model parallelism.
_DATA = re.compile(r"DATA")
_DIMENSIONS = (
    ("expert", re.compile(r"EXPERT|^mesh_e(?:p|tp)(?:_|$)")),
    ("context", re.compile(r"CONTEXT|^mesh_cp(?:_|$)")),
    ("pipeline", re.compile(r"PIPELINE|EMBEDDING|^mesh_pp(?:_|$)")),
    ("tensor", re.compile(r"TENSOR|^MODEL_PARALLEL|^mesh_(?:tp|sp)(?:_|$)")),
)


def dimension_of(group_description: str) -> str | None:
    """Return the parallelism that a process group serves, None where its name does not tell."""
    if _DATA.search(group_description):
        return None
    return next((name for name, pattern in _DIMENSIONS if pattern.search(group_description)), None)


def data_parallel_size(collectives: Sequence[CollectiveEntry], world: int, source: StrategySource) -> int:
    """Return how many ranks share the data: a group times the groups, as the model states move.

    Args:
        collectives: of the run.
        world: ranks of the job, and the answer where nothing tells.
        source: of the strategy; our own runtime, which states it, spans all ranks.
    """
    if source == StrategySource.METADATA:
        return world

    def largest(entries: list[CollectiveEntry]) -> int:
        return max((entry.group_size or 0 for entry in entries), default=0)

    of = {
        state: [entry for entry in collectives if entry.state == state.value]
        for state in (State.PARAMETER, State.GRADIENT, State.OPTIMIZER)
    }
    replicas = [entry for entry in of[State.GRADIENT] if entry.detail == "replica"]
    main = [entry for entry in of[State.GRADIENT] if entry.detail != "replica"]
    inner = max(largest(of[State.PARAMETER]), largest(main))
    updated = largest(of[State.OPTIMIZER])
    averages = largest([entry for entry in collectives if entry.detail == AVERAGES])
    # What follows the step may cross groups.
    across = max(largest(replicas), updated if 0 < updated < inner else 0, averages, 1)
    if replicas and not largest(replicas) and inner and world % inner == 0:
        return world  # gloo records no size of an all-reduce; what joins the groups joins them all
    return min(world, max(inner * across, updated, largest(replicas))) or world


def parallel_entries(aligned: AlignedRun | None, run: Run) -> dict[str, ParallelEntry]:
    """Sum up the communication of each kind of model parallelism, per rank and step; {} where no group names one."""
    if aligned is None or not len(aligned.table):
        return {}
    import polars as pl

    rows = aligned.table.filter(pl.col("state") == State.OTHER.value)
    names = rows["group_desc"].fill_null("").unique().to_list()
    dimensions = {name: dimension for name in names if (dimension := dimension_of(name)) is not None}
    of = pl.col("group_desc").replace_strict(dimensions, default=None, return_dtype=pl.String)
    of = of.fill_null(pl.when(pl.col("detail") == TENSOR_PARALLEL).then(pl.lit("tensor")))  # before torch 2.1
    named = rows.with_columns(of.alias("dimension")).filter(pl.col("dimension").is_not_null())
    rank_steps = max(1, len(run.steps))
    most_us = {
        (rank, step.label): step.state_exposed_us.get(State.OTHER.value, 0.0)
        for rank, source in run.timed
        for step in source.steps
    }
    return {
        str(key[0]): _entry(part, rank_steps, most_us)
        for key, part in sorted(named.group_by("dimension", maintain_order=True), key=lambda item: str(item[0][0]))
    }


def exchange_of(aligned: AlignedRun | None, run: Run) -> str | None:
    """Return which parallelism most of what no model state exposes serves, where ranks send it to each other.

    Returns:
        "pipeline", "context" or another dimension; "" where no group tells; None where collectives expose more.
    """
    if aligned is None:
        return None
    import polars as pl

    rows = aligned.table.filter(pl.col("state") == State.OTHER.value)
    sent = rows.filter(pl.col("op").is_in([op.value for op in POINT_TO_POINT]))
    if not len(sent) or float(sent["exposed_us"].sum()) <= MAJORITY_SHARE * float(rows["exposed_us"].sum()):
        return None
    names = set(sent["group_desc"].drop_nulls()) - {""}
    if not names:  # kernels of several transfers belong to no recorded call: of what the job has groups for
        names = {group.description for _, item in run.timed for group in item.header.groups if group.size > 1}
    found = {dimension_of(name) for name in names} & {"pipeline", "context"}
    return found.pop() or "" if len(found) == 1 else ""


def _entry(rows: pl.DataFrame, rank_steps: int, most_us: Mapping[tuple[int, str], float]) -> ParallelEntry:
    """Return means per rank and step; collectives that run at the same time count once.

    Args:
        rows: collectives of one kind of parallelism.
        rank_steps: steps of all ranks.
        most_us: by rank and label of a step, what all collectives of the state are exposed for: of those that run at
            the same time their own parts are not known.
    """
    total = exposed = 0.0
    for (rank, label), part in rows.group_by("rank", "step_label", maintain_order=True):
        length_us = Intervals.union_of(part["start_us"].to_numpy(), part["end_us"].to_numpy()).length_us
        whole_us = most_us.get((int(str(rank)), str(label)), length_us)
        total += length_us
        exposed += min(float(part["exposed_us"].sum()), length_us, whole_us)
    sizes = rows["group_size"].drop_nulls()
    return ParallelEntry(
        count=len(rows) / rank_steps,
        bytes=mean_bytes(rows, rank_steps),
        total_us=total / rank_steps,
        exposed_us=exposed / rank_steps,
        group_size=int(str(sizes.max())) if len(sizes) else None,
    )
