"""Infers the running strategy from the attributed collectives of one rank's typical step.

A strategy is a triple of levels for (parameter, gradient, optimizer): N replicated, I sharded in
a group, G sharded over the world (docs/strategies.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import COPIED_SHARE, GATHERS_AGAIN_RATIOS
from paro_advise.advisor.analysis.observed.parameters import reducing_passes, reductions
from paro_advise.core.collective import Op
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.policies.strategy import Strategy

if TYPE_CHECKING:
    import polars as pl


class StrategySource(StrEnum):
    """Where a run's strategy is from."""

    INFERRED = "inferred"  # from its collectives
    METADATA = "metadata"  # stated by our own runtime, or by what the job's logs say
    NONE = ""  # nothing tells


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStrategy:
    """The strategy of a run.

    Attributes:
        triple: levels while computing; a parameter that is gathered once per micro-batch and
            kept for backward counts as N. None when it cannot be told.
        triple_at_rest: levels between steps.
        group_size: ranks of the group that level I refers to, None without one.
        source: where it is from.
        reasons: the observations it is based on.
        copy_group_size: since 1.2; ranks over which backward gathers parameters that forward gathers over all, from a
            second copy in each of their groups; None without one.
    """

    triple: str | None
    triple_at_rest: str | None
    group_size: int | None
    source: StrategySource
    reasons: tuple[str, ...]
    copy_group_size: int | None = None

    @property
    def computing(self) -> Strategy | None:
        """Return the levels while computing."""
        return Strategy.parse(self.triple) if self.triple else None

    @property
    def at_rest(self) -> Strategy | None:
        """Return the levels between steps."""
        return Strategy.parse(self.triple_at_rest) if self.triple_at_rest else None


NOTHING_OBSERVED = ObservedStrategy(
    triple=None, triple_at_rest=None, group_size=None, source=StrategySource.NONE, reasons=()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Group sizes seen per purpose (None in a set: the size is unknown)."""

    forward: set[int]
    backward: set[int]
    reduced: set[int]  # gradients, every kind of reduction but replicas
    reduced_each_pass: bool
    scattered: bool
    held_unreduced: bool  # reduced in fewer micro-batches than there are
    replicas: set[int]
    has_replicas: bool
    updated: set[int]
    copied: int | None  # ranks over which backward gathers from a copy
    updated_in_shards: bool  # updated parameters are gathered in the groups that gather parameters for passes


def _sizes(table: pl.DataFrame, else_: set[int] | None = None) -> set[int]:
    """Return the sizes of groups; where none is recorded of what was seen, those of the units' other collectives."""
    sizes = {int(size) for size in table["group_size"].drop_nulls().to_list()}
    return sizes or (else_ or set() if len(table) else set())


def _observe(step: pl.DataFrame, micro_batches: int) -> _Groups:
    import polars as pl

    def of(state: State) -> pl.DataFrame:
        return step.filter(pl.col("state") == state.value)

    gathers, updates = of(State.PARAMETER), of(State.OPTIMIZER)
    named = gathers.filter(pl.concat_str("group_name", "group_ranks", ignore_nulls=True) != "")
    elsewhere = updates.join(named, on=["group_name", "group_ranks", "group_size"], how="anti", nulls_equal=True)
    in_backward = pl.col("detail").str.starts_with("backward")
    is_replica = pl.col("detail") == "replica"
    replicas, main = (of(State.GRADIENT).filter(mask) for mask in (is_replica, ~is_replica))
    # Without phases only the numbers tell: units are gathered once more than they are reduced where backward does so.
    scatters = main.filter(pl.col("op") == Op.REDUCE_SCATTER.value)
    is_unphased = len(gathers) > 0 and bool((gathers["detail"] == "").all())
    least, most = GATHERS_AGAIN_RATIOS
    gathers_again = is_unphased and least * len(scatters) <= len(gathers) <= most * len(scatters)
    passes = reducing_passes(main)
    in_passes = main.filter(pl.col("phase") == "backward")
    return _Groups(
        forward=_sizes(gathers.filter(~in_backward), _sizes(main)),
        backward=_sizes(gathers if gathers_again else gathers.filter(in_backward), _sizes(main)),
        copied=_copied(gathers.filter(~in_backward), gathers.filter(in_backward)),
        reduced=_sizes(main),
        reduced_each_pass=len(in_passes) > 0 and passes >= micro_batches,
        held_unreduced=0 < passes < micro_batches,
        scattered=bool((main["op"] == Op.REDUCE_SCATTER.value).any()),
        replicas=_sizes(replicas),
        has_replicas=len(replicas) > 0,
        updated=_sizes(updates),
        updated_in_shards=len(elsewhere) < len(updates),
    )


def _copied(forward: pl.DataFrame, backward: pl.DataFrame) -> int | None:
    """Return over how many ranks backward gathers what forward gathers over more, None where it does not.

    Experts that are sharded over fewer ranks than the rest are gathered so in both.
    """
    sizes = forward["group_size"].max(), backward["group_size"].max()
    if not isinstance(sizes[0], int) or not isinstance(sizes[1], int) or sizes[1] >= sizes[0]:
        return None
    whole = sum(forward.filter(forward["group_size"] == sizes[0])["bytes"].drop_nulls().to_list())
    again = sum(backward["bytes"].drop_nulls().to_list())
    return sizes[1] if again >= COPIED_SHARE * whole > 0 else None


def infer_strategy(
    step: pl.DataFrame, world_size: int | None, micro_batches: int, framework: Framework
) -> ObservedStrategy:
    """Infer the strategy.

    Args:
        step: attributed collectives of one rank and step (RankFacts' table).
        world_size: None when unknown; then the largest group stands in for it.
        micro_batches: per step.
        framework: as RankFacts names it.
    """
    seen = _observe(step, micro_batches)
    everything = seen.forward | seen.backward | seen.reduced | seen.replicas | seen.updated
    if not everything:
        return _ddp_strategy(step, framework)
    # Tensor or pipeline parallelism leaves fewer data-parallel ranks than the world has.
    inner_size = max(seen.forward | seen.reduced | seen.backward, default=1)
    across = max(seen.replicas, default=1)
    if seen.has_replicas and not seen.replicas and world_size and world_size % inner_size == 0:
        across = world_size // inner_size  # their size is not recorded, but they join the groups
    if seen.updated and max(seen.updated) < inner_size:
        across = max(across, *seen.updated)
    world = min(world_size or 1 << 62, max(inner_size * across, *everything))
    # What follows the step may cross groups: only when nothing else tells is it the group's size.
    inner = {size for size in (seen.forward | seen.reduced) or seen.updated if size < world}
    reasons: list[str] = []

    def level(sizes: set[int]) -> str:
        return "G" if not sizes or max(sizes) >= world else "I"

    if seen.forward or seen.backward:
        rest_p = level(seen.forward or seen.backward)
        kept = bool(seen.forward) and not seen.backward
        peak_p = "N" if kept else rest_p
        reasons.append(
            f"parameters gathered over {_list(seen.forward or seen.backward)} ranks in forward and "
            + ("kept for backward" if kept else f"over {_list(seen.backward)} again in backward")
        )
    else:
        rest_p = peak_p = "N"
        reasons.append("parameters never gathered for compute")
    gradient = _gradient_level(seen, rest_p, world, framework, reasons)
    optimizer = _optimizer_level(seen, rest_p, gradient, world, reasons)
    # What level I refers to: the group of the coarsest state that is sharded in one.
    sizes = {"p": seen.forward or seen.backward, "g": seen.reduced, "o": seen.updated}
    levels = {"p": rest_p, "g": gradient, "o": optimizer}
    shared = [sizes[key] & inner or inner for key in sizes if levels[key] == "I"]
    groups = max(next(filter(None, shared), set()), default=None)
    return ObservedStrategy(
        triple=peak_p + gradient + optimizer,
        triple_at_rest=rest_p + gradient + optimizer,
        group_size=groups,
        source=StrategySource.INFERRED,
        reasons=tuple(reasons),
        copy_group_size=seen.copied if rest_p == "G" else None,
    )


def _ddp_strategy(step: pl.DataFrame, framework: Framework) -> ObservedStrategy:
    """Return the strategy of DDP where no group's size is recorded, as by gloo for all-reduces in subgroups."""
    if not framework.is_ddp or set(reductions(step)["op"].to_list()) != {Op.ALL_REDUCE.value}:
        return NOTHING_OBSERVED
    reasons = ("gradients all-reduced over groups of a size that is not recorded", "parameters never gathered")
    return ObservedStrategy(
        triple="NNN", triple_at_rest="NNN", group_size=None, source=StrategySource.INFERRED, reasons=reasons
    )


def _list(sizes: set[int]) -> str:
    return "/".join(map(str, sorted(sizes)))


def _gradient_level(seen: _Groups, parameter: str, world: int, framework: Framework, reasons: list[str]) -> str:
    if not seen.reduced:
        reasons.append("no gradient reduction seen: taken at the parameters' level")
        return parameter
    size = "G" if max(seen.reduced) >= world else "I"
    if seen.scattered and seen.held_unreduced:
        reasons.append(f"gradients accumulated whole, reduce-scattered over {_list(seen.reduced)} ranks once a step")
        return "N"
    if seen.scattered and framework == Framework.MEGATRON and parameter == "N":  # else it is Megatron-FSDP
        reasons.append(
            f"gradients reduce-scattered over {_list(seen.reduced)} ranks out of buffers that Megatron keeps whole"
        )
        return "N"
    if seen.scattered:
        reasons.append(f"gradients reduce-scattered over {_list(seen.reduced)} ranks")
        return size
    reasons.append(f"gradients all-reduced over {_list(seen.reduced)} ranks")
    if parameter != "N":
        reasons.append("each rank keeps its shard: parameters are sharded too")
        return parameter
    is_bucketed_by_zero = not framework.is_ddp
    if seen.updated and seen.reduced_each_pass and is_bucketed_by_zero:
        reasons.append("reduced in every backward and updated parameters gathered: ZeRO-2")
        return size
    return "N"


def _optimizer_level(seen: _Groups, parameter: str, gradient: str, world: int, reasons: list[str]) -> str:
    if seen.updated:
        spans_world = max(seen.updated) >= world
        across_groups = parameter == "I" and not spans_world and not seen.updated_in_shards
        reasons.append(f"updated parameters gathered over {_list(seen.updated)} ranks after the step")
        return "G" if spans_world or across_groups else "I"
    finest = max((parameter, gradient), key="NIG".index)
    reasons.append("nothing moves after the step: optimizer states lie where gradients end")
    return finest
