"""What computes: by the names that libraries give their kernels, in hand-written and in public traces."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import DATA, SHARED
from helpers import analyze, facts_of, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.model import MemoryPeaks
from paro_advise.advisor.cli import run
from paro_advise.advisor.facts.work import own_times, short_name, work_kind
from paro_advise.advisor.prediction.fitting.run_memory import other_bytes
from paro_advise.advisor.rendering.texts.analysis_text import analysis_text
from paro_advise.trace_parsers.kernel_kinds import KernelKind, computes_16_bit, kind_of_kernel
from paro_advise.trace_parsers.kineto.device.products import _flops_of, product_flops


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "matrix product",
            (
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
                "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT",
                "Cijk_Ailk_Bljk_BBS_BH_MT128x128x32_MI16x16x16x1_SN_K1",
                "void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn_align8>(Params)",
                "aten::addmm",
                "aten::bmm",
            ),
        ),
        (
            "attention",
            (
                "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>>(Params)",
                "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
                "aten::_scaled_dot_product_flash_attention_for_cpu",
            ),
        ),
        ("convolution", ("implicit_convolve_sgemm", "volta_scudnn_128x64_relu_interior_nn_v1", "aten::mkldnn_convolution")),
        (
            "normalisation",
            ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int)", "aten::native_layer_norm",
             "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct)"),
        ),
        ("optimizer", ("void multi_tensor_apply_kernel<TensorListMetadata<4>, AdamFunctor<float>>(int)", "aten::_fused_adamw_")),
        ("embedding", ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>()", "aten::embedding")),
        ("softmax and loss", ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10>(float*)",)),
        ("copy and layout", ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>(float*)", "aten::copy_")),
        ("elementwise", ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", "aten::mul")),
        ("fused by a compiler", ("triton_poi_fused_add_3",)),
        ("reduction", ("triton_red_fused_sum_1", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)")),
        ("other", ("fbgemm_gpu::jagged_dense_offsets", "aten::topk")),
    ],
)  # fmt: skip
def test_kinds_by_the_names_of_libraries(kind, names):
    assert {name: work_kind(name) for name in names} == dict.fromkeys(names, kind)


def test_names_lose_their_arguments_but_not_their_templates():
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, F (*)(int)>(int, F)"
    assert short_name(name) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, F (*)(int)>"
    assert short_name("aten::addmm") == "aten::addmm"
    assert len(short_name("a<" + "b," * 5000 + ">")) == 100


def test_operators_count_without_those_that_they_call():
    """Thread 1: [0, 100) holds [10, 30) and [40, 90), the latter [50, 60); thread 2: [5, 25)."""
    spans = np.array([(0.0, 100.0), (10.0, 30.0), (40.0, 90.0), (50.0, 60.0), (5.0, 25.0)])
    thread = np.array([1, 1, 1, 1, 2])
    assert own_times(spans[:, 0], spans[:, 1], thread).tolist() == [30.0, 20.0, 40.0, 10.0, 20.0]


def test_kernels_of_a_step_sum_to_its_computing(tmp_path):
    """The hand-written step computes for 540 us on one stream; every kernel is a matrix product by its name."""
    analysis = analyze(*[fsdp_rank(rank).write(tmp_path / f"rank{rank}.json") for rank in range(2)])
    assert analysis.work.kind_us == pytest.approx({"matrix product": 10 + 130 + 200 + 150 + 50})
    (kernel,) = analysis.work.kernels
    assert (kernel.name, kernel.count, kernel.us) == ("sm90_gemm", 5, pytest.approx(540))


def test_what_lies_outside_of_steps_does_not_count(tmp_path):
    trace = TraceBuilder(0)
    trace.step(1, 0, 1000.0)
    trace.compute(100, 50, "flash_fwd")
    trace.compute(2000, 500, "sm90_gemm")
    assert facts_of(trace.write(tmp_path / "rank0.json")).work.kind_us == {"attention": 50.0}


def test_text_and_page_name_what_computes(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)])
    report, data = tmp_path / "r.html", tmp_path / "r.json"
    assert run(["analyze", str(folder), "-o", str(report), "--json", str(data), "-q"]) == 0
    assert "computing  matrix product 100.0%" in capsys.readouterr().out
    assert "What computes" in report.read_text()
    assert json.loads(data.read_text())["work"]["kernels"][0]["name"] == "sm90_gemm"


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("trace", "first"),
    [
        ("pytorch+kineto/plugin/samples/resnet50_num_workers_0/worker0.pt.trace.json.gz", "convolution"),
        ("AMD-AGI+TraceLens/tests/traces/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz", "matrix product"),
    ],
)  # fmt: skip
@pytest.mark.variant
def test_public_traces(trace, first):
    """On one stream, the kernels' times sum to the union that the breakdown shows."""
    analysis = analyze(SHARED / "corpus" / trace)
    kinds = analysis.work.kind_us
    assert max(kinds, key=kinds.get) == first
    assert sum(kinds.values()) == pytest.approx(analysis.breakdown_us.compute, rel=0.01)


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::mm", [[98304, 50], [50, 15]], 2 * 98304 * 50 * 15),
        ("aten::addmm", [[64], [128, 32], [32, 64], [], []], 2 * 128 * 32 * 64),
        ("aten::bmm", [[8, 16, 4], [8, 4, 32]], 2 * 8 * 16 * 4 * 32),
        ("aten::baddbmm", [[8, 16, 32], [8, 16, 4], [8, 4, 32]], 2 * 8 * 16 * 4 * 32),
        ("aten::mm", [[4, 5], [6, 7]], None), ("aten::mm", [], None), ("aten::mm", "damaged", None),
        ("aten::mm", [[10**12, 10**12], [10**12, 10**12]], None), ("aten::add", [[4, 4], [4, 4]], None),
    ],
)  # fmt: skip
def test_operations_of_a_product_follow_from_its_shapes(name, dims, flops):
    assert product_flops(name, json.dumps(dims).encode()) == flops


def test_long_texts_of_shapes_are_not_kept():
    """Seen by a reader: 300 rows of 1 MB each stayed in memory for the life of the process."""
    kept = _flops_of.cache_info().currsize
    long = [[64, 32], [32, 16], *[[index] for index in range(500)]]
    assert product_flops("aten::mm", json.dumps(long).encode()) == 2 * 64 * 32 * 16
    assert _flops_of.cache_info().currsize == kept


@pytest.mark.parametrize("dims", [b'["\xff"]', b"[" * 5000 + b"]" * 5000, b"[[1, 2], [2"])
def test_damaged_shapes_say_nothing_about_a_product(dims):
    assert product_flops("aten::mm", dims) is None


def test_products_are_held_against_the_peak_of_the_device(tmp_path):
    """Two products of 4096^3 in 16 bits, one kernel of 250 us and two of 100: by hand 2 * 2 * 4096^3 / 450 us."""
    trace = TraceBuilder(0, 1)
    trace.step(1, 0.0, 1000.0)
    for operator, starts, duration in (("aten::addmm", (100.0,), 250.0), ("aten::mm", (400.0, 520.0), 100.0)):
        external = trace.next_id()
        dims = [[4096, 4096], [4096, 4096]]
        shapes = [[4096], *dims] if operator == "aten::addmm" else dims
        trace.row("cpu_op", operator, 10.0, 5.0, **{"External id": external, "Input Dims": shapes})
        trace.row("cpu_op", "aten::add", 16.0, 1.0, **{"External id": trace.next_id(), "Input Dims": dims})
        for start in starts:
            trace.compute(start, duration, name="sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn")
            trace.events[-1]["args"]["External id"] = external
    trace.compute(700.0, 200.0, name="vectorized_elementwise_kernel")
    for layout in ("torch213", "torch2020", "compact", "indented"):
        analysis = analyze(trace.write(tmp_path / f"{layout}.json", layout))
        assert analysis.work.product_us == pytest.approx(450.0)
        assert analysis.efficiency.product_tflops == pytest.approx(2 * 2 * 4096**3 / 450e-6 / 1e12)
    assert "of 989" in analysis_text(analysis)


@pytest.mark.corpus
def test_products_of_a_public_trace_are_those_of_its_operators():
    """Counted here by the plain JSON: every product whose operator launched a kernel in the trace's steps."""
    import gzip

    path = SHARED / "corpus/AMD-AGI+TraceLens/tests/traces/h100/gaunernst_bert-small-uncased__1016001.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    launched = {event["args"]["External id"] for event in events if event.get("cat") == "kernel"}
    total = sum(
        product_flops(event["name"], json.dumps(event["args"].get("Input Dims")).encode()) or 0.0
        for event in events
        if event.get("cat") == "cpu_op" and event["args"].get("External id") in launched
    )
    analysis = analyze(path)
    assert analysis.run.num_steps == 1
    assert total > 1e9
    assert analysis.work.product_flops == pytest.approx(total)


def test_what_a_gpu_records_of_memory_is_the_peak_of_a_run_where_none_was_given_or_captured():
    found = analyze(DATA / "nccl_like/fsdp2-inter-bw")
    told = replace(found, memory=MemoryPeaks(phase_bytes={"forward": 10 << 30, "backward": 24 << 30}, rank=3))
    on_cores = replace(told, run=replace(told.run, backend="gloo"))
    gib = float(1 << 30)
    assert other_bytes(found, 4 * gib, None) == 0
    assert other_bytes(told, 4 * gib, None) == 20 * gib
    assert other_bytes(told, 4 * gib, 30 * gib) == 26 * gib
    assert other_bytes(on_cores, 4 * gib, None) == 0


@pytest.mark.parametrize("layout", ["torch213", "torch2020", "compact", "one_line"])
def test_memory_is_told_by_phase(tmp_path, layout):
    """Allocations by hand: 10 GiB in forward, 24 in backward, 16 in the update; the host's own do not count."""
    trace = TraceBuilder(0, 1)
    trace.step(1, 0.0, 1000.0)
    trace.compute(10.0, 900.0)
    trace.backward(400.0, 300.0, sequence=5)
    trace.annotation("Optimizer.step#AdamW.step", 800.0, 100.0)
    for time, gib, device_type in (
        (100, 8, 1),
        (300, 10, 1),
        (350, 900, 0),
        (500, 24, 1),
        (600, 20, 1),
        (850, 16, 1),
        (5000, 70, 1),
    ):
        trace.memory(time, gib << 30, device_type)
    path = trace.write(tmp_path / "rank0.json", layout)
    analysis = analyze(path)
    assert analysis.memory.phase_bytes == {"forward": 10 << 30, "backward": 24 << 30, "update": 16 << 30}
    assert "backward 24 GiB" in analysis_text(analysis)


def test_mtias_copies_and_matrix_products_are_told_by_their_names():
    assert kind_of_kernel("dma_request") == KernelKind.MEMORY
    assert computes_16_bit(["fc-dtype_Float"]) is False
