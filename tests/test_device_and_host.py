"""What runs on a device against what its host did: steps, issuers, idle time, and recordings that lack one of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import DATA, SHARED
from helpers import analyze, facts_of, write_run
from trace_builder import TraceBuilder, fsdp_rank

STEP_US = 1000.0


def launched(trace, ts, dur, launch, *, name="sm90_gemm", cat="kernel", launch_us=3.0, stream=7):
    """A kernel with the runtime call that launched it."""
    number = trace.next_id()
    trace.row("cuda_runtime", "cudaLaunchKernel", launch, launch_us, 1, correlation=number)
    trace.row(cat, name, ts, dur, stream, stream=stream, correlation=number)


@pytest.mark.parametrize(
    ("parameters", "steps"),
    [
        ((3, 5) * 3, [3 * 1000 + 5 * 1000] * 2),  # two models in turn, of which the first update is before any step
        ((3, 3, 5) * 3, [3 * 1000 + 3 * 1000 + 5 * 1000] * 2),
        ((4,) * 4, [4 * 1000] * 3),
        ((3, 5, 5, 3, 5), [5000, 5000, 3000, 5000]),  # no order that repeats
    ],
)
def test_models_that_train_in_turn_make_a_step_together(parameters, steps, tmp_path):
    """Without marks; each update is of so many parameters, whose passes take 1,000 us each."""
    trace, now = TraceBuilder(0, 2), 0.0
    for place, number in enumerate(parameters):
        length = 1000.0 * number
        launched(trace, now + 10, 0.8 * length, now + 5)
        trace.backward(now + 300, length - 400, sequence=10 * place + 1)
        for gradient in range(number):
            trace.row("cpu_op", "torch::autograd::AccumulateGrad", now + 310 + 20 * gradient, 8, 2)
        trace.collective("AllReduce", now + 0.85 * length, 50, nelems=1 << 20, issue=now + 400, seq=place, tid=2)
        trace.annotation("Optimizer.step#Adam.step", now + length - 60, 50)
        now += length
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.step_time_us.values == pytest.approx(steps, abs=10)
    (note,) = [item.message for item in analysis.data_quality if item.code == "Q121"]
    assert ("several to a step" in note) == (len(steps) < len(parameters) - 1)


def lagging_rank(lag_us, steps=4):
    """Steps of 1000 us on host and device, the device ``lag_us`` behind: 600 us compute, 200 us all-reduce, 200 us
    compute each."""
    trace = TraceBuilder(0, 8)
    for step in range(steps):
        host, device = step * STEP_US, step * STEP_US + lag_us
        trace.step(step, host, STEP_US)
        launched(trace, device, 600, host)
        trace.backward(host + 100, 300, sequence=step + 1)
        trace.collective(
            "AllReduce", device + 600, 200, nelems=1 << 20, issue=host + 200, seq=step,
            owners=("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
        )  # fmt: skip
        launched(trace, device + 800, 200, host + 900)
    return trace


@pytest.mark.parametrize("lag_us", [0.0, 750.0, 2300.0])
def test_steps_are_those_of_the_launches_however_far_the_device_lags(tmp_path, lag_us):
    facts = facts_of(lagging_rank(lag_us).write(tmp_path / "rank0.json"))
    assert facts.lag_us == pytest.approx(lag_us, abs=10)
    for step in facts.steps:
        assert step.wall_us == pytest.approx(STEP_US)
        assert step.compute_us == pytest.approx(800)
        assert step.exposed_communication_us == pytest.approx(200)
    analysis = analyze(tmp_path / "rank0.json")
    assert analysis.states["gradient"].count == 1
    assert analysis.states["unknown"].count == 0


def unmarked_rank(lag_us, hurry, steps=5):
    """The same, launched by a host that is done in a ``hurry``-th of a step, with optimizer steps in place of marks."""
    trace = TraceBuilder(0, 8)
    for step in range(steps):
        host, device = step * STEP_US, step * STEP_US + lag_us
        launched(trace, device, 600, host)
        trace.backward(host + 100 / hurry, 300 / hurry, sequence=step + 1)
        trace.collective(
            "AllReduce", device + 600, 200, nelems=1 << 20, issue=host + 200 / hurry, seq=step,
            owners=("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
        )  # fmt: skip
        trace.annotation("Optimizer.step#AdamW.step", host + 890 / hurry, 20 / hurry)
        launched(trace, device + 800, 200, host + 900 / hurry, launch_us=3.0 / hurry)
    return trace


@pytest.mark.parametrize(
    ("lag_us", "hurry"),
    [(30.0, 1.0), (750.0, 1.0), (2300.0, 1.0), (30.0, 10.0)],
    ids=["in step", "behind", "far behind", "waited for behind the optimizer's step"],
)
def test_steps_without_marks_are_those_of_the_launches_too(tmp_path, lag_us, hurry):
    """States, too, have all their time: what ran behind the first optimizer's step belongs to no step before it."""
    analysis = analyze(unmarked_rank(lag_us, hurry).write(tmp_path / "rank0.json"))
    assert "Q121" in {item.code for item in analysis.data_quality}
    assert analysis.step_time_us.median == pytest.approx(STEP_US, rel=0.02)
    assert analysis.breakdown_us.exposed_communication == pytest.approx(200, rel=0.01)
    assert analysis.states["gradient"].exposed_us == pytest.approx(200, rel=0.01)
    assert analysis.states["gradient"].count == 1


def queued_rank(steps, kernels=60):
    """A host that queues 700 us of computing and a 500 us all-reduce into each step that it marks for 700 us.

    The last all-reduce is one kernel of many, nearly all of it behind the last mark.
    """
    trace = TraceBuilder(0, 8)
    for step in range(steps):
        host, device = step * 1200.0, step * 1200.0 + 5
        trace.step(step, host, 700 if step == steps - 1 else 1200)
        for number in range(kernels):
            launched(trace, device + number * 700 / kernels, 700 / kernels, host + number * 5)
        trace.backward(host + 300, 200, sequence=step + 1)
        trace.collective(
            "AllReduce", device + 700, 500, nelems=1 << 20, issue=host + 310, seq=step,
            owners=("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
        )  # fmt: skip
        number = trace.events[-1]["args"]["correlation"]
        trace.row("cuda_runtime", "cudaLaunchKernelExC", host + 313, 2, 1, correlation=number)
    return trace


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_a_long_collective_behind_the_last_mark_belongs_to_the_step_that_launched_it(steps, tmp_path):
    analysis = analyze(queued_rank(steps).write(tmp_path / "rank0.json"))
    assert analysis.step_time_us.values[-1] == pytest.approx(1200, rel=0.01)
    assert analysis.breakdown_us.exposed_communication == pytest.approx(500, rel=0.01)
    assert analysis.states["gradient"].exposed_us == pytest.approx(500, rel=0.01)


@pytest.mark.parametrize("sent_us", [500, 900])
def test_what_is_sent_on_beside_the_next_step_makes_the_last_one_no_longer(sent_us, tmp_path):
    """Of 1200 us steps that compute throughout; each one's all-reduce begins 100 us before its end."""
    trace = TraceBuilder(0, 8)
    for step in range(6):
        base = step * 1200.0
        trace.step(step, base, 1200)
        for number in range(60):
            launched(trace, base + 5 + 20 * number, 20, base + 20 * number)
        trace.collective("AllReduce", base + 1100, sent_us, nelems=1 << 20, issue=base + 1080, seq=step)
        number = trace.events[-1]["args"]["correlation"]
        trace.row("cuda_runtime", "cudaLaunchKernelExC", base + 1083, 2, 1, correlation=number)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.step_time_us.values == pytest.approx([1200] * 6, rel=0.01)


def test_where_the_recording_paused_a_step_ends_with_its_own_work(tmp_path):
    """Two recordings in one file, 100 ms apart, of two steps each."""
    trace = queued_rank(4)
    for event in trace.events[len(trace.events) // 2 :]:
        event["ts"] += 100_000
    for event in trace.events:
        if event["name"] == "ProfilerStep#1":
            event["dur"] = 700
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.step_time_us.values == pytest.approx([1200] * 4, rel=0.01)


def without_arguments(trace):
    """The trace as torch before 2.1 wrote it: calls of collectives say nothing, kernels only their launch."""
    keep = ("External id", "stream", "correlation", "Sequence number")
    for event in trace.events:
        event["args"] = {key: value for key, value in event["args"].items() if key in keep}
    return trace


def test_calls_without_names_and_shapes_still_issue_their_kernels(tmp_path):
    analysis = analyze(write_run(tmp_path / "run", [without_arguments(fsdp_rank(rank)) for rank in range(2)]))
    states = analysis.states
    assert states["unknown"].count == 0
    assert (states["parameter"].count, states["gradient"].count) == (3, 2)
    assert analysis.run.strategy.triple == "GGG"  # of all ranks, since no other group is known
    assert "Q321" in {item.code for item in analysis.data_quality}


def test_kernels_of_the_profilers_warm_up_need_no_word_about_their_groups(tmp_path):
    """Their calls were not recorded; kernels of recorded steps name their groups, and no figure counts the others."""
    traces = [fsdp_rank(rank) for rank in range(2)]
    kernel = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    for trace in traces:
        trace.row("kernel", kernel, -500, 90, tid=21, stream=21, correlation=1)
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert "Q321" not in {item.code for item in analysis.data_quality}


def test_idle_time_with_work_in_the_queue_is_not_the_hosts(tmp_path):
    def rank(launch_lead_us):
        trace = TraceBuilder(0, 1)
        for step in range(3):
            base = step * STEP_US
            trace.step(step, base, STEP_US)
            trace.backward(base + 1, 10, sequence=step + 1)
            for number in range(4):
                at = base + 150 + number * 200
                launched(trace, at, 100, at - launch_lead_us)
        return trace.write(tmp_path / "rank0.json")

    # Each kernel of 100 us starts 100 us after the one before it ended; between steps it is 300 us.
    queued = analyze(rank(100))
    assert queued.verdict.regime == "unknown"
    assert "kernels are missing from the trace" in queued.verdict.text
    assert queued.idle_us.queued == pytest.approx(11 * (100 - 3) / 3)  # eleven gaps, launches take 3 us
    starved = analyze(rank(5))
    assert starved.verdict.regime == "host_bound"
    assert starved.idle_us.queued < 0.1 * starved.breakdown_us.idle


@pytest.mark.parametrize("category", ["user_annotation", "cpu_op"])  # the latter before torch 1.10
def test_the_data_loader_is_named(tmp_path, category):
    trace = TraceBuilder(0, 1)
    for step in range(3):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
        trace.row(category, loader, base + 1, 400, 1, **{"External id": trace.next_id()})
        trace.backward(base + 450, 100, sequence=step + 1)
        launched(trace, base + 500, 400, base + 490)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert "the DataLoader holds the training thread for 400 us of the 1 ms step" in analysis.verdict.text
    (found,) = [item for item in analysis.findings if item.code == "PARO031"]
    assert "DataLoader" in found.text


@pytest.mark.parametrize("told_by", ["backend", "device", "calls"])
def test_a_job_on_devices_that_recorded_its_host_only_is_counted_not_timed(told_by, tmp_path):
    """NCCL, a device, or collectives without the spans that gloo records with its own."""
    trace = fsdp_rank(0)
    trace.events = [event for event in trace.events if event["cat"] != "kernel"]
    document = json.loads(trace.text())
    if told_by != "backend":
        del document["distributedInfo"]
    if told_by == "calls":
        del document["deviceProperties"]
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(document))
    analysis = analyze(path)
    assert analysis.verdict.regime == "unknown"
    assert "Q122" in {item.code for item in analysis.data_quality}
    assert analysis.breakdown_us.compute is None
    assert sum(entry.count for entry in analysis.states.values()) == 10  # five a step, two steps


def test_a_single_gather_of_a_server_is_no_strategy(tmp_path):
    trace = TraceBuilder(0, 8)
    for step in range(3):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.compute(base + 10, 700)
        trace.collective("AllGather", base + 710, 200, nelems=1 << 20, issue=base + 20, seq=step)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.strategy.triple is None
    assert analysis.verdict.text.startswith("No training was recorded")
    assert "harding" not in analysis.verdict.text


def test_a_last_step_that_recording_cut_to_nothing_does_not_count(tmp_path):
    trace = fsdp_rank(0)
    trace.step(7, 2000, 20)
    assert len(facts_of(trace.write(tmp_path / "rank0.json")).steps) == 2


@pytest.mark.parametrize("num_steps", [1, 3])
def test_a_first_step_that_was_launched_before_the_device_was_recorded_does_not_count(num_steps, tmp_path):
    trace = TraceBuilder(0, 1)
    for step in range(num_steps):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.backward(base + 1, 10, sequence=step + 1)
        for number in range(9):
            launched(trace, base + 50 + number * 100, 100, base + 40 + number * 100)
            if step == 0 and number < 5:
                assert trace.events.pop()["cat"] == "kernel"
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    told = next(item.message for item in analysis.data_quality if item.code == "Q124")
    assert "5 kernels launched before the first have none" in told
    if num_steps > 1:
        assert "1 step is left out" in told
        assert analysis.breakdown_us.compute == pytest.approx(900)
    else:
        assert "idle times come out too long" in told


def test_a_job_of_one_process_is_not_asked_for_more_ranks(tmp_path):
    trace = TraceBuilder(0, 1)
    for step in range(3):
        trace.step(step, step * STEP_US, STEP_US)
        trace.backward(step * STEP_US + 100, 300, sequence=step + 1)
        trace.compute(step * STEP_US + 10, 900)
    document = trace.document()
    del document["distributedInfo"]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    analysis = analyze(path)
    assert "Q313" not in {item.code for item in analysis.data_quality}
    (found,) = [item for item in analysis.findings if item.code == "PARO030"]
    assert found.status == "does not apply"


@pytest.mark.parametrize("late_us", [0.0, 40.0])
def test_with_two_ranks_the_whole_wait_is_the_late_ones(tmp_path, late_us):
    ranks = [fsdp_rank(0, steps=3), fsdp_rank(1, late_us=late_us, steps=3)]
    analysis = analyze(write_run(tmp_path / "run", ranks))
    if late_us:
        (found,) = analysis.stragglers
        assert (found.rank, found.lateness_us) == (1, pytest.approx(late_us, rel=0.05))
    else:
        assert analysis.stragglers == ()


CORPUS = SHARED / "corpus"
HTA = "facebookresearch+HolisticTraceAnalysis/tests/data"
# By scripts of their own over the events: kernels put into steps by their launches, times in us, bytes of the buffer.
PUBLIC: dict[str, dict[str, Any]] = {
    "facebookresearch+param/et_replay/tests/inputs/dlrm_kineto.tar.gz": {
        "regime": "host_bound", "triple": "NNN", "world": 8, "nodes": 1, "parameters": 621_313,
        "counts": {"gradient": 3, "other": 5}, "compute": 1108.1, "exposed": 5861.25, "idle": 9018.5,
    },
    f"{HTA}/nccl_parser_config/nccl_data.json.gz": {
        "regime": "host_bound", "triple": "NNN", "world": 2, "parameters": 25_557_032,
        "counts": {"gradient": 5, "other": 2}, "compute": 38552, "exposed": 13187, "idle": 169868,
    },
    f"{HTA}/trace_diff/control/control.json.gz": {
        "triple": "NNN", "world": 8, "nodes": 1, "counts": {"gradient": 3, "other": 7}, "compute": 46889,
        "exposed": 14650, "says": "7 all-to-alls",
    },
    f"{HTA}/negative_queue_length_values_check/rank0.json.gz": {
        "regime": "unknown", "triple": "NNN", "world": 16, "nodes": 2, "parameters": 448_289_732,
        "counts": {"gradient": 2}, "step": 216_150, "lag": 162_000, "says": "next one was launched already",
    },
    "AMD-AGI+TraceLens/tests/traces/mi300/resnet_act_checkpoint.json.gz": {
        "triple": "NNN", "world": 8, "nodes": 1, "parameters": 11_689_512, "counts": {"gradient": 2, "other": 2},
        "compute": 6411.4, "exposed": 11761.0, "step": 18_839, "says": "2 all-reduces of 5.48 MiB to 16.8 MiB",
        "regime": "unknown",  # 3.5 GB/s inside a node of MI300X is no limit of its links
    },
    "AMD-AGI+TraceLens/tests/traces/h100/gaunernst_bert-small-uncased__1016001.json.gz": {
        "triple": None, "counts": {}, "compute": 307.2, "idle": 4116.7, "says": "No training was recorded",
    },
    "AMD-AGI+TraceLens/tests/traces/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz": {
        "regime": "compute_bound", "triple": None, "counts": {}, "compute": 156_008.4,
        "says": "No training was recorded",
    },
    f"{HTA}/rank_unavailable/rank_not_found.json.gz": {"regime": "unknown", "triple": None, "counts": {}},
    f"{HTA}/cpu_only/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz": {
        "regime": "unknown", "triple": None, "world": 300, "counts": {"unknown": 10},
    },
    f"{HTA}/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz": {
        "regime": "host_bound", "counts": {}, "compute": 110.9, "idle": 9139.2, "step": 9288.3,
    },
    "pytorch+kineto/plugin/samples/resnet50_num_workers_0/worker0.pt.trace.json.gz": {
        "regime": "host_bound", "counts": {}, "says": "the DataLoader holds the training thread for 47.1 ms",
    },
}  # fmt: skip


@pytest.mark.corpus
@pytest.mark.parametrize("name", PUBLIC)
def test_public_traces_say_what_an_expert_reads_in_them(name):
    expected, analysis = PUBLIC[name], analyze(CORPUS / name)
    run, parts = analysis.run, analysis.breakdown_us
    close = {
        "compute": parts.compute,
        "exposed": parts.exposed_communication,
        "idle": parts.idle,
        "lag": analysis.lag_us,
    }
    for key, value in close.items():
        if key in expected:
            assert value == pytest.approx(expected[key], rel=0.01), key
    if "step" in expected:
        assert sum(analysis.step_time_us.values) / run.num_steps == pytest.approx(expected["step"], rel=0.005)
    exact = {
        "regime": analysis.verdict.regime, "triple": run.strategy.triple, "world": run.world_size,
        "nodes": run.num_nodes, "parameters": run.parameter_count,
    }  # fmt: skip
    for key, value in exact.items():
        assert expected.get(key, value) == value, key
    counts = {name: round(entry.count, 2) for name, entry in analysis.states.items() if entry.count}
    assert expected["counts"].items() <= counts.items()
    assert expected.get("says", "") in analysis.verdict.text


# What an engineer who opens the trace would say first.
FIRST = {
    "facebookresearch+param/et_replay/tests/inputs/dlrm_kineto.tar.gz": "Host bound: the devices wait for work that the "
    "host has not launched yet",
    f"{HTA}/nccl_parser_config/nccl_data.json.gz": "Host bound: the devices wait for work",
    f"{HTA}/trace_diff/control/control.json.gz": "Mostly compute (60% of the step); beside it intra-node bandwidth bound",
    f"{HTA}/negative_queue_length_values_check/rank0.json.gz": "Cannot tell: for 138 ms of the 215 ms step no recorded "
    "kernel runs although the next one was launched already",
    "AMD-AGI+TraceLens/tests/traces/mi300/resnet_act_checkpoint.json.gz": "Communication bound, cause unknown (or a rank "
    "without a trace is slow): 2 all-reduces of 5.48 MiB to 16.8 MiB a step for gradients take 15.7 ms of the 18.8 ms step",
    f"{HTA}/amd_trace/mi250_minitoy_train_ROCm6_2_kineto.json.gz": "Host bound: the devices wait for work",
    "pytorch+kineto/plugin/samples/resnet50_num_workers_0/worker0.pt.trace.json.gz": "Host bound: the DataLoader holds the "
    "training thread for 47.1 ms of the 214 ms step",
    "AMD-AGI+TraceLens/tests/traces/h100/gaunernst_bert-small-uncased__1016001.json.gz": "No training was recorded",
    "AMD-AGI+TraceLens/tests/traces/inference/vllm_prefilldecode_piecewise/graph_execution.json.gz": "No training was",
    "hpcgroup+pipit/pipit/tests/data/saxpy-mpi-cuda_nsys_perlmutter0.sqlite": "Nothing here tells whether a model is "
    "trained",
    "Timez-zx+nccl-tests/nccl.log": "No training: this is a benchmark's output",
    "sugarlxn+nccl_test/baseline/nccl_default/all_gather_perf_1node_4dev_4090/stone-pid3326096.log": "Nothing here tells",
    "bigscience-workshop+bigscience/experiments/gpt2-hf-ds/hf_ds_gpt2_base_n4-1832555.out": "Iterations take 57.4 s (mean",
    "bigscience-workshop+bigscience/experiments/gpt2-meg-ds-zero/meg_ds_zero_gpt2_perf_n16-1999616.out": "Iterations take "
    "128 s (median",
}


@pytest.mark.corpus
@pytest.mark.parametrize("name", FIRST)
def test_the_first_sentence_is_what_an_engineer_would_say(name):
    assert analyze(CORPUS / name).verdict.text.startswith(FIRST[name])


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "framework", "triple", "world"),
    [
        ("gpt2-hf-ds/hf_ds_gpt2_base_n4-1832555.out", "DeepSpeed", "GGG", 16),
        ("gpt2-meg-ds-zero/meg_ds_zero_gpt2_perf_n16-1999616.out", "DeepSpeed", "GGG", 64),
    ],
)
def test_logs_say_framework_stage_and_world(name, framework, triple, world):
    run = analyze(CORPUS / "bigscience-workshop+bigscience" / "experiments" / name).run
    assert (run.framework, run.strategy.triple, run.world_size) == (framework, triple, world)


def test_recorded_runs_keep_their_order_of_truth():
    # The launches of these are read only where ids do not link kernels: nothing above may change what they say.
    for name in ("fsdp2-inter-bw", "ds-zero3"):
        truth = json.loads((DATA / "nccl_like" / name / "truth.json").read_text())
        analysis = analyze(DATA / "nccl_like" / name / "traces")
        assert analysis.states["parameter"].count == truth["summary"]["states"]["parameter"]["count"]
        assert analysis.lag_us == 0


def test_a_script_that_profiles_itself_while_it_is_recorded_has_each_step_once(tmp_path):
    """Its profiler marks steps too, by the same thread some microseconds later, under the same or another number."""
    traces = []
    for rank in range(2):
        trace = fsdp_rank(rank)
        marks = [event for event in trace.events if event["name"].startswith("ProfilerStep#")]
        for offset, mark in enumerate(marks):
            number = int(mark["name"].partition("#")[2]) + offset % 2
            trace.step(number, mark["ts"] - trace.offset + 30, mark["dur"])
        traces.append(trace)
    plain = analyze(write_run(tmp_path / "plain", [fsdp_rank(rank) for rank in range(2)]))
    twice = analyze(write_run(tmp_path / "twice", traces))
    assert twice.run.num_steps == plain.run.num_steps
    assert twice.states["parameter"].count == plain.states["parameter"].count


def host_bound_rank(name, spent_us, steps=3):
    """Steps of 1000 us that compute 300; the host is in something for a while, and in nothing that is recorded else."""
    trace = TraceBuilder(0, 1)
    for step in range(steps):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.backward(base + 50, 100, sequence=step + 1)
        launched(trace, base + 100, 300, base + 90)
        trace.annotation(name, base + 450, spent_us)
    return trace


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "the DataLoader holds the training thread"),
        ("Optimizer.step#DeepSpeedCPUAdam.step", "the host is in the optimizer's step"),
    ],
)
def test_a_cause_of_idle_devices_is_named_if_it_explains_most_of_it(name, told, tmp_path):
    for spent_us, is_told in ((500, True), (150, False)):  # of 700 us
        text = analyze(host_bound_rank(name, spent_us).write(tmp_path / "rank0.json")).verdict.text
        assert text.startswith("Host bound")
        assert (told in text) is is_told


def test_devices_that_only_copy_are_bound_by_copies(tmp_path):
    trace = TraceBuilder(0, 1)
    for step in range(3):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.backward(base + 450, 100, sequence=step + 1)
        trace.copy(base, 450)
        launched(trace, base + 450, 540, base + 440)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.verdict.regime == "host_bound"
    assert analysis.verdict.text.startswith("Bound by copies: for 450 us of the 1 ms step")
    assert "compute 54%, exposed communication 0%, copies 45%, idle 1%" in analysis.verdict.text
    assert "PARO031" in {item.code for item in analysis.findings if item.status == "applies"}
