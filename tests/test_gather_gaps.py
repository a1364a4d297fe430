"""A gather begins no earlier than the transfer before it ends, whatever is prefetched: what PARO021 may promise."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

STEP_US, GATHER_US = 10_000.0, 400.0


def rank_with_gaps(rank, gap_us, *, late_us=0.0):
    """Return two steps of four units: each computes so long once it is gathered, and the next is called for then.

    In the second half of a step backward gathers them again, each beside what computes, and reduces them.
    """
    trace = TraceBuilder(rank, 2)
    for step in range(2):
        base, seq = step * STEP_US, 100 * step
        trace.step(step + 5, base, STEP_US)
        for unit in range(4):
            start = base + 100 + unit * (GATHER_US + gap_us)
            late = late_us if unit == 1 else 0.0
            trace.collective(
                "AllGather", start + late, GATHER_US - late, nelems=64_000, issue=start - 10, seq=seq + unit,
                owners=("FSDP::pre_forward (blocks.0)", "FSDP::all_gather (blocks.0)"),
            )  # fmt: skip
            trace.compute(start + GATHER_US, gap_us)
        trace.backward(base + 5000, 4000, sequence=step + 50)
        trace.compute(base + 5000, 4000)
        for unit in range(4):
            trace.collective(
                "AllGather", base + 5000 + 900 * unit, 300, nelems=64_000, issue=base + 5000 + 900 * unit, tid=2,
                owners=("FSDP::pre_backward (blocks.0)", "FSDP::all_gather (blocks.0)"), seq=seq + 10 + 2 * unit,
            )  # fmt: skip
            trace.collective(
                "ReduceScatter", base + 5400 + 900 * unit, 300, nelems=64_000, issue=base + 5400 + 900 * unit, tid=2,
                owners=("FSDP::post_backward_reduce (blocks.0)",), seq=seq + 11 + 2 * unit,
            )  # fmt: skip
    return trace


def prefetching(folder, **gaps):
    late_us = gaps.pop("late_us", 0.0)
    traces = [rank_with_gaps(rank, late_us=rank * late_us, **gaps) for rank in range(2)]
    (finding,) = [item for item in analyze(write_run(folder / "run", traces)).findings if item.code == "PARO021"]
    return finding


def test_gathers_that_follow_one_another_gain_nothing(tmp_path):
    """Four of 400 us are exposed in a step of 10 ms, and the three after the first could begin 20 us earlier each."""
    finding = prefetching(tmp_path, gap_us=20.0)
    assert (finding.status, finding.saving_us) == ("does not apply", None)
    assert "they begin when what was sent before them ends" in finding.text


def test_what_is_hidden_is_the_gap_at_most(tmp_path):
    finding = prefetching(tmp_path, gap_us=100.0)
    assert (finding.status, finding.saving_us) == ("applies", pytest.approx(3 * 100.0))
    assert "are exposed for 1.6 ms a step, of which an earlier start hides 300 us at most" in finding.text


def test_no_more_is_hidden_than_is_sent(tmp_path):
    assert prefetching(tmp_path, gap_us=700.0).saving_us == pytest.approx(3 * GATHER_US)


def test_gathers_that_wait_for_a_late_rank_gain_nothing_meanwhile(tmp_path):
    """Rank 1 joins the second gather 300 us late: rank 0 sends for the last 100 us only."""
    finding = prefetching(tmp_path, gap_us=700.0, late_us=300.0)
    assert finding.saving_us == pytest.approx(2 * GATHER_US + 100.0, rel=0.01)
