"""Reads off the typical step how a run trains."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paro_advise.advisor.analysis.constants import SENDS_A_PASS
from paro_advise.advisor.analysis.observed.parameters import (
    NONE_FROZEN,
    are_repeats,
    elements_of_any_pass,
    frozen_parameters,
    in_passes_by_order,
    median_of,
    parameter_count,
    reducing_passes,
    reductions,
    unit_order,
)
from paro_advise.advisor.analysis.observed.strategy import (
    NOTHING_OBSERVED,
    ObservedStrategy,
    StrategySource,
    infer_strategy,
)
from paro_advise.advisor.facts.model import OTHER_STEPS_CODE
from paro_advise.advisor.wording.quantities import count_text
from paro_advise.core.collective import Op
from paro_advise.trace_parsers.kineto.constants import JOINED_CODE, NO_STEPS_CODE
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    import polars as pl

    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedTraining:
    """How a run trains, as its traces show it.

    Attributes:
        strategy: levels and group size.
        micro_batches: per step, None when they cannot be told.
        parameter_count: trained parameters, None when they cannot be told.
        total_parameter_count: with the frozen ones, None where gathers show no more than gradients do.
        unit_bytes: what one pass sends of the model, in the order of its forward; () where no order shows.
        notices: what had to be assumed.
    """

    strategy: ObservedStrategy
    micro_batches: int | None
    parameter_count: int | None
    total_parameter_count: int | None
    unit_bytes: tuple[int, ...]
    notices: tuple[Notice, ...]


def observe_training(run: Run) -> ObservedTraining:
    """Read strategy, micro-batches and parameters off the typical step of the first rank that communicates.

    What our own runtime states about itself goes before what is inferred.
    """
    typical = _typical_step(run) if run.trains is not False else None
    micro = median_of(item.facts.num_micro_batches or None for _, item in run.timed)
    codes = {notice.code for _, item in run.timed for notice in item.facts.notices}
    # Without marks a step may be any number of steps, which repeat as well.
    by_order = None
    if micro is None and typical is not None and NO_STEPS_CODE not in codes:
        by_order = in_passes_by_order(typical)
    if by_order is not None:
        typical, micro = by_order, by_order["micro_batch"].n_unique()
    stated = next((item.header.stated for _, item in run.timed if item.header.stated), None)
    counted = parameter_count(typical, micro or 1) if typical is not None else None
    if micro is None and NO_STEPS_CODE in codes:
        counted = None  # of as many steps as the trace may hold
    ops = typical["op"].to_list() if typical is not None else []
    names_forwards = any(item.facts.num_forwards for _, item in run.timed)
    if micro == 1 and not names_forwards and ops.count(Op.SEND.value) > SENDS_A_PASS:
        micro = None  # a pipeline that runs all forwards first and goes back through them in reverse shows one pass
    updates, in_all = _updates(run, typical), micro
    if updates > 1 and micro:
        micro = micro // updates if micro % updates == 0 else None
    if typical is not None and run.framework.is_ddp and not are_repeats(reductions(typical)):
        # Passes of different parameters, as those of a GAN's two models, add no gradients up.
        micro, counted = None, elements_of_any_pass(reductions(typical))
    frozen = NONE_FROZEN
    if typical is not None and stated is None:
        frozen = frozen_parameters(typical, in_all or 1, counted, run)
    if typical is None:
        strategy = NOTHING_OBSERVED if run.timed else _stated_in_logs(run)
    elif stated is not None:
        triple, reasons = stated.triple, ("the runtime wrote its strategy into the trace",)
        strategy = ObservedStrategy(
            triple=triple,
            triple_at_rest=triple,
            group_size=stated.group_size,
            source=StrategySource.METADATA,
            reasons=reasons,
        )
    elif 1 < updates > reducing_passes(reductions(typical)):
        strategy = NOTHING_OBSERVED  # each rank trains by itself in between, as in local SGD
    else:
        strategy = infer_strategy(typical, run.world_size, micro or 1, run.framework)
    return ObservedTraining(
        strategy=strategy,
        micro_batches=micro,
        parameter_count=(stated.parameters if stated else None) or counted,
        total_parameter_count=frozen.total,
        unit_bytes=() if typical is None else unit_order(typical),
        notices=(
            *((_one_micro_batch(run),) if typical is not None and micro is None else ()),
            *((_repeated(micro),) if by_order is not None and micro else ()),
            *((_other_steps(updates),) if updates != 1 else ()),
            *_joined_on_some(run),
            *((_experts(typical, counted),) if typical is not None and counted and Op.ALL_TO_ALL.value in ops else ()),
            *frozen.notices,
        ),
    )


def _updates(run: Run, typical: pl.DataFrame | None) -> int:
    """Return how often one model is updated in a step as the script marks it, 0 where many hold none.

    Passes of different parameters are those of several models, such as a GAN's, which are updated once each.
    """
    if typical is None or not are_repeats(reductions(typical)):
        return 1
    found = median_of(item.facts.num_updates for _, item in run.timed)
    return 1 if found is None else found


_EXPERTS = Notice(
    code="Q327",
    severity=Severity.INFO,
    message="all-to-alls may be those of experts: parameters that each rank has for itself are not counted",
    help="give --measured-peak where memory decides",
)


def _experts(typical: pl.DataFrame, counted: int) -> Notice:
    """Say what all-to-alls may mean for the number of parameters, and how many fewer ranks share, if any do."""
    import polars as pl

    scattered = reductions(typical).filter(pl.col("op") == Op.REDUCE_SCATTER.value)
    sizes = scattered.group_by("group_size").agg(pl.col("bytes").sum()).drop_nulls().sort("group_size").rows()
    total = sum(num_bytes for _, num_bytes in sizes)
    if len(sizes) != 2 or not total:
        return _EXPERTS
    (few, of_few), (many, _) = sizes
    own = round(counted * of_few / total)
    whole = counted - own + own * many // few
    return replace(
        _EXPERTS,
        severity=Severity.WARNING,
        message=f"{count_text(own)} of the {count_text(counted)} parameters are sharded over {few} ranks, the others "
        f"over {many}, as where each {few} ranks have experts of their own: the model has {count_text(whole)} then, "
        "and memory is more than what is said of it",
    )


def _other_steps(count: int) -> Notice:
    message = f"each step as the script marks it holds {count} steps of the optimizer; figures are of all {count}"
    if not count:
        message = "many steps as the script marks them hold no step of the optimizer, as where each is a micro-batch"
    help_text = "call the profiler's step() after each step of the optimizer"
    return Notice(code=OTHER_STEPS_CODE, severity=Severity.WARNING, message=message, help=help_text)


def _joined_on_some(run: Run) -> tuple[Notice, ...]:
    """Say that marked steps are micro-batches on some ranks, and that recordings of others are too short to tell."""
    joined = [rank for rank, item in run.timed if any(note.code == JOINED_CODE for note in item.facts.notices)]
    if len(joined) in (0, len(run.timed)):
        return ()
    message = (
        f"{len(joined)} of {len(run.timed)} ranks mark micro-batches as steps, which were joined to those of the "
        "optimizer; the recordings of the others do not tell, and their steps count as they are marked"
    )
    help_text = "call the profiler's step() after each step of the optimizer, or record as many steps on each rank"
    return (Notice(code=OTHER_STEPS_CODE, severity=Severity.WARNING, message=message, help=help_text),)


def _stated_in_logs(run: Run) -> ObservedStrategy:
    """Return the strategy that a log's stage of ZeRO names (Rajbhandari et al., 2020)."""
    stage = next((item.header.zero_stage for item in run.untimed if item.header.zero_stage is not None), None)
    triple = {0: "NNN", 1: "NNG", 2: "NGG", 3: "GGG"}.get(-1 if stage is None else stage)
    if triple is None:
        return NOTHING_OBSERVED
    reasons = (f"the log says ZeRO stage {stage}",)
    return ObservedStrategy(
        triple=triple, triple_at_rest=triple, group_size=None, source=StrategySource.METADATA, reasons=reasons
    )


def _one_micro_batch(run: Run) -> Notice:
    are_passes_seen = any(item.facts.num_micro_batches for _, item in run.timed)
    return Notice(
        code="Q320",
        severity=Severity.INFO,
        message="the number of micro-batches cannot be told; one per step is assumed",
        help="" if are_passes_seen else "record CPU activities too, so that backward passes can be counted",
    )


def _repeated(passes: int) -> Notice:
    return Notice(
        code="Q320",
        severity=Severity.INFO,
        message=f"{passes} micro-batches a step are read off the order of gathers and scatters, which repeats as often",
        help="record CPU activities too, so that backward passes can be counted",
    )


def _typical_step(run: Run) -> pl.DataFrame | None:
    """Return the collectives of the typical step of the first rank that has any."""
    import polars as pl

    for _, item in run.timed:
        part = item.collectives.filter(pl.col("step") == item.typical_step)
        if len(part):
            return part
    return None
