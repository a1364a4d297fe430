"""Infers the running strategy from the attributed collectives of one rank's typical step.

A strategy is a triple of levels for (parameter, gradient, optimizer): N replicated, I sharded in
a group, G sharded over the world (docs/strategies.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import (
    FROZEN_RATIO,
    GATHERS_AGAIN_RATIOS,
    LEAST_REPEATED_SHARE,
    SENDS_A_PASS,
)
from paro_advise.advisor.facts.attribution import ROOT_MODULE, with_modules
from paro_advise.advisor.facts.evidence import Evidence
from paro_advise.advisor.facts.model import OTHER_STEPS_CODE
from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes, is_of_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.trace_parsers.kineto.constants import NO_STEPS_CODE
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    import polars as pl

    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedStrategy:
    """The strategy of a run.

    Attributes:
        triple: levels while computing; a parameter that is gathered once per micro-batch and
            kept for backward counts as N. None when it cannot be told.
        triple_at_rest: levels between steps.
        group_size: ranks of the group that level I refers to, None without one.
        source: "inferred" or "" when nothing was found.
        reasons: the observations it is based on.
    """

    triple: str | None
    triple_at_rest: str | None
    group_size: int | None
    source: str
    reasons: tuple[str, ...]


NOTHING_OBSERVED = ObservedStrategy(triple=None, triple_at_rest=None, group_size=None, source="", reasons=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraining:
    """How a run trains, as its traces show it.

    Attributes:
        strategy: levels and group size.
        micro_batches: per step, None when they cannot be told.
        parameter_count: trained parameters, None when they cannot be told.
        total_parameter_count: with the frozen ones, None where gathers show no more than gradients do.
        notices: what had to be assumed.
    """

    strategy: ObservedStrategy
    micro_batches: int | None
    parameter_count: int | None
    total_parameter_count: int | None
    notices: tuple[Notice, ...]


def observe_training(run: Run) -> ObservedTraining:
    """Read strategy, micro-batches and parameters off the typical step of the first rank that communicates.

    What our own runtime states about itself goes before what is inferred.
    """
    typical = _typical_step(run) if run.trains is not False else None
    micro = _median(item.facts.num_micro_batches or None for _, item in run.timed)
    stated = next((item.header.stated for _, item in run.timed if item.header.stated), None)
    counted = parameter_count(typical, micro or 1) if typical is not None else None
    codes = {notice.code for _, item in run.timed for notice in item.facts.notices}
    if micro is None and NO_STEPS_CODE in codes:
        counted = None  # of as many steps as the trace may hold
    ops = typical["op"].to_list() if typical is not None else []
    names_forwards = any(item.facts.num_forwards for _, item in run.timed)
    if micro == 1 and not names_forwards and ops.count(Op.SEND.value) > SENDS_A_PASS:
        micro = None  # a pipeline that runs all forwards first and goes back through them in reverse shows one pass
    updates, in_all = _updates(run, typical), micro
    if updates > 1 and micro:
        micro = micro // updates if micro % updates == 0 else None
    if typical is not None and run.framework.is_ddp and not _are_repeats(_reductions(typical)):
        # Passes of different parameters, as those of a GAN's two models, add no gradients up.
        micro, counted = None, _elements_of_any_pass(_reductions(typical))
    frozen = _NONE_FROZEN
    if typical is not None and stated is None:
        frozen = _frozen(typical, in_all or 1, counted, run)
    if typical is None:
        strategy = NOTHING_OBSERVED if run.timed else _stated_in_logs(run)
    elif stated is not None:
        triple, reasons = stated.triple, ("the runtime wrote its strategy into the trace",)
        strategy = ObservedStrategy(
            triple=triple, triple_at_rest=triple, group_size=stated.group_size, source="metadata", reasons=reasons
        )
    elif 1 < updates > _passes(_reductions(typical)):
        strategy = NOTHING_OBSERVED  # each rank trains by itself in between, as in local SGD
    else:
        strategy = infer_strategy(typical, run.world_size, micro or 1, run.framework)
    return ObservedTraining(
        strategy=strategy,
        micro_batches=micro,
        parameter_count=(stated.parameters if stated else None) or counted,
        total_parameter_count=frozen.total,
        notices=(
            *((_one_micro_batch(run),) if typical is not None and micro is None else ()),
            *((_other_steps(updates),) if updates != 1 else ()),
            *((_EXPERTS,) if counted and Op.ALL_TO_ALL.value in ops else ()),
            *frozen.notices,
        ),
    )


def _updates(run: Run, typical: pl.DataFrame | None) -> int:
    """Return how often one model is updated in a step as the script marks it, 0 where many hold none.

    Passes of different parameters are those of several models, such as a GAN's, which are updated once each.
    """
    if typical is None or not _are_repeats(_reductions(typical)):
        return 1
    found = _median(item.facts.num_updates for _, item in run.timed)
    return 1 if found is None else found


_EXPERTS = Notice(
    code="Q327",
    severity=Severity.INFO,
    message="all-to-alls may be those of experts: parameters that each rank has for itself are not counted",
    help="give --measured-peak where memory decides",
)


def _other_steps(count: int) -> Notice:
    message = f"each step as the script marks it holds {count} steps of the optimizer; figures are of all {count}"
    if not count:
        message = "many steps as the script marks them hold no step of the optimizer, as where each is a micro-batch"
    help_text = "call the profiler's step() after each step of the optimizer"
    return Notice(code=OTHER_STEPS_CODE, severity=Severity.WARNING, message=message, help=help_text)


def _stated_in_logs(run: Run) -> ObservedStrategy:
    """Return the strategy that a log's stage of ZeRO names (Rajbhandari et al., 2020)."""
    stage = next((item.header.zero_stage for item in run.untimed if item.header.zero_stage is not None), None)
    triple = {0: "NNN", 1: "NNG", 2: "NGG", 3: "GGG"}.get(-1 if stage is None else stage)
    if triple is None:
        return NOTHING_OBSERVED
    reasons = (f"the log says ZeRO stage {stage}",)
    return ObservedStrategy(triple=triple, triple_at_rest=triple, group_size=None, source="metadata", reasons=reasons)


def _one_micro_batch(run: Run) -> Notice:
    are_passes_seen = any(item.facts.num_micro_batches for _, item in run.timed)
    return Notice(
        code="Q320",
        severity=Severity.INFO,
        message="the number of micro-batches cannot be told; one per step is assumed",
        help="" if are_passes_seen else "record CPU activities too, so that backward passes can be counted",
    )


def _typical_step(run: Run) -> pl.DataFrame | None:
    """Return the collectives of the typical step of the first rank that has any."""
    import polars as pl

    for _, item in run.timed:
        part = item.collectives.filter(pl.col("step") == item.typical_step)
        if len(part):
            return part
    return None


def _median(of_ranks: Iterable[int | None]) -> int | None:
    counts = sorted(count for count in of_ranks if count is not None)
    return counts[len(counts) // 2] if counts else None


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
    passes = _passes(main)
    in_passes = main.filter(pl.col("phase") == "backward")
    return _Groups(
        forward=_sizes(gathers.filter(~in_backward), _sizes(main)),
        backward=_sizes(gathers if gathers_again else gathers.filter(in_backward), _sizes(main)),
        reduced=_sizes(main),
        reduced_each_pass=len(in_passes) > 0 and passes >= micro_batches,
        held_unreduced=0 < passes < micro_batches,
        scattered=bool((main["op"] == Op.REDUCE_SCATTER.value).any()),
        replicas=_sizes(replicas),
        has_replicas=len(replicas) > 0,
        updated=_sizes(updates),
        updated_in_shards=len(elsewhere) < len(updates),
    )


def _passes(gradients: pl.DataFrame) -> int:
    """Return in how many micro-batches gradients are reduced.

    DeepSpeed flushes its last bucket after backward: such a reduction belongs to its pass, as its
    like in earlier passes shows.
    """
    repeated = _in_passes(gradients)
    # Or all of them after the last pass, by the script's own hand.
    return int(repeated["micro_batch"].n_unique()) if len(repeated) else min(1, len(gradients))


def _in_passes(gradients: pl.DataFrame) -> pl.DataFrame:
    """Return the reductions of backward passes, with those that come after one and have their like in another."""
    import polars as pl

    inside = gradients.filter(pl.col("phase") != "boundary")
    like = inside.select("op", "bytes", "group_size").unique()
    late = gradients.filter(pl.col("phase") == "boundary").join(like, on=["op", "bytes", "group_size"], how="semi")
    return pl.concat([inside, late])


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
        source="inferred",
        reasons=tuple(reasons),
    )


def _ddp_strategy(step: pl.DataFrame, framework: Framework) -> ObservedStrategy:
    """Return the strategy of DDP where no group's size is recorded, as by gloo for all-reduces in subgroups."""
    if not framework.is_ddp or set(_reductions(step)["op"].to_list()) != {Op.ALL_REDUCE.value}:
        return NOTHING_OBSERVED
    reasons = ("gradients all-reduced over groups of a size that is not recorded", "parameters never gathered")
    return ObservedStrategy(triple="NNN", triple_at_rest="NNN", group_size=None, source="inferred", reasons=reasons)


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
    if seen.scattered and framework == Framework.MEGATRON:
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


@dataclass(frozen=True, slots=True)
class _Frozen:
    """All parameters where some are frozen, None where none show; and what cannot be told."""

    total: int | None
    notices: tuple[Notice, ...] = ()


_NONE_FROZEN = _Frozen(None)
_MAY_BE_FROZEN = Notice(
    code="Q324",
    severity=Severity.INFO,
    message="forward gathers more than gradients are reduced of, in sizes that may be those of what trains; whether "
    "parameters are gathered several times a step or some are frozen cannot be told, and no frozen ones are assumed",
    help="FSDP2's annotations name the units, FSDP1's do not; give --measured-peak where memory decides",
)


def _frozen(step: pl.DataFrame, micro_batches: int, trained: int | None, run: Run) -> _Frozen:
    """Tell whether forward gathers clearly more parameters than gradients reduce.

    Where gathers carry no names, one of the size of a unit that trains may be that unit once more: preference
    optimization and reinforcement learning run a model several times before they change it. DeepSpeed reduces in
    buckets of other sizes, but what its passes gather it gathers again in backward.
    """
    import polars as pl

    gathered = _forward_parameters(step, micro_batches)
    if not gathered or not trained or gathered <= FROZEN_RATIO * trained:
        return _NONE_FROZEN
    gathers, gradients = _forward_gathers(step), _reductions(step)
    if run.framework == Framework.DEEPSPEED:
        again = _elements(_gathers(step).filter(pl.col("detail").str.starts_with("backward"))) or 0
        may_repeat = gathered * max(1, micro_batches) > FROZEN_RATIO * again
    else:
        is_like = _name_gathers(gathers) is None and _element_counts(gathers) <= _element_counts(gradients)
        may_repeat = is_like and not _is_of_one_forward(gathers, micro_batches, run)
    if may_repeat:
        return _Frozen(None, (_MAY_BE_FROZEN,))
    return _Frozen(gathered)


def _is_of_one_forward(gathers: pl.DataFrame, micro_batches: int, run: Run) -> bool:
    """Tell whether all gathers belong to whole models' forwards, of which there is one per micro-batch."""
    forwards = _median(item.facts.num_forwards for _, item in run.timed)
    is_within = set(gathers["evidence"].to_list()) == {Evidence.ANNOTATION.value}
    return is_within and forwards is not None and forwards <= micro_batches


def _name_gathers(gathers: pl.DataFrame) -> pl.DataFrame | None:
    """Return gathers with the modules that they are for (``with_modules``), None where not all of them name one."""
    named = with_modules(gathers)
    modules = set(named["module"].to_list())
    return named if None not in modules and modules - {ROOT_MODULE} else None


def _elements(rows: pl.DataFrame) -> int | None:
    total = 0
    for size, dtype in rows.select("bytes", "dtype").iter_rows():
        width = dtype_bytes(dtype) if dtype and not is_of_bytes(dtype) else None
        if size is None or not width:
            return None
        total += size // width
    return total or None


def _element_counts(rows: pl.DataFrame) -> set[int]:
    """Return the numbers of elements that collectives move; parameters and gradients may be sent in different types."""
    widths = [dtype_bytes(dtype) or 1 for dtype in rows["dtype"].fill_null("")]
    return {size // width for size, width in zip(rows["bytes"], widths, strict=True) if size is not None}


def _forward_parameters(step: pl.DataFrame, micro_batches: int) -> int | None:
    """Return the parameters that forward gathers, None where it gathers none or sizes are missing."""
    gathers = _forward_gathers(step)
    named = _name_gathers(gathers)
    if named is not None:
        return _elements(named.unique(subset=["module", "bytes", "dtype"]))
    counted = _elements(gathers)
    return counted // max(1, micro_batches) if counted else None


def _forward_gathers(step: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return _gathers(step).filter(~pl.col("detail").str.starts_with("backward"))


def _gathers(step: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return step.filter(pl.col("state") == State.PARAMETER.value)


def _reductions(step: pl.DataFrame) -> pl.DataFrame:
    """Return the reductions of gradients, without those that only bring replicas together."""
    import polars as pl

    return step.filter((pl.col("state") == State.GRADIENT.value) & (pl.col("detail") != "replica"))


def parameter_count(step: pl.DataFrame, micro_batches: int) -> int | None:
    """Return the trainable parameters as the reductions of one step show them (with padding).

    None when neither gradients nor gathers tell.
    """
    gradients = _reductions(step)
    counted = _elements(gradients)
    return counted // max(1, _passes(gradients)) if counted else _forward_parameters(step, micro_batches)


def _are_repeats(gradients: pl.DataFrame) -> bool:
    """Tell whether all passes of a step reduce as many bytes, as those of one model do."""
    import polars as pl

    inside = _in_passes(gradients).filter(pl.col("bytes").is_not_null())
    totals = inside.group_by("micro_batch").agg(pl.col("bytes").sum())["bytes"].to_list()
    return not totals or min(totals) >= LEAST_REPEATED_SHARE * max(totals)


def _elements_of_any_pass(gradients: pl.DataFrame) -> int | None:
    """Return the elements of all buckets, those that several passes reduce once."""
    import polars as pl

    kind = ["bytes", "dtype", "group_size"]
    most = gradients.group_by("micro_batch", *kind).len().group_by(kind).agg(pl.col("len").max())
    return _elements(most.select(pl.exclude("len").repeat_by("len").explode()))
