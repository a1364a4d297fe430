"""The ranks among which model states are sharded: what tensor, context and pipeline parallelism leave of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis, CollectiveEntry

_PIPELINE = (Op.SEND, Op.RECV, Op.SEND_RECV)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """The data-parallel ranks of a job.

    Attributes:
        world_size: how many.
        ranks_per_node: of them on a node.
        note: what the rest of the job is, for people; "" where there is none.
        unmodelled: why predictions would mislead, "" where they do not.
        is_placed: beside tensor parallelism their groups were seen inside nodes, or with one rank on each.
    """

    world_size: int
    ranks_per_node: int
    note: str
    unmodelled: str
    is_placed: bool = False


def data_parallel(analysis: Analysis, world: int, per_node: int) -> DataParallel:
    """Return the data-parallel ranks as the groups of parameters and gradients show them.

    Args:
        analysis: the run.
        world, per_node: ranks of the job, and on a node.
    """
    size = _data_parallel_size(analysis, world)
    factor = world // size if size and world % size == 0 else 1
    if factor == 1:
        return DataParallel(world_size=world, ranks_per_node=per_node, note="", unmodelled="")
    seen = _seen_per_node(analysis, size)
    found = max(1, per_node // factor)
    here = seen or (found if size % found == 0 else 1)
    note = (
        f"{size} of {world} ranks share the data; the model is cut in {factor} by tensor, context or pipeline "
        "parallelism, whose traffic stays as it is"
    )
    has_pipeline = any(entry.op in _PIPELINE and entry.count for entry in analysis.collectives)
    unmodelled = "pipeline parallelism is not modelled: its bubbles change with the strategy" if has_pipeline else ""
    return DataParallel(
        world_size=size, ranks_per_node=here, note=note, unmodelled=unmodelled, is_placed=seen is not None
    )


def _data_parallel_size(analysis: Analysis, world: int) -> int:
    """Return the ranks of a group times the groups, as parameters, gradients and updated parameters move."""
    if analysis.run.strategy.source == "metadata":
        return world

    def largest(entries: list[CollectiveEntry]) -> int:
        return max((entry.group_size or 0 for entry in entries), default=0)

    of = {
        state: [entry for entry in analysis.collectives if entry.state == state.value]
        for state in (State.PARAMETER, State.GRADIENT, State.OPTIMIZER)
    }
    replicas = [entry for entry in of[State.GRADIENT] if entry.detail == "replica"]
    main = [entry for entry in of[State.GRADIENT] if entry.detail != "replica"]
    inner = max(largest(of[State.PARAMETER]), largest(main))
    updated = largest(of[State.OPTIMIZER])
    # What follows the step may cross groups.
    across = max(largest(replicas), updated if 0 < updated < inner else 0, 1)
    if replicas and not largest(replicas) and inner and world % inner == 0:
        return world  # gloo records no size of an all-reduce; what joins the groups joins them all
    return min(world, max(inner * across, updated, largest(replicas))) or world


def _seen_per_node(analysis: Analysis, size: int) -> int | None:
    """Return how many data-parallel ranks share a node where the group of all is seen to be in one, or one on each."""
    moved = [entry for entry in analysis.collectives if entry.state in (State.PARAMETER, State.GRADIENT)]
    widest = max(moved, key=lambda entry: entry.group_size or 0)
    if (widest.group_size or 0) != size:
        return None
    return {"inter": 1, "intra": size}.get(widest.span)
