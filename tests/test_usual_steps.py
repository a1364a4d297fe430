"""What no step of usual training holds: evaluations in between, and kernels that CUDA graphs replay."""

from __future__ import annotations

import pytest
from helpers import analyze, facts_of, write_run
from test_model_passes import ddp_rank
from test_timelines import timeline
from trace_builder import TraceBuilder, fsdp_rank

UPDATED = ("Optimizer.step#ZeroRedundancyOptimizer.step",)
EVALUATED = ("FSDP::pre_forward (blocks.0)", "FSDP::all_gather (blocks.0)")


def evaluating(rank, *, in_step=2, num_gathers=4, reduces=False, owners=EVALUATED):
    """Return an FSDP2 run of six steps, in one of which the model is gathered more often after its optimizer's step."""
    trace = fsdp_rank(rank, steps=6)
    base = 1000.0 * in_step
    for number in range(num_gathers):
        trace.collective(
            "ReduceScatter" if reduces and number == 0 else "AllGather", base + 860 + 30 * number, 20, nelems=64_000,
            issue=base + 855 + 30 * number, seq=100 * in_step + number,
            owners=("FSDP::post_backward_reduce (blocks.0)",) if reduces and number == 0 else owners,
        )  # fmt: skip
    return trace


def notes(analysis, code):
    return [item.message for item in analysis.data_quality if item.code == code]


def test_a_step_with_an_evaluation_is_left_out_and_told(tmp_path):
    usual = analyze(write_run(tmp_path / "usual", [fsdp_rank(rank, steps=5) for rank in range(2)]))
    analysis = analyze(write_run(tmp_path / "run", [evaluating(rank) for rank in range(2)]))
    assert (
        "1 step gathers parameters more often than the others, or computes longer outside of backward, and reduces no "
        "more gradients" in notes(analysis, "Q337")[0]
    )
    assert "(step 7)" in notes(analysis, "Q337")[0]
    assert {item.num_steps for item in analysis.ranks} == {5}
    assert analysis.breakdown_us == pytest.approx(usual.breakdown_us)
    assert analysis.states["parameter"].count == usual.states["parameter"].count
    assert "ProfilerStep#7" not in timeline(tmp_path / "run").steps


@pytest.mark.parametrize(("longer", "is_left_out"), [((500.0, 0.0), True), ((500.0, 100.0), False)])
def test_a_step_of_ddp_that_computes_more_and_no_longer_backward_is_left_out(longer, is_left_out, tmp_path):
    """In the second of five steps the model is evaluated; with longer sequences backward takes longer as well."""
    traces = [ddp_rank(rank, steps=5, encoder_us=50.0, longer={1: longer}) for rank in range(2)]
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert len(notes(analysis, "Q337")) == is_left_out
    assert {item.num_steps for item in analysis.ranks} == {5 - is_left_out}
    if is_left_out:
        assert analysis.breakdown_us.compute == pytest.approx(50 + 3 * 120 + 50)


def test_updates_of_some_steps_only_are_no_evaluations(tmp_path):
    """Micro-batches are marked as steps, and joined; the optimizer runs in every third, for most of a micro-batch."""
    traces = [ddp_rank(rank, steps=6, updates=lambda step: step % 3 == 2, update_us=200.0) for rank in range(2)]
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert notes(analysis, "Q337") == []
    assert {item.num_steps for item in analysis.ranks} == {2}


@pytest.mark.parametrize(
    "other", [{"reduces": True}, {"num_gathers": 4, "owners": UPDATED}], ids=["reductions", "updated parameters"]
)
def test_a_step_that_reduces_or_updates_more_ends_what_others_accumulated(other, tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [evaluating(rank, **other) for rank in range(2)]))
    assert notes(analysis, "Q337") == []
    assert {item.num_steps for item in analysis.ranks} == {6}


def test_where_most_steps_differ_none_is_usual(tmp_path):
    traces = [fsdp_rank(rank, steps=4) for rank in range(2)]
    for trace in traces:
        for step in range(4):
            for number in range(3 * step):
                base = 1000.0 * step + 860 + 10 * number
                trace.collective(
                    "AllGather", base, 8, nelems=64_000, issue=base - 1, seq=1000 + 50 * step + number, owners=EVALUATED
                )  # fmt: skip
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert notes(analysis, "Q337") == []
    assert {item.num_steps for item in analysis.ranks} == {4}


def replaying(rank, kernel="sm90_gemm"):
    """Return steps whose kernels one launch replays: none has a call of its own."""
    trace = TraceBuilder(rank, 2)
    for step in range(3):
        base, correlation = 1000.0 * step, 7_000 + step
        trace.step(step, base, 1000.0)
        trace.row("cuda_runtime", "cudaGraphLaunch", base + 5, 10, correlation=correlation)
        for number, name in enumerate(("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", kernel)):
            trace.row("kernel", name, base + 50 + 400 * number, 390, tid=7, stream=7, correlation=correlation)
    return trace


@pytest.mark.parametrize(
    ("kernel", "trains"),
    [
        ("void flash::flash_bwd_dq_dk_dv_loop_kernel<Flash_bwd_kernel_traits<128>>(Params)", True),
        ("void multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>(long)", True),
        ("sm90_gemm", None),
    ],
)
def test_kernels_tell_that_a_graph_trains_and_where_they_do_not_nothing_is_said(kernel, trains, tmp_path):
    """What the host did when the graph was captured is not in the trace."""
    folder = write_run(tmp_path / "run", [replaying(rank, kernel) for rank in range(2)])
    assert [facts_of(path).trains for path in sorted(folder.iterdir())] == [trains] * 2
    assert "No training" not in analyze(folder).verdict.text


def test_what_graphs_replay_has_no_purpose_and_the_advice_is_to_leave_them_out(tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [replaying(rank) for rank in range(2)]))
    assert "3 of 3 communication kernels were replayed by CUDA graphs" in notes(analysis, "Q125")[0]
    (finding,) = [item for item in analysis.findings if item.code == "PARO040"]
    assert finding.text.endswith("record a few steps without CUDA graphs")
    assert {item.help for item in analysis.data_quality if item.code in ("Q320", "Q321")} == {""}
