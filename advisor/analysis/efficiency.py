"""Figures of merit: overlap, use of the inter-node links, model FLOPs utilisation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.analysis.model import Efficiency
from paro_advise.advisor.facts.intervals import Intervals
from paro_advise.advisor.ranks.devices import device_named
from paro_advise.core.model_state import MODEL_STATES
from paro_advise.core.span import CROSSES_NODES, GroupSpan
from paro_advise.trace_parsers.notice import Notice, Severity

if TYPE_CHECKING:
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.facts.model import Work
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


def efficiency(
    aligned: AlignedRun | None, run: Run, parameters: int | None, work: Work | None, options: Options
) -> Efficiency:
    """Compute the figures of merit; None where an ingredient is missing."""
    steps = run.steps
    total = sum(step.communication_us for step in steps)
    exposed = sum(step.exposed_communication_us for step in steps)
    wall = float(np.mean([step.wall_us for step in steps])) if steps else None
    peak, source = _peak(run, options)
    world = run.world_size
    mfu = None
    if options.tokens_per_step and parameters and wall and peak and world and math.isfinite(peak):
        # 6 FLOPs per parameter and token: forward 2, backward 4 (Kaplan et al. 2020).
        flops_per_device = 6.0 * parameters * options.tokens_per_step / world
        mfu = flops_per_device / (wall * 1e-6) / (peak * 1e12)
    return Efficiency(
        inter_node_busy_share=_busy_share(aligned, run),
        overlap_share=1 - exposed / total if total > 0 else None,
        mfu=mfu,
        tokens_per_step=options.tokens_per_step,
        peak_tflops=peak,
        peak_source=source,
        product_tflops=work.achieved_tflops if work else None,
        concurrent=_concurrency(aligned),
    )


def efficiency_notices(found: Efficiency) -> tuple[Notice, ...]:
    """Say that the figures for an MFU cannot be those of one run, where a device would do more than its peak."""
    if found.mfu is None or found.mfu <= 1:
        return ()
    message = (
        f"an MFU of {found.mfu:.0%} is more than devices can reach: tokens, peak or the parameters found are not those "
        "of this run"
    )
    return (Notice(code="Q344", severity=Severity.WARNING, message=message, help="check what was passed"),)


def _peak(run: Run, options: Options) -> tuple[float | None, str]:
    if options.peak_tflops:
        return options.peak_tflops, "flag"
    for _, item in run.timed:
        device = device_named(item.header.device_name)
        if device and device.peak_tflops:
            return device.peak_tflops, f"data sheet of {device.mark}, dense bf16"
    return None, ""


def _busy_share(aligned: AlignedRun | None, run: Run) -> float | None:
    """Return the share of the steps during which inter-node traffic transfers, None where most of it does not tell."""
    import polars as pl

    wall = sum(step.wall_us for step in run.steps)
    if aligned is None or wall <= 0:
        return None
    between = aligned.table.filter(pl.col("span").is_in([span.value for span in CROSSES_NODES]))
    is_told = pl.col("transfer_us").is_not_null()
    rows, untold = between.filter(is_told), between.filter(~is_told)
    # What a pipeline sends holds its waiting.
    if not len(rows) or (untold["end_us"] - untold["start_us"]).sum() > (rows["end_us"] - rows["start_us"]).sum():
        return None
    busy = 0.0
    for _, part in rows.group_by("rank", maintain_order=True):
        end = part["end_us"].to_numpy()
        busy += Intervals.union_of(end - part["transfer_us"].to_numpy(), end).length_us
    return min(1.0, busy / wall)


def _concurrency(aligned: AlignedRun | None) -> dict[str, float]:
    """Return how many collectives of model states ran at once, on average while any did: inside nodes, and between.

    They shared the links of their tier, so that each alone looks as slow as all of them together.
    """
    import polars as pl

    if aligned is None:
        return {}
    rows = aligned.table.filter(pl.col("state").is_in(MODEL_STATES) & pl.col("end_us").is_not_null())
    found: dict[str, float] = {}
    for tier, spans in ((GroupSpan.INTRA, (GroupSpan.INTRA,)), (GroupSpan.INTER, CROSSES_NODES)):
        alone = together = 0.0
        of_tier = rows.filter(pl.col("span").is_in([span.value for span in spans]))
        for _, part in of_tier.group_by("rank", maintain_order=True):
            start, end = part["start_us"].to_numpy(), part["end_us"].to_numpy()
            alone += float((end - start).sum())
            together += Intervals.union_of(start, end).length_us
        if together > 0:
            found[tier.value] = max(1.0, alone / together)
    return found
