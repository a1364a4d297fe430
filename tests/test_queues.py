"""How a run's collectives queue, as its traces show it, and what that means for other ways to run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from test_candidates import found
from test_recommend import MB, calibration, estimate
from trace_builder import TraceBuilder

from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.description.read import description_from_toml
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.moved_units import buckets
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.collective import Op
from paro_advise.core.framework import Framework
from paro_advise.policies.collective_cost import RingAlgorithm, effort_of

BLOCKS = 4


def sharded_rank(rank, *, ahead):
    """Two steps of FSDP1 with four blocks of 100 us of backward, gathers of 50 and reductions of 60 us in one queue.

    Without ``ahead`` each gather in backward is issued behind the reduction of the block before, and compute waits.
    """
    trace = TraceBuilder(rank, 2)
    for step in range(2):
        base, seq = step * 2000.0, step * 20
        trace.step(step, base, 2000.0)
        now = base
        for block in range(BLOCKS):
            name = f"FullyShardedDataParallel._pre_forward_hook (blocks.{block})"
            trace.collective("AllGather", now, 50, nelems=64000 + 64 * block, issue=now - 1, seq=seq, owners=(name,))
            trace.compute(now + 50, 50)
            now, seq = now + 100, seq + 1
        trace.backward(now, 1000, sequence=100 * step + 50)
        queue = now
        for block in reversed(range(BLOCKS)):
            trace.collective(
                "AllGather", queue, 50, nelems=64000 + 64 * block, issue=now - 1, seq=seq, tid=2,
                owners=("FullyShardedDataParallel._pre_backward_hook",),
            )  # fmt: skip
            begin = queue + 50 if not ahead or block == BLOCKS - 1 else now
            trace.compute(begin, 100)
            now = begin + 100
            trace.collective(
                "ReduceScatter", now, 60, nelems=64000 + 64 * block, issue=now - 1, seq=seq + 1, tid=2,
                owners=("FullyShardedDataParallel._post_backward_hook",),
            )  # fmt: skip
            queue, seq = (now - 90 if ahead else now + 60), seq + 2
        trace.annotation("Optimizer.step#AdamW.step", now + 100, 50)
        trace.compute(now + 100, 20)
    return trace


@pytest.mark.parametrize("ahead", [False, True])
def test_gathers_behind_reductions_are_told_from_reductions_that_block(tmp_path, ahead):
    """Both are exposed without prefetch; parameters kept for backward leave reductions nothing to hold up."""
    run = calibrate(analyze(write_run(tmp_path / "run", [sharded_rank(rank, ahead=ahead) for rank in range(2)])))
    assert run.framework == Framework.FSDP1
    assert run.prefetches is ahead
    assert run.overlaps_reductions


def test_fsdp2_gathers_ahead_by_itself(tmp_path):
    """Behind slow reductions its gathers look as if they were not."""
    analysis = analyze(write_run(tmp_path / "run", [sharded_rank(rank, ahead=False) for rank in range(2)]))
    as_fsdp2 = replace(analysis, run=replace(analysis.run, framework=Framework.FSDP2))
    assert calibrate(as_fsdp2).prefetches


def test_what_is_exposed_without_prefetch_is_gained_by_keeping_parameters():
    """Three of four blocks are gathered again in two micro-batches, each behind a reduction that then hides."""
    made = calibration(
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, framework=Framework.FSDP1, gathers_once=False,
        inter_gbps=estimate(1.0), intra_gbps=estimate(100.0), compute_us=400_000.0,
    )  # fmt: skip
    behind = replace(made, prefetches=False)

    def us(run, variant):
        return float(step_us(run, found(run, "GGG", variant), measured_links(run)))

    assert us(behind, "kept_for_backward") == pytest.approx(us(made, "kept_for_backward"))
    assert us(behind, "") > us(made, "") + 2 * 3 * 2 * 7 / 8 * 4 * MB / 1e3 / 2


def test_deepspeed_reduces_what_a_bucket_holds_at_once():
    """It flushes a bucket before a gradient that would not fit; backward fills the first with the last units."""
    assert buckets((3.0, 3.0, 3.0, 3.0), 6.0) == [(2, 4), (0, 2)]
    assert buckets((1.0, 9.0, 2.0), 6.0) == [(2, 3), (1, 2), (0, 1)]
    assert buckets((1.0, 2.0, 3.0), 100.0) == [(0, 3)]


def test_a_bucket_that_holds_the_model_hides_no_reduction():
    """The whole reduction, 7/8 of the model's bytes over 1 GB/s, begins where backward ends."""
    made = calibration(
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, framework=Framework.DEEPSPEED, micro_batches=1,
        inter_gbps=estimate(1.0), intra_gbps=estimate(1000.0), compute_us=400_000.0,
    )  # fmt: skip
    whole = replace(made, reduce_bucket_bytes=1e12)

    def us(run):
        return float(step_us(run, found(run, "GGG"), measured_links(run)))

    model = sum(made.unit_bytes)
    first = made.unit_bytes[0]
    wire_us = 7 / 8 / 1e3
    # One by one all reductions but the first unit's hide beneath backward.
    assert us(whole) - us(made) == pytest.approx((model - first) * wire_us, rel=0.15)


def test_a_ring_over_nodes_goes_at_the_pace_of_its_slower_links():
    """Four nodes of 8: every byte but 1/32 enters and leaves each rank inside its node; 3 hops of 31 lie between nodes."""
    ring = effort_of(RingAlgorithm.RING, Op.ALL_GATHER, 32e6, 4, 8, is_streamed=True)
    assert ring.us(14.0, 100.0, 5.0, 20.0) == pytest.approx(3 * 14 + 28 * 5 + 31e6 / 20e3)
    assert ring.us(14.0, 10.0, 5.0, 20.0) == pytest.approx(3 * 14 + 28 * 5 + 31e6 / 10e3)
    rails = effort_of(RingAlgorithm.RING, Op.ALL_REDUCE, 32e6, 4, 1, is_streamed=True)
    assert rails.us(14.0, 100.0, 5.0, 1.0) == pytest.approx(2 * (3 * 14 + 24e6 / 100e3))


@pytest.mark.parametrize(
    ("framework", "strategy", "expected"),
    [
        ("fsdp1", "III/2", {"replicates_each_pass": True}),
        ("fsdp1", "GGG", {"replicates_each_pass": False}),
        ("fsdp2", "III/2", {"replicates_each_pass": False, "reduce_bucket_bytes": None}),
        ("deepspeed", "NGG", {"scatters_by_all_reduce": True, "reduce_bucket_bytes": 2 * 5e8}),
        ("deepspeed", "GGG", {"scatters_by_all_reduce": False, "reduce_bucket_bytes": 2 * 5e8}),
    ],
)
def test_described_runs_are_run_as_their_framework_does(framework, strategy, expected):
    text = f"""
    [model]
    parameters = 1e9
    layers = 8
    [cluster]
    nodes = 2
    gpus_per_node = 4
    device = "H100"
    [run]
    framework = "{framework}"
    strategy = "{strategy}"
    micro_batches = 4
    step_time_ms = 2000
    """
    made = calibrate_described(description_from_toml(text.encode(), "run.toml"))
    base = baseline_candidate(made)
    assert {name: getattr(base, name) for name in expected} == expected
    alike = found(made, strategy[:3], size=2 if "/" in strategy else 4)
    assert {name: getattr(alike, name) for name in expected} == expected
