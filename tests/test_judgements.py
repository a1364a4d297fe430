"""Strategies, regimes, links, topology and figures of merit from numbers alone."""

from __future__ import annotations

import json
import math
import re

import polars as pl
import pytest
from helpers import analyze, write_run
from test_latency_and_bandwidth import samples
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.judgement.step_evidence import StepEvidence
from paro_advise.advisor.analysis.judgement.verdict import judge_step
from paro_advise.advisor.analysis.observed.parameters import parameter_count
from paro_advise.advisor.analysis.observed.strategy import infer_strategy
from paro_advise.advisor.analysis.regimes import Regime, ShareRange, StateEvidence, judge_state
from paro_advise.advisor.ranks.links.latency import Fabric
from paro_advise.advisor.ranks.links.link_fit import fit_links
from paro_advise.advisor.rendering.texts.analysis_text import analysis_text
from paro_advise.core.collective import bus_factor
from paro_advise.core.framework import Framework
from paro_advise.core.model_state import State
from paro_advise.errors import UsageError

STEP_US = 1000.0
NCCL = Fabric(is_gloo=False, device_name=None, ranks_per_node=8)


def evidence(**changes):
    numbers = {
        "count": 10.0, "total_us": 400.0, "exposed_us": 300.0, "wait_us": 10.0, "latency": ShareRange(low=0.05, high=0.1), "inter_share": 1.0,
        "overlapped_slowdown": 1.0, "overlapped_share": 0.25, "sees_all_ranks": True,
    }  # fmt: skip
    return StateEvidence(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("changes", "regime"),
    [
        ({"count": 0.0}, Regime.ABSENT),
        ({"exposed_us": 19.9}, Regime.HIDDEN),  # below 2 % of the step
        ({"exposed_us": 20.1}, Regime.BANDWIDTH_INTER),
        ({}, Regime.BANDWIDTH_INTER),
        ({"inter_share": 0.2}, Regime.BANDWIDTH_INTRA),
        ({"inter_share": None}, Regime.UNKNOWN),
        ({"inter_share": 0.2, "rate": (3.5, 448.0)}, Regime.UNKNOWN),  # 0.8 % of the links: nobody's bandwidth
        ({"inter_share": 0.2, "rate": (200.0, 448.0)}, Regime.BANDWIDTH_INTRA),
        ({"wait_us": 201.0}, Regime.STRAGGLER),
        ({"wait_us": None}, Regime.BANDWIDTH_INTER),
        ({"latency": ShareRange(low=0.51, high=0.9)}, Regime.LATENCY),
        ({"latency": ShareRange(low=0.2, high=0.8)}, Regime.UNKNOWN),  # either, so neither
        ({"overlapped_slowdown": 1.5, "overlapped_share": 0.6}, Regime.CONTENTION),
        ({"overlapped_slowdown": 1.5, "overlapped_share": 0.4}, Regime.BANDWIDTH_INTER),
    ],
)
def test_regime_of_a_state(changes, regime):
    got = judge_state(State.PARAMETER, evidence(**changes), STEP_US)
    assert got.regime == regime
    assert got.text


def step_evidence(**changes):
    numbers = {
        "step_time_us": STEP_US, "compute_us": 500.0, "exposed_us": 400.0, "idle_us": 100.0,
        "exposed_by_state": {State.PARAMETER: 300.0, State.GRADIENT: 100.0},
        "regime_by_state": {State.PARAMETER: Regime.BANDWIDTH_INTER, State.GRADIENT: Regime.HIDDEN},
        "num_nodes": 4, "inter_gbps": 20.0, "intra_gbps": 200.0, "shards_globally": True, "sees_all_ranks": True, "is_cut": False,
    }  # fmt: skip
    return StepEvidence(**{**numbers, **changes})


@pytest.mark.parametrize(
    ("changes", "regime", "case"),
    [
        ({}, Regime.BANDWIDTH_INTER, "communication_bound"),
        ({"num_nodes": 2}, Regime.BANDWIDTH_INTER, "memory_bound_few_nodes"),
        ({"num_nodes": 1}, Regime.BANDWIDTH_INTER, ""),
        ({"inter_gbps": 150.0}, Regime.BANDWIDTH_INTER, "fast_fabric"),
        ({"exposed_us": 40.0, "compute_us": 900.0, "idle_us": 60.0}, Regime.COMPUTE_BOUND, "fast_fabric"),
        ({"exposed_us": 100.0, "compute_us": 300.0, "idle_us": 600.0}, Regime.HOST_BOUND, ""),
        ({"step_time_us": 0.0}, Regime.UNKNOWN, ""),
        ({"is_cut": True}, Regime.UNKNOWN, ""),
    ],
)
def test_verdict_on_the_step(changes, regime, case):
    got = judge_step(step_evidence(**changes))
    assert (got.regime, got.case) == (regime, case)
    assert (got.limiting_state == "parameter") == (regime == Regime.BANDWIDTH_INTER)


def test_states_that_one_regime_limits_are_weighed_together():
    """Tensor parallelism's 141 us inside nodes, and gradients' 122 and updated parameters' 61 between them."""
    exposed = {State.OTHER: 141.0, State.GRADIENT: 122.0, State.OPTIMIZER: 61.0, State.UNKNOWN: 10.0}
    inter, intra = Regime.BANDWIDTH_INTER, Regime.BANDWIDTH_INTRA
    limits = {State.OTHER: intra, State.GRADIENT: inter, State.OPTIMIZER: inter, State.UNKNOWN: Regime.HIDDEN}
    got = judge_step(step_evidence(exposed_us=324.0, exposed_by_state=exposed, regime_by_state=limits))
    assert (got.regime, got.limiting_state) == (inter, "gradient")
    assert got.text.startswith("Inter-node bandwidth bound: gradient communication takes 122 us")
    assert got.text.endswith("With optimizer communication, which is bound alike, 183 us are exposed (56% of all).")
    alone = judge_step(
        step_evidence(exposed_us=324.0, exposed_by_state=exposed | {State.OPTIMIZER: 18.0}, regime_by_state=limits)
    )
    assert (alone.regime, alone.limiting_state) == (intra, "other")


def test_no_case_of_the_networks_is_named_where_other_ranks_are_waited_for():
    assert judge_step(step_evidence(regime_by_state={State.PARAMETER: Regime.STRAGGLER})).case == ""


def test_what_sharding_changes_beside_communication_is_said_of_a_step_that_computes():
    """Of 1,000 us: 10 of communication are exposed, the optimizer takes 60 on each rank, copies of gathered parameters 5."""
    evidence = {"compute_us": 990.0, "exposed_us": 10.0, "idle_us": 0.0, "exposed_by_state": {State.GRADIENT: 10.0}}
    plain = judge_step(step_evidence(**evidence))
    assert "No change of sharding can gain more than 1.0%." in plain.text
    updating = judge_step(step_evidence(**evidence, updates_whole_us=60.0, laid_out_us=5.0))
    told = "at most the 1.0% of exposed communication and, on top of it, what the optimizer's step on each rank takes (6.0%)."
    assert told in updating.text


def step_of(*rows):
    """rows: (state, detail, op, group size, phase, micro-batch)."""
    names = ("state", "detail", "op", "group_size", "phase", "micro_batch")
    data = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    data["group_name"] = [f"ranks of {size}" if size else "" for size in data["group_size"]]
    every = {"bytes": 400, "dtype": "float", "owner": "", "group_ranks": ""}
    return pl.DataFrame({**data, **{name: [value] * len(rows) for name, value in every.items()}})


def gather(size, detail="forward", micro=0):
    return ("parameter", detail, "all_gather", size, detail.split(",")[0], micro)


def scatter(size, micro=0, phase="backward"):
    return ("gradient", "reduce", "reduce_scatter", size, phase, micro)


def reduce(size, micro=0, detail="reduce", phase="backward"):
    return ("gradient", detail, "all_reduce", size, phase, micro)


def updated(size):
    return ("optimizer", "updated parameters", "all_gather", size, "update", None)


STRATEGIES = [
    ("GGG", None, 1, Framework("FSDP2"), [gather(32), gather(32, "backward"), scatter(32)]),
    ("NGG", None, 1, Framework("FSDP2"), [gather(32), scatter(32)]),  # reshard_after_forward=False
    ("III", 8, 1, Framework("FSDP2"), [gather(8), gather(8, "backward"), scatter(8), reduce(4, detail="replica")]),
    ("III", 8, 1, Framework("FSDP1"), [gather(8), gather(8, "backward"), scatter(8), reduce(None, detail="replica")]),
    # As FSDP1 gathers on gloo, by lists: no size is recorded.
    (
        "III",
        8,
        1,
        Framework("FSDP1"),
        [gather(None), gather(None, "backward"), scatter(8), reduce(None, detail="replica")],
    ),
    ("NII", 8, 1, Framework("FSDP1"), [gather(None), scatter(8), reduce(None, detail="replica")]),
    # Gradients are scattered once, after the last of three passes.
    ("NNG", None, 3, Framework("unknown"), [scatter(32, micro=2, phase="boundary"), updated(32)]),
    ("NII", 8, 1, Framework("FSDP2"), [gather(8), scatter(8), reduce(4, detail="replica")]),
    ("NNN", None, 4, Framework("DDP"), [reduce(32, micro=3)]),
    ("NNN", None, 1, Framework("DDP"), [reduce(32)]),
    ("NNG", None, 4, Framework("DeepSpeed"), [reduce(32, phase="boundary", micro=3), updated(32)]),
    ("NGG", None, 2, Framework("DeepSpeed"), [reduce(32), reduce(32, micro=1), updated(32)]),
    ("NNG", None, 1, Framework.DDP_ZERO, [reduce(32), updated(32)]),
    ("GGG", None, 1, Framework("DeepSpeed"), [gather(32), gather(32, "backward"), reduce(32)]),
    ("IIG", 8, 2, Framework("unknown"), [gather(8), gather(8, "backward"), scatter(8), scatter(8, 1), updated(4)]),
    ("IGG", 8, 2, Framework("unknown"), [gather(8), gather(8, "backward"), scatter(32), scatter(32, 1), updated(4)]),
    ("NIG", 8, 2, Framework("unknown"), [scatter(8), scatter(8, 1), updated(32)]),
    (  # MiCS, whose small parameters stay whole between steps
        "III",
        8,
        1,
        Framework("DeepSpeed"),
        [gather(8), gather(8, "backward"), reduce(8), reduce(4, detail="replica"), updated(8)],
    ),
    (
        "GGG",
        None,
        1,
        Framework("FSDP2"),
        [gather(4), gather(4, "backward"), scatter(4)],
    ),  # 4 of 32: the rest is TP and PP
    ("NNG", None, 1, Framework("Megatron-LM"), [scatter(4), updated(4)]),  # its buffers hold whole gradients
    ("GGG", None, 1, Framework("Megatron-LM"), [gather(32), gather(32, "backward"), scatter(32)]),  # Megatron-FSDP
    ("IGG", 8, 1, Framework("unknown"), [gather(8), gather(8, "backward"), scatter(32), updated(4)]),  # 8, not the 4
    ("GNG", None, 4, Framework("FSDP2"), [gather(32), gather(32, "backward"), scatter(32, micro=3)]),
    (None, None, 1, Framework("unknown"), []),
]


@pytest.mark.parametrize(("triple", "group", "micro", "framework", "rows"), STRATEGIES)
def test_strategy_from_what_moves(triple, group, micro, framework, rows):
    table = step_of(*rows) if rows else step_of(("other", "", "barrier", None, "", None))
    got = infer_strategy(table, 32, micro, framework)
    assert (got.triple, got.group_size) == (triple, group)
    assert bool(got.reasons) is (triple is not None)


@pytest.mark.parametrize(
    ("size", "rows"),
    [
        (8, [gather(32), gather(32), gather(8, "backward"), scatter(32)]),  # the last unit stays whole
        (8, [gather(32), gather(8, "backward"), gather(8, micro=1), gather(8, "backward", 1), scatter(32, 1)]),  # hpZ
        (None, [gather(32), gather(32, "backward"), scatter(32)]),
        (None, [gather(32), gather(8), gather(32, "backward"), gather(8, "backward"), scatter(32)]),  # experts
        (None, [gather(32), gather(32), gather(32), gather(8), gather(8, "backward"), scatter(32)]),
        (None, [gather(8), gather(4, "backward"), scatter(8), reduce(4, detail="replica")]),  # of groups no setting
    ],
)
def test_a_second_copy_shows_by_what_backward_gathers_inside_groups(size, rows):
    assert infer_strategy(step_of(*rows), 32, 1, Framework.FSDP2).copy_group_size == size


def test_parameters_are_counted_once_per_reduction_pass():
    # 400 bytes of fp32 are 100 elements; two units, reduced in each of two micro-batches.
    rows = [scatter(8, micro) for micro in (0, 1) for _ in range(2)]
    assert parameter_count(step_of(*rows), 2) == 200
    assert parameter_count(step_of(gather(8), gather(8, "backward")), 1) == 100
    assert parameter_count(step_of(("other", "", "barrier", None, "", None)), 1) is None


@pytest.mark.parametrize(
    ("op", "size", "factor"),
    [
        ("all_reduce", 8, 2 * 7 / 8),
        ("all_gather", 8, 7 / 8),
        ("reduce_scatter", 4, 3 / 4),
        ("broadcast", 8, 1.0),
        ("all_gather", 1, 0.0),
    ],
)
def test_bus_bandwidth_factors_are_those_of_nccl_tests(op, size, factor):
    assert bus_factor(op, size) == pytest.approx(factor)


def test_few_calls_are_not_called_many(tmp_path):
    builders = [TraceBuilder(rank, 8) for rank in range(8)]
    for trace in builders:
        for step in range(3):
            trace.step(step, 1000 * step, 1000)
            trace.backward(1000 * step + 100, 300, sequence=step + 1)
            trace.compute(1000 * step + 100, 100)
            owner = ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",)
            trace.collective(
                "AllReduce", 1000 * step + 300, 60, nelems=2000, issue=1000 * step + 200, seq=step, owners=owner
            )
    analysis = analyze(write_run(tmp_path / "run", builders))
    assert analysis.states["gradient"].regime == "latency"
    (found,) = [item for item in analysis.findings if item.code == "PARO022"]
    assert found.status == "applies"
    assert "many small messages" not in found.text
    assert "1 short message a step" in found.text


def test_impossible_bandwidths_are_flagged_not_averaged(tmp_path):
    good = samples([1 << 26], alpha_us=10, busbw_gbps=25)
    wrong = good.with_columns(pl.lit(5.0).alias("time_us")).head(3)
    ((link,), impossible) = fit_links(pl.concat([good, wrong]), NCCL)
    assert impossible == 3
    assert link.busbw_gbps == pytest.approx(25, rel=0.05)
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.collective("AllReduce", 10, 1, nelems=1 << 32, issue=5, seq=1)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert "Q317" in {item.code for item in analysis.data_quality}


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [({}, 8, (8, "metadata", 1)), ({"gpus_per_node": 2}, 8, (2, "flag", 2)), ({}, 2, (2, "metadata", 2))],
)
def test_nodes_come_from_the_flag_or_the_metadata(tmp_path, options, gpus, expected):
    builders = [fsdp_rank(rank, 4) for rank in range(4)]
    for builder in builders:
        builder.gpus_per_node = gpus
    run = analyze(write_run(tmp_path / "run", builders), **options).run
    per_node, source, nodes = expected
    assert (run.gpus_per_node, run.gpus_per_node_source, run.num_nodes) == (min(per_node, 4), source, nodes)


def test_gaps_doubles_and_strangers_are_reported(tmp_path):
    folder = write_run(tmp_path / "run", [fsdp_rank(0, 4), fsdp_rank(1, 4), fsdp_rank(3, 4)])
    fsdp_rank(1, 4, steps=1).write(folder / "again.json")
    fsdp_rank(5, 16).write(folder / "other_run.json")
    analysis = analyze(folder)
    notes = {item.code: item.message for item in analysis.data_quality}
    assert analysis.run.ranks == (0, 1, 3)
    assert analysis.run.ranks_missing == (2,)
    assert "missing: 2" in notes["Q303"]
    assert "again.json (rank 1)" in notes["Q305"]
    assert "of 2 different jobs or recordings; analysed is ranks 0-1, 3 of 4" in notes["Q304"]
    assert "rank 5 of 16 in " in notes["Q304"]


def test_warm_up_steps_can_be_left_out(tmp_path):
    trace = fsdp_rank(0, steps=4)
    trace.events = [
        event for event in trace.events if not (event["name"] == "sm90_gemm" and event["ts"] < trace.offset + 1000)
    ]
    path = trace.write(tmp_path / "rank0.json")
    whole, warm = analyze(path), analyze(path, skip_steps=1)
    assert (whole.run.num_steps, warm.run.num_steps) == (4, 3)
    assert warm.breakdown_us.compute == pytest.approx(540)
    assert whole.breakdown_us.compute == pytest.approx(540 * 3 / 4)
    assert warm.states["parameter"].count == whole.states["parameter"].count == 3


def test_model_flops_utilisation(tmp_path):
    trace = fsdp_rank(0)
    analysis = analyze(trace.write(tmp_path / "rank0.json"), tokens_per_step=4096)
    parameters, step_s, ranks = 68_000, 1e-3, 2
    expected = 6 * parameters * 4096 / ranks / step_s / 989e12  # H100 by the trace, dense bf16
    assert analysis.run.parameter_count == parameters
    assert analysis.efficiency.mfu == pytest.approx(expected)
    assert analyze(tmp_path / "rank0.json").efficiency.mfu is None
    beyond = analyze(tmp_path / "rank0.json", tokens_per_step=math.ceil(4096 / expected) + 1)
    for found, is_beyond in ((analysis, False), (beyond, True)):
        told = [item.message for item in found.data_quality if item.code == "Q344"]
        assert ["an MFU of 100% is more than devices can reach" in message for message in told] == [True] * is_beyond


def test_a_late_rank_needs_two_steps_to_be_named(tmp_path):
    def late(rank, steps):
        trace = fsdp_rank(rank, 4, late_us=60 if rank == 2 else 0, steps=steps)
        if rank == 2:
            for index in range(steps):
                trace.compute(index * 1000.0 + 70, 60)  # what makes it late
        return trace

    run = analyze(write_run(tmp_path / "long", [late(rank, 3) for rank in range(4)]))
    assert [(item.rank, item.cause) for item in run.stragglers] == [(2, "late compute")]
    run = analyze(write_run(tmp_path / "short", [late(rank, 1) for rank in range(4)]))
    assert run.stragglers == ()


def test_a_rank_without_a_trace_may_be_what_looks_like_a_slow_link(tmp_path):
    whole = [fsdp_rank(rank, 4, late_us=60 if rank == 2 else 0) for rank in range(4)]
    folder = write_run(tmp_path / "part", [builder for builder in whole if builder.rank != 2])
    analysis = analyze(folder, gpus_per_node=2)
    assert "a rank without a trace is slow" in analysis.verdict.text
    assert re.search(r" at most \d\d\.\d% of the step inter-node links are busy", analysis_text(analysis))
    assert "(transfers may hold waiting for ranks without a trace)" in analysis_text(analysis)
    assert "a rank without a trace is slow" in analysis.states["parameter"].text
    assert {item.code for item in analysis.data_quality if item.severity == "warning"} >= {"Q314"}
    (finding,) = [item for item in analysis.findings if item.code == "PARO030"]
    assert finding.status == "could not be judged"
    analysis = analyze(write_run(tmp_path / "all", whole), gpus_per_node=2)
    assert "no trace" not in analysis.verdict.text
    assert re.search(r", \d\d\.\d% of the step inter-node links are busy", analysis_text(analysis))
    assert "without a trace" not in analysis_text(analysis)


def test_a_cut_trace_gets_no_verdict_and_does_not_spoil_the_others(tmp_path):
    folder = write_run(tmp_path / "run", [fsdp_rank(0, 3), fsdp_rank(1, 3)])
    text = fsdp_rank(2, 3).text()
    (folder / "rank2.json").write_text(text[: int(len(text) * 0.6)])
    analysis = analyze(folder)
    assert analysis.run.ranks == (0, 1)
    assert analysis.breakdown_us.compute == pytest.approx(540)
    assert "Q307" in {item.code for item in analysis.data_quality}
    alone = analyze(folder / "rank2.json")
    assert alone.verdict.regime == "unknown"
    assert alone.verdict.text.startswith("No verdict: the trace ends early")


@pytest.mark.parametrize("wrong", [{"gpus_per_node": 3}, {"skip_steps": 2}])
def test_options_that_do_not_fit_the_run_are_refused(tmp_path, wrong):
    with pytest.raises(UsageError):
        analyze(write_run(tmp_path / "run", [fsdp_rank(0, 4), fsdp_rank(1, 4)]), **wrong)


def test_thousands_of_sizes_are_fitted_in_bounded_memory():
    sizes = [10_000 + 6_400 * number for number in range(20_000)]
    times = [30 + size * 7 / 8 / 25e3 for size in sizes]
    columns = {"op": "all_to_all", "span": "inter", "group_size": 8, "lone": False}
    data = pl.DataFrame({"bytes": sizes, "time_us": times}).with_columns(
        **{name: pl.lit(value) for name, value in columns.items()}
    )
    ((link,), _) = fit_links(data, NCCL)
    assert link.busbw_gbps == pytest.approx(25, rel=0.05)


@pytest.mark.parametrize("ranks", [8, 1])
def test_long_messages_beside_a_device_of_quick_links_are_no_latency(tmp_path, ranks):
    """191 MiB gathered by H100s at 20 GB/s, as over PCIe: 7 hops of NCCL take 64 us, not 8 ms, whatever NVLink could."""
    nelems = 100_000_000
    duration = 2 * nelems * 7 / 8 / 20e3  # us at 20 GB/s of bus bandwidth
    builders = [TraceBuilder(rank, 8) for rank in range(ranks)]
    for builder in builders:
        for step in range(2):
            base = step * 100_000.0
            builder.step(step, base, 100_000.0)
            for number in range(8):
                builder.collective(
                    "AllGather", base + 10 + number * 10_000.0, duration, nelems=nelems, issue=base + number,
                    seq=step * 10 + number, owners=("FSDP::pre_forward", "FSDP::all_gather"),
                )  # fmt: skip
    analysis = analyze(write_run(tmp_path / "run", builders))
    (link,) = analysis.links
    assert link.busbw_gbps == pytest.approx(20.0, rel=0.02)
    assert link.alpha_high_us < 100
    assert analysis.states["parameter"].regime == ("bandwidth_intra" if ranks == 8 else "unknown")
    assert "Latency" not in analysis.verdict.text


def test_no_latency_is_longer_than_the_quickest_message():
    """Sizes whose times scatter: a line through them may start above the smallest one's time, a latency may not."""
    rows = [(1 << 20, 122.0), (4 << 20, 3400.0), (8 << 20, 1200.0), (16 << 20, 3900.0), (32 << 20, 4100.0)]
    samples = pl.DataFrame(
        {
            "op": "all_reduce", "span": "intra", "group_size": 8, "bytes": [size for size, _ in rows],
            "time_us": [time for _, time in rows], "lone": False, "partial": False,
        }
    )  # fmt: skip
    ((link,), _) = fit_links(samples, NCCL)
    assert link.alpha_us <= link.alpha_high_us <= 122.0


def test_a_frozen_forward_is_no_micro_batch(tmp_path):
    trace = fsdp_rank(0)
    for index in range(2):
        trace.annotation("FSDP::root_pre_forward", index * 1000.0 + 120, 10)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert (analysis.run.micro_batches, analysis.run.strategy.triple) == (1, "GGG")


def test_a_gather_that_ddp_cannot_have_made_is_other(tmp_path):
    trace = TraceBuilder(0, 2)
    trace.step(1, 0, 1000)
    trace.annotation("DistributedDataParallel.forward", 5, 300)
    trace.collective("AllGather", 100, 10, nelems=512, issue=60, seq=1)
    trace.backward(400, 300, sequence=9)
    trace.collective("AllReduce", 600, 50, nelems=1 << 22, issue=500, seq=2, tid=2, owners=("x AccumulateGrad",))
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.strategy.triple == "NNN"
    assert analysis.states["parameter"].count == 0
    assert analysis.states["other"].count == 1


def test_files_that_say_no_rank_are_not_all_ranks_of_a_world(tmp_path):
    for number in range(3):
        document = fsdp_rank(0, 2).document()
        del document["distributedInfo"]
        (tmp_path / f"trace_{number}.json").write_text(json.dumps(document))
    assert analyze(tmp_path).run.world_size is None


def test_ranks_are_those_that_collectives_state_where_nothing_else_does(tmp_path):
    """Files of three of four processes, named by host and process as torch's handler does."""
    for number, rank in enumerate((3, 0, 1)):
        document = fsdp_rank(rank, 4).document()
        del document["distributedInfo"]
        for event in document["traceEvents"]:
            if "Process Group Ranks" in event.get("args", {}):
                ranks = json.loads(event["args"]["Process Group Ranks"])
                event["args"]["Rank"] = ranks.index(rank)
        shared = next(event for event in document["traceEvents"] if "Process Group Ranks" in event.get("args", {}))
        rooted = {**shared["args"], "Collective name": "broadcast", "Rank": 0}  # states its root's
        document["traceEvents"].append({**shared, "ts": shared["ts"] + 1, "args": rooted})
        (tmp_path / f"node_{4100 + number}.1700000000.pt.trace.json").write_text(json.dumps(document))
    analysis = analyze(tmp_path)
    assert analysis.run.ranks == (0, 1, 3)
    assert "Q306" not in {item.code for item in analysis.data_quality}


def test_a_number_of_ranks_per_node_that_the_inputs_contradict_is_told(tmp_path):
    folder = write_run(tmp_path, [fsdp_rank(rank, 4) for rank in range(4)])
    told = analyze(folder).run.gpus_per_node
    assert told == 4
    contradicted = {item.code: item.message for item in analyze(folder, gpus_per_node=2).data_quality}
    assert "2 ranks per node, as --gpus-per-node says; the inputs tell 4, by the" in contradicted["Q342"]
    assert "Q342" not in {item.code for item in analyze(folder, gpus_per_node=4).data_quality}


def with_reductions_of(group, folder):
    """Two ranks that compute for 100 us and then reduce for 300 us among a group of this description."""
    builders = [TraceBuilder(rank, 2, groups=[("0", group, [0, 1])]) for rank in range(2)]
    for trace in builders:
        for step in range(3):
            trace.step(step, 1000 * step, 500)
            trace.compute(1000 * step + 50, 100)
            trace.collective("AllReduce", 1000 * step + 150, 300, nelems=4 << 20, issue=1000 * step + 60, seq=step)
    return {found.code: found for found in analyze(write_run(folder, builders)).findings}


def test_tensor_parallel_reductions_are_a_finding_that_no_sharding_mends(tmp_path):
    found = with_reductions_of("mesh_tp", tmp_path / "run")["PARO013"]
    assert (found.status, round(found.saving_us)) == ("applies", 300)
    assert "1 all-reduce of 8 MiB a step" in found.text


def test_reductions_that_nothing_explains_are_said_to_have_no_known_purpose(tmp_path):
    found = with_reductions_of("undefined", tmp_path / "run")["PARO040"]
    assert found.status == "applies"
    assert "100% of the communication time has no known purpose" in found.text
