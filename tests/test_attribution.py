"""Which state a collective moves, and what that rests on."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest
from conftest import DATA, recorded
from helpers import analyze, collectives_of, facts_of, read
from trace_builder import TraceBuilder

from paro_advise.advisor.facts.attribution import Call, Evidence, RunContext, attribute
from paro_advise.advisor.rendering.texts.analysis_text import analysis_text
from paro_advise.core.collective import Op
from paro_advise.core.model_state import State

NO_CONTEXT = RunContext(is_ddp=False, forward_reductions=frozenset(), largest_bytes=1 << 30, has_update_mark=True)
DDP = RunContext(is_ddp=True, forward_reductions=frozenset(), largest_bytes=1 << 30, has_update_mark=True)


def call(op, *, owner="", phase="", desc="default_pg", nbytes=1 << 26, dtype="float", group="0,1"):
    return Call(op=op, bytes=nbytes, dtype=dtype, group=group, group_desc=desc, owner=owner, phase=phase)


ACCUMULATE = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"

ANNOTATED = [
    (Op.ALL_GATHER, "FSDP::pre_forward (layers.0) > FSDP::all_gather (layers.0)", State.PARAMETER, "forward"),
    (Op.ALL_GATHER, "FSDP::pre_forward > FSDP::forward_prefetch for layers.1 > FSDP::all_gather (layers.1)", State.PARAMETER, "forward, prefetched"),
    (Op.ALL_GATHER, "evaluate > FSDP::pre_backward (layers.2) > FSDP::all_gather (layers.2)", State.PARAMETER, "backward"),
    (Op.ALL_GATHER, "FSDP::pre_backward (2) > FSDP::backward_prefetch for 1 > FSDP::all_gather (1)", State.PARAMETER, "backward, prefetched"),
    (Op.ALL_GATHER, "FSDP::pre_forward (a [pg=1]) > FSDP::all_gather (a) [pg=1]", State.PARAMETER, "forward"),
    (Op.REDUCE_SCATTER, "FSDP::post_backward_reduce (layers.0)", State.GRADIENT, "reduce"),
    (Op.REDUCE_SCATTER, "FSDP::root_post_backward_callback > FSDP::post_backward_reduce", State.GRADIENT, "reduce"),
    (Op.ALL_REDUCE, "FSDP::post_backward_reduce (layers.0)", State.GRADIENT, "replica"),
    (Op.ALL_GATHER, "FullyShardedDataParallel.forward > FullyShardedDataParallel._pre_forward", State.PARAMETER, "forward"),
    (Op.ALL_GATHER, "evaluate > FullyShardedDataParallel._pre_backward_hook", State.PARAMETER, "backward"),
    (Op.REDUCE_SCATTER, "evaluate > FullyShardedDataParallel._post_backward_hook", State.GRADIENT, "reduce"),
    (Op.BROADCAST, "Optimizer.step#ZeroRedundancyOptimizer.step", State.OPTIMIZER, "updated parameters"),
    (Op.BROADCAST, "DistributedDataParallel.forward", State.OTHER, "DDP buffers or buckets"),
    (Op.ALL_REDUCE, "aten::linalg_vector_norm > _c10d_functional::all_reduce", State.OTHER, "gradient norm"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "owner", "state", "detail"), ANNOTATED)
def test_annotations_decide_first(op, owner, state, detail):
    got = attribute(call(op, owner=owner, phase="forward"), NO_CONTEXT)
    assert (got.state, got.detail, got.evidence) == (state, detail, Evidence.ANNOTATION)


def test_ddp_buckets_are_gradients_but_scalars_are_not():
    bucket = call(Op.ALL_REDUCE, owner=ACCUMULATE, phase="backward")
    assert attribute(bucket, DDP).state == State.GRADIENT
    assert attribute(bucket, DDP).evidence == Evidence.ANNOTATION
    scalar = call(Op.ALL_REDUCE, owner=ACCUMULATE, phase="backward", nbytes=4)
    assert attribute(scalar, DDP).state == State.OTHER


def test_megatron_fsdp_gathers_parameters_where_its_optimizer_gathers_what_it_updated():
    """Both in groups of one name: only what FSDP shards is gathered in backward."""
    node = "autograd::engine::evaluate_function: LinearBackward0"
    forward, backward, behind, small = (
        call(Op.ALL_GATHER, desc="DATA_PARALLEL_GROUP_WITH_CP", phase=phase, owner=owner, nbytes=size)
        for phase, owner, size in (
            ("forward", "", 1 << 26), ("backward", node, 1 << 26), ("backward", "", 1 << 26), ("backward", node, 8)
        )
    )  # fmt: skip
    alone, both = RunContext.of([forward]), RunContext.of([forward, backward])
    assert attribute(forward, alone).state == State.OPTIMIZER
    assert [attribute(one, both).state for one in (forward, backward)] == [State.PARAMETER] * 2
    assert attribute(backward, both).detail == "backward"
    tensor = call(Op.ALL_GATHER, desc="TENSOR_MODEL_PARALLEL_GROUP", phase="backward")
    # Neither what another group gathers there, nor what follows backward where no step is marked, nor two elements.
    assert not any(RunContext.of([forward, other]).gathers_again for other in (tensor, behind, small))


def test_what_megatrons_instances_sum_between_them_are_replicas():
    """num_distributed_optimizer_instances > 1: gradients are scattered in an instance, then summed over all (megatron-core)."""
    for kind in ("PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"):
        inside = attribute(call(Op.REDUCE_SCATTER, desc=f"INTRA_{kind}", phase="backward"), NO_CONTEXT)
        between = attribute(call(Op.ALL_REDUCE, desc=f"INTER_{kind}", phase="backward"), NO_CONTEXT)
        assert (inside.state, inside.detail) == (State.GRADIENT, "reduce")
        assert (between.state, between.detail) == (State.GRADIENT, "replica")


@pytest.mark.parametrize(
    ("op", "desc", "state"),
    [
        (Op.ALL_REDUCE, "TENSOR_MODEL_PARALLEL_GROUP", State.OTHER),
        (Op.ALL_GATHER, "mesh_tp", State.OTHER),
        (Op.ALL_GATHER, "mesh_cp", State.OTHER),
        (Op.REDUCE_SCATTER, "DATA_PARALLEL_GROUP_WITH_CP", State.GRADIENT),
        (Op.ALL_GATHER, "DATA_PARALLEL_GROUP_WITH_CP_AG", State.OPTIMIZER),
    ],
)
def test_group_descriptions_come_next(op, desc, state):
    got = attribute(call(op, desc=desc, phase="backward"), NO_CONTEXT)
    assert (got.state, got.evidence) == (state, Evidence.GROUP)


@pytest.mark.parametrize(
    ("frame", "state"),
    [
        ("deepspeed/runtime/zero/stage3.py(1741): __avg_scatter_contiguous_grads", State.GRADIENT),
        ("deepspeed/runtime/zero/partitioned_param_coordinator.py(283): fetch_sub_module", State.PARAMETER),
        ("deepspeed/runtime/utils.py(1013): all_gather_into_tensor_dp_groups", State.OPTIMIZER),
        ("megatron/core/distributed/param_and_grad_buffer.py(708): start_grad_sync", State.GRADIENT),
    ],
)
def test_python_stacks_tell_deepspeed_and_megatron(frame, state):
    got = attribute(call(Op.ALL_REDUCE, owner=frame, phase="backward"), NO_CONTEXT)
    assert (got.state, got.evidence) == (state, Evidence.STACK)


PHASES = [
    (Op.ALL_GATHER, "forward", 1 << 26, State.PARAMETER),
    (Op.ALL_GATHER, "backward", 1 << 26, State.PARAMETER),
    (Op.ALL_GATHER, "update", 1024, State.OPTIMIZER),
    (Op.BROADCAST, "update", 1 << 26, State.OPTIMIZER),
    (Op.REDUCE_SCATTER, "backward", 1 << 26, State.GRADIENT),
    (Op.REDUCE_SCATTER, "boundary", 1 << 26, State.GRADIENT),
    (Op.ALL_REDUCE, "backward", 1 << 26, State.GRADIENT),  # DeepSpeed's contiguous gradients
    (Op.REDUCE, "backward", 1 << 26, State.GRADIENT),
    (Op.ALL_REDUCE, "boundary", 1 << 26, State.GRADIENT),  # ZeRO-1 reduces once, after backward
    (Op.ALL_REDUCE, "boundary", 4, State.OTHER),
    (Op.ALL_REDUCE, "forward", 4, State.OTHER),
    (Op.BARRIER, "", 0, State.OTHER),
    (Op.ALL_TO_ALL, "forward", 1 << 26, State.OTHER),
    (Op.SEND, "backward", 1 << 26, State.OTHER),
]


@pytest.mark.parametrize(("op", "phase", "nbytes", "state"), PHASES)
def test_phase_and_operation_decide_without_annotations(op, phase, nbytes, state):
    got = attribute(call(op, phase=phase, nbytes=nbytes), NO_CONTEXT)
    assert (got.state, got.evidence) == (state, Evidence.PHASE)


def test_a_reduction_that_forward_does_too_is_an_activation():
    shape = ("0,1", Op.ALL_REDUCE, 1 << 20)
    context = RunContext(
        is_ddp=False, forward_reductions=frozenset([shape]), largest_bytes=1 << 26, has_update_mark=True
    )
    got = attribute(call(Op.ALL_REDUCE, phase="backward", nbytes=1 << 20), context)
    assert got.state == State.OTHER


def test_what_nothing_tells_stays_unknown():
    got = attribute(call(Op.ALL_REDUCE), NO_CONTEXT)
    assert (got.state, got.evidence) == (State.UNKNOWN, Evidence.NONE)


TRUTH_STATE = {
    "param_fwd": "parameter",
    "param_bwd": "parameter",
    "grad": "gradient",
    "updated": "optimizer",
    "other": "other",
}
RUNS = (
    "ddp_acc4", "ds_z1_acc4", "ds_z3_acc1", "ds_z3_release_acc2", "fsdp2_ggg_acc1", "fsdp2_ggg_stack", "fsdp2_hsdp_gated_acc4",
    "fsdp2_hsdp_ungated_ac_acc4", "largemsg_fsdp2_ggg", "straggler_fsdp2_ggg", "zero1_acc1",
)  # fmt: skip


@pytest.mark.parametrize(("name", "is_guess"), [("ds_z1_acc4", True), ("ds_z3_acc1", False), ("zero1_acc1", False)])
def test_a_framework_that_nothing_names_is_shown_as_a_guess(name, is_guess):
    """DeepSpeed's ZeRO-1 leaves no name of its own in a trace."""
    analysis = analyze(DATA / "zero_runs" / name)
    assert [item.code for item in analysis.data_quality].count("Q322") == is_guess
    assert ("DeepSpeed (guessed)" in analysis_text(analysis)) == is_guess


def truth_of(folder, rank):
    """The call-site log, by the c10d row it belongs to (us on the trace's own axis)."""
    lines = gzip.decompress((folder / f"collectives_rank{rank}.jsonl.gz").read_bytes()).splitlines()
    return {round(entry["ts_us"], 2): entry for entry in map(json.loads, lines)}


def score(folder, path):
    """Return (time on the right state, all time, wrong rows with annotation evidence)."""
    parsed, facts = read(path), facts_of(path)
    base_ns = json.loads(gzip.decompress(path.read_bytes()))["baseTimeNanoseconds"]
    shift_us = (parsed.header.origin_ns - base_ns) / 1000
    truth = truth_of(folder, facts.header.rank)
    right = total = 0.0
    wrong_annotated = []
    for row in collectives_of(path).iter_rows(named=True):
        duration = row["end_us"] - row["start_us"]
        total += duration
        known = next(
            (
                truth[key]
                for nudge in (0, 0.01, -0.01)
                if (key := round(row["issue_us"] + shift_us + nudge, 2)) in truth
            ),
            None,
        )
        if known and TRUTH_STATE[known["state"]] == row["state"]:
            right += duration
            assert row["micro_batch"] == known["mb"]
        elif row["evidence"] == "annotation":
            wrong_annotated.append(row)
    return right, total, wrong_annotated


def ranks_of(folder):
    return sorted(folder.glob("rank*.json.gz"))


@pytest.mark.parametrize("folder", recorded("zero_runs", RUNS))
def test_attribution_against_the_call_sites(folder):
    assert len(ranks_of(folder)) == json.loads((folder / "truth.json").read_text())["world"]
    scores = [score(folder, path) for path in ranks_of(folder)]
    assert sum(right for right, _, _ in scores) >= 0.99 * sum(total for _, total, _ in scores)
    assert not [row for _, _, wrong in scores for row in wrong]


@pytest.mark.parametrize("folder", recorded("zero_runs", RUNS))
def test_strategy_micro_batches_and_parameters(folder):
    truth = json.loads((folder / "truth.json").read_text())
    got = analyze(folder, gpus_per_node=truth["ranks_per_node"]).run
    assert got.strategy.triple == truth["triple"]
    assert got.strategy.triple_at_rest == truth["triple_at_rest"]
    assert got.strategy.group_size == truth["group_size_I"]
    assert got.micro_batches == truth["micro_batches"]
    assert got.world_size == truth["world"]
    assert got.parameter_count == pytest.approx(truth["params"], rel=2e-3)  # FSDP pads uneven shapes
    assert got.ranks_missing == ()
    expected = {"ds": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP", "zero1": "DDP + ZeroRedundancyOptimizer"}
    name = next(key for key in expected if key in folder.name)
    assert got.framework == expected[name]


@pytest.mark.parametrize("folder", recorded("zero_runs", RUNS))
def test_regimes_and_stragglers_are_those_of_the_lab(folder):
    """Ports of 200 to 800 Mbit/s beside loopback: what crosses nodes is limited by them, what stays inside is not."""
    truth = json.loads((folder / "truth.json").read_text())
    analysis = analyze(folder, gpus_per_node=truth["ranks_per_node"])
    assert analysis.verdict.regime == "bandwidth_inter"
    gathers_inside = truth["group_size_I"] == truth["ranks_per_node"] > 1
    seen = {name: entry.regime for name, entry in analysis.states.items() if entry.count}
    assert seen["gradient"] == "bandwidth_inter"
    assert seen.get("parameter", "bandwidth_inter") == ("bandwidth_intra" if gathers_inside else "bandwidth_inter")
    assert [item.rank for item in analysis.stragglers] == ([] if truth["straggler"] is None else [truth["straggler"]])
    assert analysis.slow_groups == ()


def test_gloo_reduce_scatter_is_shown_as_what_it_is():
    folder = DATA / "zero_runs/fsdp2_ggg_acc1"
    table = collectives_of(folder / "rank0.json.gz")
    scatters = table.filter(table["host_op"] == "c10d::_reduce_scatter_base_")
    assert set(scatters["op"]) == {"reduce_scatter"}
    assert set(scatters["name"]) == {"gloo:all_reduce"}
    issued = [call["trace_op"] for call in truth_of(folder, 0).values()]
    assert len(scatters) == issued.count("c10d::_reduce_scatter_base_") == 2 * 7  # in 2 steps, one for each of 7 units


def test_gloo_groups_are_told_apart_by_their_threads():
    table = collectives_of(DATA / "zero_runs/fsdp2_hsdp_gated_acc4/rank0.json.gz")
    replicas = table.filter(table["detail"] == "replica")
    gathers = table.filter(table["op"] == "all_gather")
    assert set(replicas["group_ranks"]) == {"0,2,4,6"}
    assert set(gathers["group_ranks"]) == {"0,1"}


@pytest.mark.parametrize("folder", recorded("zero_runs", ["straggler_fsdp2_ggg"]))
def test_the_straggler_of_the_lab_is_named(folder):
    (late,) = analyze(folder).stragglers
    assert late.rank == 2
    assert late.cause == "host"  # it sleeps: it computes as long as the others
    assert late.share_of_steps == 1.0


def test_stacks_of_the_flight_recorder_explain_a_trace(tmp_path):
    """A DeepSpeed-like trace without annotations or phases, and a dump of the same rank."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.collective("AllReduce", 100, 200, nelems=1 << 20, issue=50, seq=41)
    trace.collective("AllReduce", 400, 100, nelems=1 << 20, issue=350, seq=42)
    trace.write(tmp_path / "rank0.json")
    frames = [{"name": "__avg_scatter_contiguous_grads", "filename": "deepspeed/runtime/zero/stage3.py", "line": 1741}]
    entry = {
        "frames": frames, "record_id": 1, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 41, "p2p_seq_id": 0,
        "op_id": 1, "profiling_name": "nccl:all_reduce", "time_created_ns": 10, "input_sizes": [[1 << 20]], "output_sizes": [[1 << 20]],
        "input_dtypes": ["BFloat16"], "output_dtypes": ["BFloat16"], "state": "completed", "is_p2p": False,
    }  # fmt: skip
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    dump = {"version": "2.9", "rank": 0, "pg_config": config, "pg_status": {}, "entries": [entry]}
    (tmp_path / "nccl_trace_rank_0").write_text(json.dumps(dump))
    analysis = analyze(tmp_path)
    assert "Q318" in {item.code for item in analysis.data_quality}
    gradient, unknown = analysis.states["gradient"], analysis.states["unknown"]
    assert (gradient.count, gradient.total_us, gradient.exposed_us) == (1, 200, 200)
    assert gradient.evidence == "stack"
    assert (unknown.count, unknown.total_us) == (1, 100)


def forward(trace, ts, sequence):
    """Two layers: the second one is recorded with the number that the first one's node has used up."""
    for place in range(2):
        number = {"External id": trace.next_id(), "Sequence number": sequence + place}
        trace.row("cpu_op", "aten::linear", ts + 20 * place, 15, **number)


def test_gradients_that_are_reduced_after_each_backward_pass_are_gradients(tmp_path):
    """As DeepSpeed's ZeRO-2 does where it copies gradients to a bucket first: those operators have a number too."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    for micro, begin in enumerate((0, 400)):
        forward(trace, begin + 10, 2 * micro)
        trace.backward(begin + 80, 50, 2 * micro + 1)
        trace.backward(begin + 130, 50, 2 * micro)
        copying = {"External id": trace.next_id(), "Sequence number": 2 * micro + 2}
        trace.row("cpu_op", "aten::copy_", begin + 185, 5, **copying)
        trace.collective("AllReduce", begin + 210, 150, nelems=1 << 20, issue=begin + 195, seq=micro)
    trace.annotation("Optimizer.step#AdamW.step", 800, 100)
    trace.write(tmp_path / "rank0.json")
    gradient = analyze(tmp_path).states["gradient"]
    assert (gradient.count, gradient.total_us) == (2, 300)


def test_reductions_inside_of_forward_passes_are_no_gradients(tmp_path):
    """Tensor parallelism sums activations after a layer: of the second micro-batch too."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    for micro, begin in enumerate((0, 400)):
        forward(trace, begin + 10, 10 * micro)
        trace.collective("AllReduce", begin + 50, 25, nelems=1 << 20, issue=begin + 46, seq=micro)
        forward(trace, begin + 80, 10 * micro + 2)
        trace.backward(begin + 180, 100, 10 * micro)
    trace.annotation("Optimizer.step#AdamW.step", 800, 100)
    trace.write(tmp_path / "rank0.json")
    states = analyze(tmp_path).states
    assert (states["gradient"].count, states["other"].count) == (0, 2)


@pytest.mark.parametrize("kind", ["ReduceScatter", "AllReduce"])
def test_what_a_script_gathers_it_sums_in_backward(kind, tmp_path):
    """A contrastive loss gathers features of all ranks; the sum of their gradients is none of parameters."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.annotation("DistributedDataParallel.forward", 5, 50)
    forward(trace, 10, 0)
    trace.collective("AllGather", 100, 40, nelems=1 << 18, issue=80, seq=1)
    trace.backward(180, 20, 2)
    trace.collective(kind, 210, 60, nelems=1 << 18, issue=190, seq=2)
    trace.backward(215, 40, 1)
    trace.collective("AllReduce", 300, 150, nelems=1 << 20, issue=250, seq=3, owners=(ACCUMULATE,), tid=2)
    trace.annotation("Optimizer.step#AdamW.step", 800, 100)
    trace.write(tmp_path / "rank0.json")
    analysis = analyze(tmp_path)
    assert analysis.run.strategy.triple == "NNN"
    assert analysis.run.parameter_count == 1 << 20
    assert (analysis.states["gradient"].total_us, analysis.states["other"].total_us) == (150, 100)


def test_what_an_optimizer_gathers_makes_no_activations_of_gradients(tmp_path):
    """ZeRO-1 within DDP: as many bytes are scattered after backward as gathered after the step."""
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.annotation("DistributedDataParallel.forward", 5, 50)
    forward(trace, 10, 0)
    trace.backward(180, 20, 1)
    trace.collective("AllReduce", 220, 20, nelems=1 << 10, issue=190, seq=1, owners=(ACCUMULATE,), tid=2)
    trace.collective("ReduceScatter", 260, 150, nelems=1 << 20, issue=240, seq=2)
    trace.annotation("Optimizer.step#AdamW.step", 500, 100)
    trace.collective("AllGather", 700, 150, nelems=1 << 20, issue=590, seq=3, owners=("Optimizer.step#AdamW.step",))
    trace.write(tmp_path / "rank0.json")
    states = analyze(tmp_path).states
    assert (states["gradient"].total_us, states["optimizer"].total_us) == (170, 150)


def test_the_backward_pass_of_a_gather_is_known_by_its_node():
    """With features in bf16 and gradients in fp32 sizes do not agree; traces by torch 2.13 name the node so."""
    node = "autograd::engine::evaluate_function: GeneratedBackwardFor__c10d_functional_all_gather_into_tensor_default"
    summed = call(
        Op.REDUCE_SCATTER, owner=f"{node}Backward > c10d::reduce_scatter_tensor", phase="backward", nbytes=1 << 20
    )
    assert attribute(summed, replace(DDP, names_gathers=True)).state == State.OTHER
    assert attribute(summed, replace(DDP, names_gathers=False)).state == State.GRADIENT


@pytest.mark.parametrize(("dtype", "state"), [("Int", State.OTHER), ("Float", State.GRADIENT)])
def test_marks_of_used_parameters_are_no_gradients(dtype, state):
    """DDP adds up a mark for each parameter where its last gradient is made (find_unused_parameters=True)."""
    marks = call(Op.ALL_REDUCE, owner=ACCUMULATE, phase="backward", nbytes=1200, dtype=dtype)
    assert attribute(marks, DDP).state == state


@pytest.mark.parametrize(("shards_parameters", "state"), [(True, State.OTHER), (False, State.OPTIMIZER)])
def test_gathers_of_an_optimizer_beside_sharded_parameters_bring_none_back(shards_parameters, state):
    """Muon gathers its momenta where FSDP2 shards; with ZeroRedundancyOptimizer a step brings parameters back."""
    calls = [call(Op.ALL_GATHER, owner="FSDP::pre_forward > FSDP::all_gather", phase="forward")] * shards_parameters
    gather = call(Op.ALL_GATHER, owner="Optimizer.step#Muon.step", phase="update")
    assert attribute(gather, RunContext.of([*calls, gather])).state == state


@pytest.mark.parametrize(("shards_parameters", "state"), [(True, State.OTHER), (False, State.OPTIMIZER)])
def test_gathers_of_a_checkpoint_behind_the_step_are_no_updated_parameters(shards_parameters, state):
    """FSDP2's whole state dict is gathered between two steps."""
    calls = [call(Op.ALL_GATHER, owner="FSDP::pre_forward > FSDP::all_gather", phase="forward")] * shards_parameters
    gather = call(Op.ALL_GATHER, phase="update")
    assert attribute(gather, RunContext.of([*calls, gather])).state == state


@pytest.mark.parametrize(
    ("group", "nbytes", "state"),
    [("0,1", 8_000_000, State.OTHER), ("0,1", 500_000, State.OTHER), ("0,2", 8_000_000, State.PARAMETER)],
)
def test_gathers_in_a_group_that_scatters_in_forward_are_activations(group, nbytes, state):
    """Sequence parallelism of Megatron, whose groups have no description: it gathers in both passes what it scatters."""
    scattered = replace(call(Op.REDUCE_SCATTER, phase="forward", nbytes=8_000_000), group="0,1")
    gather = replace(call(Op.ALL_GATHER, phase="backward", nbytes=nbytes), group=group)
    assert attribute(gather, RunContext.of([scattered, gather])).state == state


@pytest.mark.parametrize(
    "name", ["LinearWithGradAccumulationAndAsyncCommunicationBackward", "_CopyToModelParallelRegionBackward"]
)
def test_what_megatrons_functions_reduce_in_backward_are_no_gradients(name):
    """Tensor parallelism sums gradients of activations; before torch 2.1 no group tells."""
    summed = call(Op.ALL_REDUCE, owner=f"autograd::engine::evaluate_function: {name}", phase="backward", desc="")
    assert attribute(summed, NO_CONTEXT).state == State.OTHER
    assert attribute(replace(summed, owner=ACCUMULATE), NO_CONTEXT).state == State.GRADIENT


def test_tensor_parallelism_is_told_by_megatrons_functions_where_no_group_is_named(tmp_path):
    trace = TraceBuilder(0, 2, groups=[("0", "", [0, 1])])
    for step in range(2):
        base = step * 1000.0
        trace.step(step, base, 1000.0)
        trace.compute(base, 300)
        trace.row("cpu_op", "_ReduceFromModelParallelRegion", base + 90, 40)
        trace.collective("AllReduce", base + 300, 200, nelems=1 << 16, issue=base + 100, seq=step)
        trace.backward(base + 600, 300, sequence=step + 1, tid=2)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert set(analysis.model_parallel) == {"tensor"}
    assert analysis.model_parallel["tensor"].count == 1
    assert analysis.states["other"].evidence == Evidence.ANNOTATION
