"""The ranks among which model states are sharded: what tensor, context and pipeline parallelism leave of a job."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.analysis.parallel import data_parallel_size
from paro_advise.advisor.prediction.constants import EXPERTS_SHARE
from paro_advise.core.collective import POINT_TO_POINT, Op
from paro_advise.core.model_state import State
from paro_advise.core.span import GroupSpan

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Analysis


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
    experts = _experts(analysis)
    factor = world // size if size and world % size == 0 else 1
    if factor == 1:
        return DataParallel(world_size=world, ranks_per_node=per_node, note="", unmodelled=experts)
    seen = _seen_per_node(analysis, size)
    found = max(1, per_node // factor)
    here = seen or (found if size % found == 0 else 1)
    note = (
        f"{size} of {world} ranks share the data; the model is cut in {factor} by tensor, context or pipeline "
        "parallelism, whose traffic stays as it is"
    )
    has_pipeline = any(entry.op in POINT_TO_POINT and entry.count for entry in analysis.collectives)
    pipeline = "pipeline parallelism is not modelled: its bubbles change with the strategy" if has_pipeline else ""
    return DataParallel(
        world_size=size, ranks_per_node=here, note=note, unmodelled=pipeline or experts, is_placed=seen is not None
    )


def _experts(analysis: Analysis) -> str:
    """Return that parameters lie in groups of several sizes, or experts on ranks of their own; "" where neither shows.

    Dense parameters are sharded over all ranks then, and those of experts over the ranks that share an expert.
    """
    if analysis.run.strategy.source == StrategySource.METADATA:
        return ""
    moved: Counter[int] = Counter()
    for entry in analysis.collectives:
        is_first = entry.detail != "replica"  # no second hop, between groups
        if entry.state == State.GRADIENT and entry.op == Op.REDUCE_SCATTER and entry.group_size and is_first:
            moved[entry.group_size] += round(entry.count * (entry.bytes or 0))
    sizes = sorted((size for size, count in moved.items() if count > EXPERTS_SHARE * moved.total()), reverse=True)
    if len(sizes) > 1:
        named = " and of ".join(map(str, sizes))
        return f"gradients are sharded over groups of {named} ranks, as beside experts, and one size is modelled"
    if "expert" in analysis.model_parallel:
        return "parameters of experts, which some ranks have for themselves, are not counted"
    return ""


def _seen_per_node(analysis: Analysis, size: int) -> int | None:
    """Return how many data-parallel ranks share a node where the group of all is seen to be in one, or one on each."""
    moved = [entry for entry in analysis.collectives if entry.state in (State.PARAMETER, State.GRADIENT)]
    widest = max(moved, key=lambda entry: entry.group_size or 0)
    if (widest.group_size or 0) != size:
        return None
    return {GroupSpan.INTER: 1, GroupSpan.INTRA: size}.get(widest.span)
