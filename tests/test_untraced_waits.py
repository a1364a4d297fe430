"""Ranks without a trace may be late: what traced ones wait for them looks like slow links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.fitting.untraced_waits import waits_for_untraced
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.policies.plan import EstimateSource

STEP_US = 100_000.0
ELEMENTS = 32_000_000  # of each unit, 64 MB in bf16


def waiting_rank(rank, first_us, *, steps=4, world=4, slow_steps=4):
    """FSDP2 of four units whose gathers and scatters take 3 ms, but for the first gather of some steps."""
    trace = TraceBuilder(rank, world, gpus_per_node=2, host=f"host{rank // 2}")
    for step in range(steps):
        now = step * STEP_US
        trace.step(step, now, STEP_US)
        trace.annotation("FSDP::root_pre_forward", now + 1, 20)
        at = now + 10
        for unit in range(4):
            took = first_us if unit == 0 and step < slow_steps else 3000.0
            owners = ("FSDP::pre_forward", f"FSDP::all_gather (blocks.{unit})")
            trace.collective(
                "AllGather",
                at,
                took,
                nelems=ELEMENTS - 1000 * (unit == 0),
                issue=now + 30 + 30 * unit,
                seq=20 * step + unit,
                owners=owners,
            )
            trace.compute(at + took, 2000.0)
            at += took + 2000
        for unit in reversed(range(4)):
            issue = now + 300 + 100 * (3 - unit)
            trace.backward(issue, 90, sequence=100 * (step + 1) + unit)
            owners = ("FSDP::pre_backward", f"FSDP::all_gather (blocks.{unit})")
            seq = 20 * step + 10 + 2 * unit
            trace.collective(
                "AllGather",
                at,
                3000,
                nelems=ELEMENTS - 1000 * (unit == 0),
                issue=issue + 10,
                seq=seq,
                tid=2,
                owners=owners,
            )
            trace.compute(at + 3000, 4000.0)
            trace.collective(
                "ReduceScatter", at + 7000, 3000, nelems=ELEMENTS - 1000 * (unit == 0), issue=issue + 50, seq=seq + 1, tid=2,
                owners=(f"FSDP::post_backward_reduce (blocks.{unit})",),
            )  # fmt: skip
            at += 10_000
    return trace


def told_of(folder, first_us, traced=(0, 1), **changes):
    run = write_run(folder, [waiting_rank(rank, first_us, **changes) for rank in traced])
    return calibrate(analyze(run))


@pytest.mark.parametrize(
    ("slow_steps", "words"),
    [(4, "move up to 10 times as slowly as others of their group"), (1, "take far longer than most of their kind")],
)
def test_few_slow_collectives_may_wait_for_ranks_without_a_trace(tmp_path, slow_steps, words):
    """30 ms for what else takes 3 in each step, or 60 ms in one of four: more than a tenth of a step of 100 ms."""
    found = told_of(tmp_path / "run", 30_000.0 if slow_steps == 4 else 60_000.0, slow_steps=slow_steps)
    assert words in found.unmodelled
    assert "2 of 4 have one" in found.unmodelled
    assert recommend(found, Limits()).verdict == "measure first"


def test_links_that_move_alike_are_believed(tmp_path):
    assert told_of(tmp_path / "run", 3000.0).unmodelled == ""


def test_with_all_ranks_traced_waiting_is_known(tmp_path):
    assert told_of(tmp_path / "run", 30_000.0, traced=range(4)).unmodelled == ""


def test_latency_that_sizes_have_told_is_no_waiting(tmp_path):
    """Eight gathers of 2 MiB a step take 2.03 ms each, of which 2 are latency: 1.3 ms are left, not 15 of 100."""
    analysis = analyze(write_run(tmp_path / "run", [waiting_rank(rank, 3000.0) for rank in (0, 1)]))
    small, *others = analysis.collectives
    small = replace(small, bytes=2 << 20, p50_us=2030.0, count=8.0)
    analysis = replace(analysis, collectives=(small, *others))
    assert "times as slowly as others of their group" in waits_for_untraced(analysis)
    links = tuple(replace(link, alpha_us=2000.0, latency_source=EstimateSource.MEASURED) for link in analysis.links)
    assert waits_for_untraced(replace(analysis, links=links)) == ""


@pytest.mark.parametrize("traced", [(0, 1), range(4)], ids=["half the ranks", "all ranks"])
def test_what_is_twice_as_slow_may_wait_for_ranks_without_a_trace_or_not(traced, tmp_path):
    """Four gathers of 6 ms where others like them take 3: between none and all of 12 ms stays, whatever the way."""
    analysis = analyze(write_run(tmp_path / "run", [waiting_rank(rank, 3000.0) for rank in traced]))
    first, *others = analysis.collectives
    analysis = replace(analysis, collectives=(replace(first, p50_us=6000.0, count=4.0), *others))
    run = calibrate(analysis)
    if len(traced) == 4:
        assert run.untraced_us == 0.0
        return
    assert run.untraced_us == pytest.approx(12_000.0, rel=0.01)
    assert any("waiting for ranks without a trace" in note for note in run.assumptions)
    # What is faster by more than that is so by as much less at the most, at 90 % of the draws by nine tenths of it.
    times, without = (
        {
            (choice.triple, choice.group_size, choice.collectives, choice.variant): choice.predicted.step_time_us
            for choice in recommend(each, Limits()).candidates
        }
        for each in (run, replace(run, untraced_us=0.0))
    )
    faster = [way for way, step in without.items() if step.p90 < run.step_us - 12_000.0]
    assert faster
    for way in faster:
        assert (
            without[way].p10 < times[way].p10 < times[way].p50 == pytest.approx(without[way].p50 + 6_000.0, abs=1_500.0)
        )
        assert times[way].p90 <= without[way].p90 + 12_000.0
