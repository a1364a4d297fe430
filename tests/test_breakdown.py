"""The split of a step, by hand: see the times in trace_builder.fsdp_rank."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DATA, SHARED
from helpers import analyze, facts_of, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.facts.intervals import Intervals, exposed_lengths


def test_parts_of_the_hand_written_step(tmp_path):
    facts = facts_of(fsdp_rank(0).write(tmp_path / "rank0.json"))
    for step in facts.steps:
        assert step.wall_us == pytest.approx(1000)
        # compute [60,70) [170,500) [550,700) [800,850)
        assert step.compute_us == pytest.approx(10 + 330 + 150 + 50)
        # gathers [10,60) [70,170), reduce-scatters [500,550) and [700,750) with no compute beside
        assert step.exposed_communication_us == pytest.approx(50 + 100 + 50 + 50)
        assert step.other_us == 0
        assert step.idle_us == pytest.approx(1000 - 540 - 250)
        assert step.state_total_us["parameter"] == pytest.approx(250)
        assert step.state_exposed_us["parameter"] == pytest.approx(150)
        assert step.state_total_us["gradient"] == pytest.approx(150)
        assert step.state_exposed_us["gradient"] == pytest.approx(100)


def test_exposed_communication_by_module(tmp_path):
    """By hand: the block's first gather is exposed for 100 us, its second not, its reduction for 50; the root's for 50 each."""
    folder = write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)])
    block, root = analyze(folder).modules
    assert (block.module, block.count, block.bytes) == ("blocks.0", 3, 3 * 64_000 * 2)
    assert block.state_exposed_us == pytest.approx({"parameter": 100, "gradient": 50})
    assert (root.module, root.count, root.bytes) == ("(root)", 2, 2 * 4_000 * 2)
    assert root.state_exposed_us == pytest.approx({"parameter": 50, "gradient": 50})


@pytest.mark.parametrize("written", ["blocks.0) [pg=1]", "blocks.0 [pg=1])", "blocks.0)"])
def test_a_module_is_told_from_the_group_beside_it(tmp_path, written):
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000.0)
    trace.compute(10, 100)
    owners = (f"FSDP::pre_forward ({written}", f"FSDP::all_gather ({written}")
    trace.collective("AllGather", 200, 50, nelems=1000, issue=150, seq=1, owners=owners)
    (entry,) = analyze(write_run(tmp_path / "run", [trace])).modules
    assert (entry.module, entry.exposed_us) == ("blocks.0", pytest.approx(50))


def test_no_module_is_named_where_the_trace_names_none(tmp_path):
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000.0)
    trace.compute(10, 100)
    trace.collective("AllReduce", 200, 50, nelems=1000, issue=150, seq=1)
    assert analyze(write_run(tmp_path / "run", [trace])).modules == ()


def test_parts_sum_to_the_step_on_every_recorded_run():
    """Of the runs in tests/data, and of the whole ones where ../shared is there."""
    cut, whole = (
        sorted(place.glob("*_runs/*/rank0.json.gz")) + sorted(place.glob("nccl_like/*/traces/rank0_*"))
        for place in (DATA, SHARED)
    )
    assert len(cut) == 15
    for path in cut + whole:
        for step in facts_of(path).steps:
            parts = step.compute_us + step.exposed_communication_us + step.other_us + step.idle_us
            assert parts == pytest.approx(step.wall_us, rel=1e-6), path


@pytest.mark.parametrize(
    "kernel",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)",
        "void rcclGenericKernel<1, false>(ncclDevComm*)",
        "oneccl_allreduce_kernel",
        "void mscclpp::allreduce<float>(float*)",
        "void deep_ep::intranode::dispatch<8, 768>(int4*)",
        "void deep_ep::internode::combine<__nv_bfloat16>(int4*)",
        "nvshmemi_proxy_kernel",
        "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>()",
        "void one_shot_all_reduce_kernel<bf16>()",
        "void multimem_all_gather_kernel()",
        "ncclSymkDevKernel_AllGather_LL()",
    ],
)
def test_communication_is_more_than_nccl_names(tmp_path, kernel):
    trace = TraceBuilder(0, 8)
    trace.step(1, 0, 100)
    trace.compute(0, 10)
    trace.compute(20, 30, name=kernel)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.exposed_communication_us == pytest.approx(30)
    assert step.compute_us == pytest.approx(10)


@pytest.mark.parametrize(
    "kernel", ["void at::native::reduce_kernel<512, 1>()", "small_reduce_kernel", "flash_bwd_dispatch"]
)
def test_reductions_that_compute_are_compute(tmp_path, kernel):
    trace = TraceBuilder(0, 8)
    trace.step(1, 0, 100)
    trace.compute(0, 10, name=kernel)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.compute_us == pytest.approx(10)


def test_nccl_on_the_compute_stream_is_still_communication(tmp_path):
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 100)
    trace.compute(0, 10)
    trace.collective("AllReduce", 10, 40, nelems=1 << 20, issue=5, seq=1, stream=7)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.exposed_communication_us == pytest.approx(40)


def test_copies_are_other_and_only_where_nothing_else_runs(tmp_path):
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 100)
    trace.compute(0, 50)
    trace.copy(40, 30)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.other_us == pytest.approx(20)
    assert step.idle_us == pytest.approx(30)


def test_a_run_without_step_marks_counts_as_one_step(tmp_path):
    trace = fsdp_rank(0)
    trace.events = [event for event in trace.events if not event["name"].startswith(("ProfilerStep", "Optimizer"))]
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.num_steps == 1
    assert "Q120" in {item.code for item in analysis.data_quality}


def test_mean_over_ranks_sums_to_the_mean_step(tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(0), fsdp_rank(1, late_us=20)]))
    parts = analysis.breakdown_us
    total = parts.compute + parts.exposed_communication + parts.other + parts.idle
    assert total == pytest.approx(sum(analysis.step_time_us.values) / len(analysis.step_time_us.values), rel=1e-9)


def random_intervals(rng, count):
    start = rng.integers(0, 500, count).astype(float)
    return start, start + rng.integers(0, 40, count)


def brute(start, end):
    covered = np.zeros(600, dtype=bool)
    for low, high in zip(start.astype(int), end.astype(int), strict=True):
        covered[low:high] = True
    return covered


@pytest.mark.parametrize("seed", range(20))
def test_interval_arithmetic_against_a_bit_map(seed):
    rng = np.random.default_rng(seed)
    (a, b), (c, d) = random_intervals(rng, 30), random_intervals(rng, 20)
    left, right = Intervals.union_of(a, b), Intervals.union_of(c, d)
    bits_left, bits_right = brute(a, b), brute(c, d)
    assert left.length_us == bits_left.sum()
    assert left.meet(right).length_us == (bits_left & bits_right).sum()
    assert left.minus(right).length_us == (bits_left & ~bits_right).sum()
    assert left.join(right).length_us == (bits_left | bits_right).sum()
    assert left.clip(100, 300).length_us == bits_left[100:300].sum()
    expected = [(~bits_right[int(low) : int(high)]).sum() for low, high in zip(a, b, strict=True)]
    assert exposed_lengths(a, b, right) == pytest.approx(expected)
