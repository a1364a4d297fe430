"""What makes a step shorter beside the strategy, from the same replay (pure).

Each lever changes one thing of the run as it is, and of the plan. The arithmetic of a step is taken to stay: larger
micro-batches often make it quicker, which no replay of communication shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.prediction.advice.what_if import anchored_us, quantiles
from paro_advise.advisor.prediction.constants import (
    ASSUMED_UNITS,
    EQUAL_SHARE,
    LEAST_LEVER_GAIN,
    LEVER_SIGMA,
    MERGED_UNITS,
    P90_SIGMAS,
)
from paro_advise.advisor.prediction.scoring import needed_bytes
from paro_advise.core.framework import Framework
from paro_advise.policies.plan import Lever, Quantiles, Verdict
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from paro_advise.advisor.prediction.advice.what_if import Basis
    from paro_advise.advisor.prediction.calibration import Calibration
    from paro_advise.advisor.prediction.candidates import Candidate
    from paro_advise.advisor.prediction.scoring import Limits
    from paro_advise.policies.plan import Plan

_HEALED = "no rank later than the others"  # which is no setting
_ONCE_A_STEP = "DDP's no_sync() around all micro-batches but the last"
_PREFETCH = {
    Framework.FSDP1: "backward_prefetch=BackwardPrefetch.BACKWARD_PRE",
    Framework.DEEPSPEED: "stage3_prefetch_bucket_size",
}
_FULL_WIDTH, _HALF_WIDTH = 4, 2  # bytes of an element


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One change.

    Attributes:
        what: to do.
        calibration: the run with it.
        change: a candidate with it.
        further_us: what it may save of a step besides, of which the trace does not tell how much.
        activations: share of the activations that a rank then holds.
        changes_numbers: training computes something else.
        note: what to know.
    """

    what: str
    calibration: Calibration
    change: Callable[[Candidate], Candidate] = lambda candidate: candidate
    further_us: float = 0.0
    activations: float = 1.0
    changes_numbers: bool = False
    note: str = ""


def levers(basis: Basis, limits: Limits) -> tuple[Lever, ...]:
    """Return what gains as it runs or on top of the plan, the best first.

    Args:
        basis: the run and the plan.
        limits: memory.
    """
    found = []
    before = [anchored_us(basis, basis.calibration, candidate) for candidate in (basis.base, basis.chosen)]
    held = needed_bytes(basis.calibration, basis.chosen, limits.other_bytes)
    # The run as it is was measured to fit.
    most = max(limits.plannable_bytes, held if basis.chosen == limits.run else 0.0)
    for change in _changes(basis.calibration, basis.base):
        after = [anchored_us(basis, change.calibration, change.change(item)) for item in (basis.base, basis.chosen)]
        now, planned = (_gain(old / _with_further(new, change)) for old, new in zip(before, after, strict=True))
        if max(now.p50, planned.p50) < 1 + LEAST_LEVER_GAIN:
            continue
        chosen = change.change(basis.chosen)
        more = needed_bytes(change.calibration, chosen, limits.other_bytes * change.activations)
        found.append(
            Lever(
                what=change.what,
                speedup_now=now,
                speedup_with_plan=planned,
                more_bytes=more - held if limits.other_bytes or change.activations == 1.0 else None,
                fits=more <= most,
                changes_numbers=change.changes_numbers,
                note=change.note,
            )
        )
    return tuple(sorted(found, key=lambda lever: -max(lever.speedup_now.p50, lever.speedup_with_plan.p50)))


def alone_text(plan: Plan, basis: Basis, limits: Limits) -> str:
    """Return a sentence on the lever that gains alone what the plan's change of strategy does, "" for none."""
    stays = (plan.baseline.triple, plan.baseline.group_size) == (plan.chosen.triple, plan.chosen.group_size)
    if plan.verdict != Verdict.CHANGE or stays or plan.asked_for or not plan.baseline.feasible:
        return ""
    least = plan.chosen.predicted.speedup.p50 / (1 + EQUAL_SHARE)
    room = max(0.0, limits.plannable_bytes - needed_bytes(basis.calibration, basis.base, limits.other_bytes))
    for item in plan.levers:
        fits = item.fits and item.more_bytes is not None and item.more_bytes <= room
        is_setting = item.what != _HEALED and not item.changes_numbers
        if fits and item.speedup_now.p50 >= least and is_setting:
            now = item.speedup_now
            return (
                f" The strategy can also stay: with {item.what}, the predicted speed-up is {now.p50:.2f}x "
                f"({now.p10:.2f} to {now.p90:.2f})."
            )
    return ""


def _gain(speedups: NDArray[np.float64]) -> Quantiles:
    """Return quantiles of what the draws say, with what the replay itself may be off by."""
    told = quantiles(speedups)
    off = P90_SIGMAS * LEVER_SIGMA
    below, above = (math.hypot(math.log(ratio), off) for ratio in (told.p50 / told.p10, told.p90 / told.p50))
    return Quantiles(p10=told.p50 * math.exp(-below), p50=told.p50, p90=told.p50 * math.exp(above))


def _with_further(times_us: NDArray[np.float64], change: _Change) -> NDArray[np.float64]:
    """Return the draws, and beside them, where more may be saved, the same draws without that."""
    if not change.further_us:
        return times_us
    # On average over ranks arithmetic holds that of late ones, which becomes less as well: at most by all of it.
    least_us = change.calibration.compute_us - change.calibration.most_late_us
    return np.stack((times_us, np.maximum(times_us - change.further_us, least_us)))


def _changes(calibration: Calibration, base: Candidate) -> Iterator[_Change]:
    if base.replicates_each_pass:
        yield _Change(
            what="gradients summed once a step in place of every micro-batch",
            calibration=calibration,
            change=lambda candidate: replace(candidate, replicates_each_pass=False),
            note=_ONCE_A_STEP if calibration.framework.is_ddp else "",
        )
    if calibration.micro_batches > 1 and calibration.micro_batches % 2 == 0:
        half = calibration.micro_batches // 2
        yield _Change(
            what=f"micro-batches twice as large, {half} a step in place of {calibration.micro_batches}",
            calibration=replace(
                calibration,
                micro_batches=half,
                host_floor_us=calibration.host_floor_us / 2,  # half as many launches
                host_work_us=calibration.host_work_us / 2,
            ),
            activations=2.0,
            note="the global batch stays",
        )
    if calibration.reduce_width == _FULL_WIDTH and calibration.gather_width == _HALF_WIDTH:
        yield _Change(
            what="gradients reduced in 16 bits in place of fp32",
            calibration=replace(calibration, reduce_width=_HALF_WIDTH),
            changes_numbers=True,
            note="sums of many ranks lose digits",
        )
    yield from larger_units(calibration)
    if calibration.is_gpu:
        yield from _smaller_units(calibration)
        yield from _overlaps(calibration, base)
    if calibration.most_late_us > 0 or calibration.slower_us > 0:
        names_node = calibration.num_nodes > 1 and calibration.slower_us > 0  # else it may be another rank each time
        yield _Change(
            what=_HEALED,
            calibration=replace(
                calibration,
                compute_us=calibration.compute_us - calibration.slower_us,
                slower_us=0.0,
                fixed_us=calibration.fixed_us - calibration.late_us,
                late_us=0.0,
            ),
            further_us=calibration.most_late_us - calibration.late_us,
            note="what it is worth to heal" + (" or to leave out its node" if names_node else ""),
        )


def larger_units(calibration: Calibration) -> Iterator[_Change]:
    """Yield the run with blocks, or DDP's buckets, that are sent by twos and fours; embeddings stay a unit."""
    units = calibration.unit_bytes
    front, blocks = (units[:1], units[1:]) if calibration.front_bytes else ((), units)
    blocks, root = (blocks[:-1], blocks[-1:]) if calibration.root_bytes else (blocks, ())
    larger, beside = "units of {} blocks", "more of the model is whole at once"
    if calibration.framework.is_ddp:
        larger = "gradient buckets {} times as large (bucket_cap_mb)"
        beside = "less of backward is left beside the last one"
    for factor in MERGED_UNITS:
        if len(units) < 2 * factor:
            return
        merged = (*front, *(sum(blocks[place : place + factor]) for place in range(0, len(blocks), factor)), *root)
        yield _Change(
            what=f"{larger.format(factor)}, {len(merged)} in place of {len(units)}",
            calibration=replace(calibration, unit_bytes=merged),
            change=lambda candidate, merged=merged: replace(  # type: ignore[misc]
                candidate, unit_bytes=merged if candidate.unit_bytes is None else candidate.unit_bytes
            ),
            note=f"fewer and larger collectives; {beside}",
        )


def _smaller_units(calibration: Calibration) -> Iterator[_Change]:
    """Yield the run in pieces where it sends the whole model at once, beside which nothing can run."""
    if calibration.bucket_bytes is not None and len(calibration.bucket_bytes) == 1:
        number = len(calibration.unit_bytes)
        yield _Change(
            what=f"gradients reduced in smaller buckets (bucket_cap_mb), {number} assumed in place of 1",
            calibration=calibration,
            change=lambda candidate: replace(candidate, unit_bytes=None, overlaps_reductions=True),
            note="beside backward",
        )
    if calibration.framework.is_fsdp and len(calibration.unit_bytes) == 1:
        pieces = (calibration.unit_bytes[0] / ASSUMED_UNITS,) * ASSUMED_UNITS
        yield _Change(
            what=f"blocks wrapped one by one, {ASSUMED_UNITS} units assumed in place of 1",
            calibration=replace(
                calibration, unit_bytes=pieces, root_bytes=0.0, overlaps_gathers=True, overlaps_reductions=True
            ),
            change=lambda candidate: replace(candidate, overlaps_gathers=True, overlaps_reductions=True),
            note="fully_shard(block), or an auto_wrap_policy; less of the model is whole at once",
        )


def _overlaps(calibration: Calibration, base: Candidate) -> Iterator[_Change]:
    setting = "overlap_comm of DeepSpeed" if calibration.framework == Framework.DEEPSPEED else "the framework's overlap"
    if base.strategy.parameter != Level.N and not (base.overlaps_gathers and base.prefetches):
        yield _Change(
            what=f"parameters gathered ahead of compute ({_PREFETCH.get(calibration.framework, 'prefetch')})",
            calibration=replace(calibration, overlaps_gathers=True, prefetches=True),
            change=lambda candidate: replace(candidate, overlaps_gathers=True, prefetches=True),
        )
    publishes = base.strategy.parameter == Level.N and base.strategy.optimizer != Level.N
    if publishes and not base.publishes_ahead and calibration.framework == Framework.MEGATRON:
        yield _Change(
            what="updated parameters gathered beside the next forward (--overlap-param-gather)",
            calibration=replace(calibration, publishes_ahead=True),
            change=lambda candidate: replace(candidate, publishes_ahead=True),
            note="--overlap-grad-reduce too",
        )
    has_setting = calibration.framework != Framework.DEEPSPEED or str(base.strategy) != "NNN"
    if not base.overlaps_reductions and has_setting:
        yield _Change(
            what=f"gradients reduced beside backward ({setting})",
            calibration=replace(calibration, overlaps_reductions=True),
            change=lambda candidate: replace(candidate, overlaps_reductions=True),
        )
