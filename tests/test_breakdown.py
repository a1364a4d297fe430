"""The split of a step, by hand: see the times in trace_builder.fsdp_rank."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import DATA, SHARED
from helpers import analyze, facts_of, read, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.parallel import dimension_of
from paro_advise.advisor.facts.intervals import Intervals, exposed_lengths
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.rendering.texts.analysis_text import analysis_text


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


def test_what_is_exposed_for_two_states_at_once_is_said(tmp_path):
    """A gather of 300 us and a reduction of 200 run at once for 150: of 350 exposed ones 150 count twice."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000.0)
    trace.compute(10, 100)
    gather = ("FSDP::pre_backward (blocks.0)", "FSDP::all_gather (blocks.0)")
    reduce = ("FSDP::post_backward_reduce (blocks.1)",)
    trace.collective("AllGather", 200, 300, nelems=1000, issue=130, seq=1, owners=gather)
    trace.collective("ReduceScatter", 350, 200, nelems=1000, issue=150, seq=2, owners=reduce, tid=2, stream=21)
    analysis = analyze(write_run(tmp_path / "run", [trace]))
    assert analysis.breakdown_us.exposed_communication == pytest.approx(350)
    assert analysis.exposed_together_us == pytest.approx(150)
    assert "150 us are exposed for several states at once" in analysis_text(analysis)


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
        "void tensorrt_llm::kernels::oneShotAllReduceKernel<__nv_bfloat16>(tensorrt_llm::kernels::AllReduceParams)",
        "void userbuffers_fp16_sum_inplace_gpu_rr_rs_oop<8>(int, int, int)",
        "void customAllReduceKernel()",
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
    "kernel",
    [
        "void at::native::reduce_kernel<512, 1>()",
        "small_reduce_kernel",
        "flash_bwd_dispatch",
        # torch.compile names what it fuses.
        "triton_poi_fused_all_reduce_0",
        "triton_red_fused__to_copy_all_gather_into_tensor_native_layer_norm_wait_tensor_3",
        "triton_per_fused_reduce_scatter_tensor_sum_wait_tensor_12",
    ],
)
def test_reductions_that_compute_are_compute(tmp_path, kernel):
    trace = TraceBuilder(0, 8)
    trace.step(1, 0, 100)
    trace.compute(0, 10, name=kernel)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.compute_us == pytest.approx(10)


@pytest.mark.parametrize("starts", [(10.0, 20.0, 30.0), (10.0, 10.0, 30.0)])
def test_copies_of_a_copy_engine_are_one_collective(tmp_path, starts):
    """Symmetric memory and NCCL 2.28 copy from each peer, in turn or at once; the call has its bytes once."""
    trace = TraceBuilder(0, 4)
    trace.step(1, 0, 100)
    trace.compute(0, 5)
    trace.collective("AllGather", 10, 40, nelems=1 << 20, issue=5, seq=1)
    (kernel,) = [event for event in trace.events if event["name"].startswith("nccl") and event["cat"] == "kernel"]
    trace.events.remove(kernel)
    copy = {**kernel, "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "dur": 10.0}
    copy["args"] = {name: kernel["args"][name] for name in ("External id", "correlation", "stream")}
    trace.events += [{**copy, "ts": trace.offset + at} for at in starts]
    path = trace.write(tmp_path / "rank0.json")
    (row,) = read(path).collectives.rows(named=True)
    assert row["end_us"] - row["start_us"] == pytest.approx(max(starts) + 10.0 - min(starts))
    assert row["bytes"] is not None
    (step,) = facts_of(path).steps
    assert step.exposed_communication_us == pytest.approx(max(starts) + 10.0 - min(starts))


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


@pytest.mark.parametrize(
    ("name", "begins", "held"),
    [
        ("Memcpy HtoD (Pinned -> Device)", 403.0, 180.0),  # activations come back, and computing waits for them
        ("Memcpy HtoD (Pinned -> Device)", 450.0, 0.0),  # nothing begins as they end
        ("Memcpy DtoD (Device -> Device)", 403.0, 0.0),
    ],
)
def test_copies_that_hold_up_computing_are_no_exposed_communication(name, begins, held, tmp_path):
    """A gather from 100 to 400 us beside a copy from 220 to 400; what computes begins 3 us behind both, or 50."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.compute(10, 90)
    trace.collective("AllGather", 100, 300, nelems=1 << 20, issue=50, seq=1, owners=("FSDP::all_gather",))
    trace.row("gpu_memcpy", name, 220, 180, 9, stream=9)
    trace.compute(begins, 300)
    (step,) = facts_of(trace.write(tmp_path / "rank0.json")).steps
    assert step.exposed_communication_us == pytest.approx(300 - held)
    assert step.state_exposed_us["parameter"] == pytest.approx(300 - held)
    assert step.other_us == pytest.approx(held)
    assert step.compute_us + step.exposed_communication_us + step.other_us + step.idle_us == pytest.approx(1000)


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


@pytest.mark.parametrize(
    ("group", "dimension"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("TENSOR_AND_CONTEXT_PARALLEL_GROUP", "context"), ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", None), ("TENSOR_AND_DATA_PARALLEL_GROUP", None), ("DATA_PARALLEL_GROUP", None),
        ("mesh_tp", "tensor"), ("mesh_etp", "expert"), ("mesh_ep", "expert"), ("mesh_spare", None), ("default_pg", None),
    ],
)  # fmt: skip
def test_groups_are_of_the_parallelism_that_their_name_tells(group, dimension):
    """Names of Megatron-LM's parallel_state.py and of torchtitan's meshes."""
    assert dimension_of(group) == dimension


def test_model_parallel_communication_stands_for_itself(tmp_path):
    """Tensor-parallel all-reduces in pairs of ranks, beside data-parallel ones: 4 a step of 60 us, two of them exposed."""
    groups = [("0", "default_pg", [0, 1, 2, 3]), ("1", "TENSOR_MODEL_PARALLEL_GROUP", [0, 1])]
    trace = TraceBuilder(0, 4, groups=groups)
    for number in range(2):
        base = number * 1000.0
        trace.step(number, base, 1000.0)
        trace.compute(base + 300, 200)
        for index, start in enumerate((100, 200, 300, 400)):
            trace.collective(
                "AllReduce",
                base + start,
                60,
                nelems=1 << 20,
                issue=base + 10 + index,
                seq=number * 10 + index,
                group="1",
            )
    parts = analyze(trace.write(tmp_path / "rank0.json")).model_parallel
    assert list(parts) == ["tensor"]
    tensor = parts["tensor"]
    assert (tensor.count, tensor.group_size, tensor.bytes) == (4, 2, 4 * 2 * (1 << 20))
    assert tensor.total_us == pytest.approx(240.0, abs=0.1)
    assert tensor.exposed_us == pytest.approx(120.0, abs=0.1)


def test_what_a_pipeline_sends_at_the_same_time_is_exposed_once(tmp_path):
    """A send and a receive beside each other, of 60 us each and 20 us apart, twice a step: 160 us of 80 each."""
    groups = [("0", "default_pg", [0, 1, 2, 3]), ("1", "PIPELINE_MODEL_PARALLEL_GROUP", [0, 2])]
    trace = TraceBuilder(0, 4, groups=groups)
    for number in range(2):
        base = number * 1000.0
        trace.step(number, base, 1000.0)
        trace.compute(base + 500, 200)
        for place, (kind, start) in enumerate((("Send", 100), ("Recv", 120), ("Send", 300), ("Recv", 320))):
            trace.collective(
                kind, base + start, 60, nelems=1 << 20, issue=base + 10 + place, seq=number * 10 + place, group="1",
                stream=20 + place % 2,
            )  # fmt: skip
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    pipeline = analysis.model_parallel["pipeline"]
    assert pipeline.total_us == pytest.approx(160.0, abs=0.1)
    assert pipeline.exposed_us == pytest.approx(160.0, abs=0.1)
    assert pipeline.exposed_us <= analysis.states["other"].exposed_us + 0.1


@pytest.mark.parametrize(
    ("name", "dimension"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"), ("mesh_tp", "tensor"), ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("EMBEDDING_GROUP", "pipeline"), ("CONTEXT_PARALLEL_GROUP", "context"), ("mesh_cp", "context"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"), ("EXPERT_TENSOR_PARALLEL_GROUP", "expert"), ("mesh_ep", "expert"),
        ("default_pg", None), ("DATA_PARALLEL_GROUP", None), ("mesh_dp_shard", None),
    ],
)  # fmt: skip
def test_groups_say_which_parallelism_they_serve(name, dimension):
    assert dimension_of(name) == dimension


def test_the_queue_is_as_long_as_kernels_wait_in_it(tmp_path):
    """Four kernels launched at 10 us begin at 100, 200, 300 and 400.

    The device's step begins with the first of them and is as long as the host's, 1,000 us; in it the others wait for 100,
    200 and 300 us.
    """
    trace = TraceBuilder(0, 1)
    trace.step(1, 0.0, 1000.0)
    for start in (100.0, 200.0, 300.0, 400.0):
        trace.compute(start, 50.0)
        kernel = trace.events[-1]
        correlation = kernel["args"]["correlation"]
        trace.row("cuda_runtime", "cudaLaunchKernel", 10.0, 2.0, correlation=correlation)
    idle = analyze(trace.write(tmp_path / "rank0.json")).idle_us
    assert idle.queue_length == pytest.approx((100 + 200 + 300) / 1000, abs=0.001)


def _several_forwards(path, forwards, trained, style):
    """Write a step that gathers a root once and three layers in each forward, and reduces some of these layers."""
    trace, annotated = TraceBuilder(0, 2), style.partition(",")[0].removesuffix(" fp32")
    for number in range(2):
        base = number * 10_000.0
        trace.step(number, base, 10_000.0)
        trace.backward(base + 5000, 4000, sequence=number + 1)
        calls = [("", 32_000)] + [(f" (layers.{layer})", 40_000) for _ in range(forwards) for layer in range(3)]
        for index, (name, elements) in enumerate(calls):
            owners: tuple[str, ...] = {
                "FSDP2": (f"FSDP::pre_forward{name}", f"FSDP::all_gather{name}"),
                "FSDP2 [pg=1]": (f"FSDP::pre_forward{name}", f"FSDP::all_gather{name} [pg=1]"),
                "FSDP1": ("FullyShardedDataParallel.forward", "FullyShardedDataParallel._pre_forward"),
            }[annotated]
            if "spans" in style:  # a span for each forward of the whole model, of three layers and the root
                owners = owners[1:]
                if index % 3 == 1:
                    begin = base + 40 + (index - 1) * 300
                    trace.annotation("FullyShardedDataParallel.forward", begin, 1000)
            trace.collective(
                "AllGather", base + 100 + index * 300, 200, nelems=elements, issue=base + 50 + index * 300, seq=index,
                owners=owners,
            )  # fmt: skip
        reduced = [("", 32_000)] + [(f" (layers.{layer})", 40_000) for layer in range(trained)]
        for index, (name, elements) in enumerate(reduced):
            reducers = {
                "FSDP2": f"FSDP::post_backward_reduce{name}",
                "FSDP2 [pg=1]": f"FSDP::post_backward_reduce{name} [pg=1]",
                "FSDP1": "FullyShardedDataParallel._post_backward_hook",
            }
            trace.collective(
                "ReduceScatter", base + 5100 + index * 200, 50, nelems=elements, issue=base + 5050 + index * 200, tid=2,
                seq=index + 40, owners=(reducers[annotated],), dtype="Float" if style == "FSDP1 fp32" else "BFloat16",
            )  # fmt: skip
    return trace.write(path)


@pytest.mark.parametrize(
    ("forwards", "trained", "style", "counts", "is_said"),
    [
        (3, 3, "FSDP2", (152_000, None), False),  # a chosen and a rejected answer, and an evaluation: 32 k + 3 x 40 k
        (1, 1, "FSDP2", (72_000, 152_000), False),  # two layers of three are frozen
        (3, 1, "FSDP2", (72_000, 152_000), False),
        (3, 3, "FSDP2 [pg=1]", (152_000, None), False),  # as some versions of torch write it
        (3, 3, "FSDP1", (152_000, None), True),  # no names: several forwards look like frozen layers
        (1, 1, "FSDP1", (72_000, None), True),
        (3, 3, "FSDP1 fp32", (152_000, None), True),  # gradients are reduced in fp32
        (1, 1, "FSDP1, spans", (72_000, 152_000), False),  # one forward of the whole model: the rest is frozen
        (3, 3, "FSDP1, spans", (152_000, None), True),
    ],
)
def test_a_model_that_runs_several_times_a_step_counts_once(tmp_path, forwards, trained, style, counts, is_said):
    """Preference optimization and reinforcement learning gather each unit several times for one backward pass."""
    analysis = analyze(_several_forwards(tmp_path / "rank0.json", forwards, trained, style))
    assert analysis.run.framework == style.split()[0].removesuffix(",")
    assert (analysis.run.parameter_count, analysis.run.total_parameter_count) == counts
    assert any(notice.code == "Q324" for notice in analysis.data_quality) == is_said
    seen = calibrate(analysis)
    assert seen.parameters == (counts[1] or counts[0])
    # A root of 32 k elements is gathered once, three layers of 40 k in each forward.
    assert seen.forwards == pytest.approx(max(1.0, (32 + forwards * 120) / (seen.parameters / 1000)), rel=0.01)
    assert seen.trained_share == pytest.approx(counts[0] / seen.parameters)


def test_frozen_parameters_are_told_from_trained_ones(tmp_path):
    """13 blocks of 10 M are gathered, 13 adapters of 30 k reduced: 130 M parameters, 390 k of them trained."""
    trace = TraceBuilder(0, 2)
    for number in range(2):
        base = number * 10_000.0
        trace.step(number, base, 10_000.0)
        trace.backward(base + 5000, 4000, sequence=number + 1)
        for block in range(13):
            trace.collective(
                "AllGather", base + 100 + block * 300, 200, nelems=10_000_000, issue=base + 50 + block * 300, seq=block,
                owners=(f"FSDP::pre_forward (blocks.{block})", f"FSDP::all_gather (blocks.{block})"),
            )  # fmt: skip
            trace.collective(
                "ReduceScatter", base + 5100 + block * 200, 50, nelems=30_000, issue=base + 5050 + block, tid=2,
                seq=block + 20, owners=(f"FSDP::post_backward_reduce (blocks.{block})",),
            )  # fmt: skip
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert (analysis.run.parameter_count, analysis.run.total_parameter_count) == (390_000, 130_000_000)
    assert "130 M parameters, 390000 of them trained" in analysis_text(analysis)
