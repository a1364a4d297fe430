"""What gathers could gain by an earlier start: no more than the time in which nothing was sent before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.model_state import MODEL_STATES, State

if TYPE_CHECKING:
    from paro_advise.advisor.ranks.clocks.clock_alignment import AlignedRun
    from paro_advise.advisor.ranks.run import Run


def hidden_by_prefetch_us(aligned: AlignedRun | None, run: Run) -> float | None:
    """Return how long parameter gathers are exposed that an earlier start would hide, at most; per rank and step.

    A gather that begins when the one before it ends is held up by links, not by being issued late: prefetched, it
    begins no earlier. What it may gain is the gap before it, in which no state was sent, and no more than its transfer
    is exposed. What is prefetched already, and the first of a step, have none to gain.
    """
    import polars as pl

    if aligned is None or not len(aligned.table):
        return None
    of_step = ["rank", "step"]
    rows = aligned.table.filter(pl.col("state").is_in(MODEL_STATES)).sort(*of_step, "start_us")
    free_us = pl.col("end_us").cum_max().shift(1).over(of_step)
    late = (pl.col("state") == State.PARAMETER.value) & ~pl.col("detail").str.contains("prefetched")
    sent_us = pl.min_horizontal("exposed_us", pl.col("transfer_us").fill_null(pl.col("exposed_us")))
    gains = pl.min_horizontal(sent_us, (pl.col("start_us") - free_us).clip(0.0).fill_null(0.0))
    return float(rows.select(gains.filter(late).sum()).item() or 0.0) / max(1, len(run.steps))
