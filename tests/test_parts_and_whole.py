"""What parts say and what the whole says of the same time agree."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

STEP_US, COMPUTE_US, REDUCE_US, LAST_US = 100_000.0, 80_000.0, 15_000.0, 90_000.0
STEPS = 4


def with_a_tail(rank):
    """All-reduces of 15 ms behind the computing of each step; the last takes 90 ms, and 71 of them follow the last step."""
    trace = TraceBuilder(rank, 2)
    for step in range(STEPS):
        at = step * STEP_US
        trace.step(step, at, STEP_US)
        trace.compute(at, COMPUTE_US)
        length = LAST_US if step == STEPS - 1 else REDUCE_US
        trace.collective("AllReduce", at + COMPUTE_US + 1000, length, issue=at + 10, nelems=1_000_000, seq=step)
    return trace


def test_no_state_exposes_more_than_all_of_them(tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [with_a_tail(rank) for rank in range(2)]))
    inside_us = STEP_US - COMPUTE_US - 1000  # of the last all-reduce
    expected = ((STEPS - 1) * REDUCE_US + inside_us) / STEPS
    assert analysis.breakdown_us.exposed_communication == pytest.approx(expected)
    assert sum(state.exposed_us for state in analysis.states.values()) == pytest.approx(expected)
    assert all(finding.saving_us is None or finding.saving_us <= expected + 1 for finding in analysis.findings)


def test_waiting_in_collectives_that_overlap_counts_once(tmp_path):
    """Three all-reduces in flight at the same time, and rank 1 comes 5 ms late to all: rank 0 waits 5 ms, not 15."""
    traces = []
    for rank in range(2):
        trace = TraceBuilder(rank, 2)
        for step in range(STEPS):
            at = step * STEP_US
            trace.step(step, at, STEP_US)
            trace.compute(at, 50_000)
            for number in range(3):
                begin = at + 60_000 + 5_000 * rank
                end = at + 75_000 + 1_000 * number
                seq = 3 * step + number
                trace.collective(
                    "AllReduce", begin, end - begin, issue=begin - 100, nelems=1_000_000, seq=seq, stream=20 + number
                )
        traces.append(trace)
    analysis = analyze(write_run(tmp_path / "run", traces))
    waits = {rank.rank: rank.wait_us for rank in analysis.ranks}
    assert waits[0] == pytest.approx(5_000, abs=1_500)  # the ranks' clocks are aligned by the same collectives
    assert waits[1] == pytest.approx(0, abs=1_500)
    of_states = sum(state.wait_us or 0.0 for state in analysis.states.values())
    assert of_states == pytest.approx(sum(waits.values()) / 2)
