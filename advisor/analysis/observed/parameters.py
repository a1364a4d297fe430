"""Counts trained and frozen parameters by what the collectives of one step move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.analysis.constants import FROZEN_RATIO, LEAST_REPEATED_SHARE, MAX_UNITS, NAMED_FROZEN_RATIO
from paro_advise.advisor.facts.attribution import ROOT_MODULE, Evidence, with_modules
from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes, is_of_bytes
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable

    import polars as pl

    from paro_advise.advisor.ranks.run import Run


@dataclass(frozen=True, slots=True)
class Frozen:
    """All parameters where some are frozen, None where none show; and what cannot be told."""

    total: int | None
    notices: tuple[Notice, ...] = ()


NONE_FROZEN = Frozen(None)
_MAY_BE_FROZEN = Notice(
    code="Q324",
    severity=Severity.INFO,
    message="forward gathers more than gradients are reduced of, in sizes that may be those of what trains; whether "
    "parameters are gathered several times a step or some are frozen cannot be told, and no frozen ones are assumed",
    help="FSDP2's annotations name the units, FSDP1's do not; give --measured-peak where memory decides",
)


def frozen_parameters(step: pl.DataFrame, micro_batches: int, trained: int | None, run: Run) -> Frozen:
    """Tell whether forward gathers clearly more parameters than gradients reduce.

    Where gathers carry no names, one of the size of a unit that trains may be that unit once more: preference
    optimization and reinforcement learning run a model several times before they change it. DeepSpeed reduces in
    buckets of other sizes, but what its passes gather it gathers again in backward.
    """
    import polars as pl

    gathered = _forward_parameters(step, micro_batches)
    # Where gathers name their units nothing is counted twice, and a unit is padded alike in both.
    least = NAMED_FROZEN_RATIO if _name_gathers(_forward_gathers(step)) is not None else FROZEN_RATIO
    if not gathered or not trained or gathered <= least * trained:
        return NONE_FROZEN
    gathers, gradients = _forward_gathers(step), reductions(step)
    if run.framework == Framework.DEEPSPEED:
        again = _elements(_gathers(step).filter(pl.col("detail").str.starts_with("backward"))) or 0
        may_repeat = gathered * max(1, micro_batches) > FROZEN_RATIO * again
    else:
        is_like = _name_gathers(gathers) is None and _element_counts(gathers) <= _element_counts(gradients)
        may_repeat = is_like and not _is_of_one_forward(gathers, micro_batches, run)
    if may_repeat:
        return Frozen(None, (_MAY_BE_FROZEN,))
    return Frozen(gathered)


def _is_of_one_forward(gathers: pl.DataFrame, micro_batches: int, run: Run) -> bool:
    """Tell whether all gathers belong to whole models' forwards, of which there is one per micro-batch."""
    forwards = median_of(item.facts.num_forwards for _, item in run.timed)
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


def unit_order(step: pl.DataFrame) -> tuple[int, ...]:
    """Return the bytes of what one pass sends of the model, in the order of its forward; () where no order shows.

    By the gathers of the first forward, else by the reductions of the last backward, which goes the other way.
    """
    import polars as pl

    gathers, gradients = _forward_gathers(step), reductions(step)
    is_forward = len(gathers) > 0
    sent = gathers if is_forward else gradients
    if sent["micro_batch"].drop_nulls().n_unique() > 1:
        sent = gathers if is_forward else _in_passes(gradients)
        passes = sent["micro_batch"].drop_nulls()
        sent = sent.filter(pl.col("micro_batch") == (passes.min() if is_forward else passes.max()))
    sent = sent.filter(pl.col("bytes").is_not_null() & pl.col("start_us").is_not_null())
    if len(sent) > MAX_UNITS:
        return ()
    order = sent.sort("start_us")["bytes"].to_list()
    return tuple(order if is_forward else reversed(order))


def _forward_gathers(step: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return _gathers(step).filter(~pl.col("detail").str.starts_with("backward"))


def _gathers(step: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    return step.filter(pl.col("state") == State.PARAMETER.value)


def reductions(step: pl.DataFrame) -> pl.DataFrame:
    """Return the reductions of gradients, without those that only bring replicas together."""
    import polars as pl

    return step.filter((pl.col("state") == State.GRADIENT.value) & (pl.col("detail") != "replica"))


def in_passes_by_order(step: pl.DataFrame) -> pl.DataFrame | None:
    """Return a step whose gathers and scatters, in the order they ran, are the same several times over, by micro-batch.

    A pass first gathers what its forward needs and then scatters gradients between the gathers of backward: a part of
    it is no repetition of another part. None where they do not repeat, or only one of both kinds is there.
    """
    import polars as pl

    of_model = (pl.col("state") == State.PARAMETER.value) | (pl.col("op") == Op.REDUCE_SCATTER.value)
    moved = step.filter(of_model & pl.col("start_us").is_not_null()).sort("start_us")
    rows = moved.select("op", "bytes").rows()
    scatters = [place for place, (op, _) in enumerate(rows) if op == Op.REDUCE_SCATTER.value]
    if not scatters or scatters[0] == 0:
        return None
    for period in range(scatters[0] + 1, len(rows) // 2 + 1):
        if len(rows) % period == 0 and rows[period:] == rows[:-period]:
            begins = moved["start_us"][::period].to_numpy()
            passes = np.searchsorted(begins, step["start_us"].fill_null(float("nan")).to_numpy(), side="right") - 1
            return step.with_columns(pl.Series("micro_batch", np.maximum(passes, 0), dtype=step["micro_batch"].dtype))
    return None


def parameter_count(step: pl.DataFrame, micro_batches: int) -> int | None:
    """Return the trainable parameters as the reductions of one step show them (with padding).

    None when neither gradients nor gathers tell.
    """
    gradients = reductions(step)
    counted = _elements(gradients)
    return counted // max(1, reducing_passes(gradients)) if counted else _forward_parameters(step, micro_batches)


def are_repeats(gradients: pl.DataFrame) -> bool:
    """Tell whether all passes of a step reduce as many bytes, as those of one model do."""
    import polars as pl

    inside = _in_passes(gradients).filter(pl.col("bytes").is_not_null())
    totals = inside.group_by("micro_batch").agg(pl.col("bytes").sum())["bytes"].to_list()
    return not totals or min(totals) >= LEAST_REPEATED_SHARE * max(totals)


def elements_of_any_pass(gradients: pl.DataFrame) -> int | None:
    """Return the elements of all buckets, those that several passes reduce once."""
    import polars as pl

    kind = ["bytes", "dtype", "group_size"]
    most = gradients.group_by("micro_batch", *kind).len().group_by(kind).agg(pl.col("len").max())
    return _elements(most.select(pl.exclude("len").repeat_by("len").explode()))


def reducing_passes(gradients: pl.DataFrame) -> int:
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


def median_of(of_ranks: Iterable[int | None]) -> int | None:
    """Return the median of what ranks tell, None where none does."""
    counts = sorted(count for count in of_ranks if count is not None)
    return counts[len(counts) // 2] if counts else None
