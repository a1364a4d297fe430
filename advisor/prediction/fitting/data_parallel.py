"""The ranks among which model states are sharded: what tensor, context and pipeline parallelism leave of a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.parallel import data_parallel_size
from paro_advise.core.collective import Op
from paro_advise.core.model_state import State

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis

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
    size = data_parallel_size(analysis.collectives, world, analysis.run.strategy.source)
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


def _seen_per_node(analysis: Analysis, size: int) -> int | None:
    """Return how many data-parallel ranks share a node where the group of all is seen to be in one, or one on each."""
    moved = [entry for entry in analysis.collectives if entry.state in (State.PARAMETER, State.GRADIENT)]
    widest = max(moved, key=lambda entry: entry.group_size or 0)
    if (widest.group_size or 0) != size:
        return None
    return {"inter": 1, "intra": size}.get(widest.span)
