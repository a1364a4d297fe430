"""Traces that lack names, types or times of what they hold: what follows from the rest, and no more."""

from __future__ import annotations

import json

import pytest
from conftest import DATA
from helpers import analyze, write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.analysis.observed.strategy import StrategySource
from paro_advise.advisor.analysis.parallel import data_parallel_size
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.rendering.texts.analysis_text import confidence, parameters_text

UNITS = 4
UNIT_ELEMENTS = 40_000
WORLD = 8
SHARD = [0, 1, 2, 3]


def hybrid(
    rank, *, names=False, dtype="BFloat16", gathered=UNIT_ELEMENTS, replicas=True, steps=2, again=True, swapped=False
):
    """FSDP2 in groups of four of eight ranks, whose replicas add up the shards that reduce-scatters leave."""
    shard = [member for member in range(WORLD) if (member % 2 == rank % 2 if swapped else member // 4 == rank // 4)]
    replica = [rank // 2 * 2, rank // 2 * 2 + 1] if swapped else [rank % 4, rank % 4 + 4]
    groups = [("0", "", list(range(WORLD))), ("1", "", shard), ("2", "", replica)]
    trace = TraceBuilder(rank, WORLD, groups=groups)
    for step in range(steps):
        base = step * 20_000.0
        trace.step(step, base, 20_000.0)
        trace.backward(base + 9000, 8000, sequence=step + 1)
        for unit in range(UNITS):
            at, seq = base + unit * 1000, 10 * step + unit
            forward, backward, reduced = (
                (("FSDP::pre_forward", "FSDP::all_gather"), ("FSDP::pre_backward", "FSDP::all_gather"),
                 ("FSDP::post_backward_reduce",)) if names else ((), (), ())
            )  # fmt: skip
            common = {"group": "1", "seq": seq}
            trace.collective(
                "AllGather", at + 100, 200, issue=at + 50, nelems=gathered, dtype=dtype, owners=forward, **common
            )
            if again:
                trace.collective(
                    "AllGather", at + 9100, 200, issue=at + 9050, nelems=gathered, dtype=dtype, tid=2, owners=backward,
                    **common,
                )  # fmt: skip
            trace.collective(
                "ReduceScatter", at + 9400, 200, issue=at + 9350, nelems=UNIT_ELEMENTS, tid=2, owners=reduced, **common
            )
            if replicas:
                trace.collective(
                    "AllReduce", at + 9700, 150, issue=at + 9650, nelems=UNIT_ELEMENTS // 4, tid=2, group="2", seq=seq,
                    owners=reduced,
                )  # fmt: skip
        trace.annotation("Optimizer.step#AdamW.step", base + 18_500, 500)
    return trace


@pytest.mark.parametrize("names", [False, True])
def test_replicas_are_known_by_what_the_scatters_leave(names, tmp_path):
    run = analyze(hybrid(0, names=names).write(tmp_path / "rank0.json")).run
    assert (run.strategy.triple, run.strategy.group_size) == ("III", 4)
    assert run.parameter_count == UNITS * UNIT_ELEMENTS
    assert run.data_parallel_ranks == WORLD
    assert "parts of the model" not in parameters_text(run)


@pytest.mark.parametrize("swapped", [False, True])
def test_shard_groups_that_cross_nodes_without_need_are_measured_again(swapped, tmp_path):
    """A mesh of (shards, replicas) in place of (replicas, shards), on two nodes of four ranks."""
    analysis = analyze(hybrid(0, names=True, swapped=swapped).write(tmp_path / "rank0.json"), gpus_per_node=4)
    assert (analysis.run.strategy.triple, analysis.run.strategy.group_size) == ("III", 4)
    assert ("swap the dimensions of the device mesh" in calibrate(analysis).unmodelled) is swapped


def test_collectives_at_once_are_counted_by_tier(tmp_path):
    """Each all-reduce of the replicas, 150 us, and the next unit's scatter; none shares its links."""
    trace = hybrid(0, names=True)
    assert analyze(trace.write(tmp_path / "alone.json"), gpus_per_node=4).efficiency.concurrent == {
        "intra": 1.0, "inter": 1.0
    }  # fmt: skip
    for unit in range(UNITS):
        owners = ("FSDP::post_backward_reduce",)
        for step in range(2):
            at = 20_000.0 * step + 9400 + 1000 * unit
            common = {"nelems": UNIT_ELEMENTS, "group": "1", "owners": owners, "seq": 100 + 10 * step + unit}
            trace.collective("ReduceScatter", at, 400, issue=at - 20, stream=30, **common)
    found = analyze(trace.write(tmp_path / "beside.json"), gpus_per_node=4).efficiency.concurrent
    # A step's unit gathers twice 200 us, scatters 200 us and, beside that and the all-reduce, 400 us.
    assert found == {"intra": pytest.approx((400 + 200 + 400) / (400 + 400)), "inter": 1.0}


def test_ranks_that_do_not_share_the_data_hold_parts_of_the_model(tmp_path):
    analysis = analyze(hybrid(0, replicas=False).write(tmp_path / "rank0.json"))
    run = analysis.run
    assert (
        run.data_parallel_ranks
        == data_parallel_size(analysis.collectives, WORLD, StrategySource.INFERRED)
        == len(SHARD)
    )
    assert parameters_text(run).endswith(" in one of 2 parts of the model, each on 4 of 8 ranks")


@pytest.mark.parametrize("bytes_each", [1, 2, 4])
def test_parameters_that_are_gathered_as_bytes_are_counted_by_their_gradients(bytes_each, tmp_path):
    """FSDP2 gathers parameters of several types, or of 8 bits, as bytes."""
    trace = hybrid(0, names=True, dtype="Byte", gathered=bytes_each * UNIT_ELEMENTS)
    run = analyze(trace.write(tmp_path / "rank0.json")).run
    assert (run.parameter_count, run.total_parameter_count) == (UNITS * UNIT_ELEMENTS, None)


@pytest.mark.parametrize(("again", "triple"), [(True, "GGG"), (False, "NGG")])
def test_without_host_rows_the_numbers_of_gathers_tell_whether_backward_gathers_again(again, triple, tmp_path):
    trace = hybrid(0, replicas=False, again=again)
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    run = analysis.run
    assert (run.strategy.triple, run.strategy.triple_at_rest) == (triple, "GGG")
    assert run.micro_batches is None
    assert any("record CPU activities" in notice.help for notice in analysis.data_quality if notice.code == "Q320")


@pytest.mark.parametrize(("sends", "micro_batches"), [(0, 1), (2, 1), (6, None)])
def test_a_stage_that_sends_more_than_a_pass_does_runs_several(sends, micro_batches, tmp_path):
    """All forwards of a pipeline before all backwards look like one backward pass."""
    trace = hybrid(0)
    for at in (700 + step + 20 * number for step in (0.0, 20_000.0) for number in range(sends)):
        trace.collective("AllReduce", at, 5, nelems=64, issue=at - 50, seq=round(at))
        for event in trace.events[-3:]:
            event["name"] = {"kernel": "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}.get(
                event["cat"], event["name"].replace("allreduce_", "send")
            )
            if "Collective name" in event["args"]:
                event["args"]["Collective name"] = "send"
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.micro_batches == micro_batches
    assumed = [notice.help for notice in analysis.data_quality if notice.code == "Q320"]
    assert assumed == [""] * (micro_batches is None)  # the host was recorded


def without_header(trace, path):
    document = trace.document()
    document.pop("distributedInfo", None)
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("ranks", [(1,), (1, 3)])
def test_groups_tell_how_many_ranks_there_are_where_no_header_does(ranks, tmp_path):
    for rank in ranks:
        trace = hybrid(rank)
        at = 19_000.0
        trace.collective("AllReduce", at, 50, issue=at - 50, nelems=8, seq=99)  # over all ranks
        without_header(trace, tmp_path / f"rank{rank}.json")
    run = analyze(tmp_path).run
    assert (run.world_size, run.ranks) == (WORLD, ranks)


def test_groups_of_some_ranks_tell_of_no_world(tmp_path):
    """Ranks 0 to 3, and 0 and 4 of eight: five of them are seen, and nobody says that these are all."""
    assert analyze(without_header(hybrid(0), tmp_path / "rank0.json")).run.world_size is None


def test_groups_that_average_after_the_step_share_the_data(tmp_path):
    """Post-local SGD: gradients inside groups of four, parameters now and then across them."""
    trace = TraceBuilder(0, WORLD, groups=[("1", "", SHARD), ("2", "", [0, 4])])
    for step in range(2):
        base = step * 20_000.0
        trace.step(step, base, 20_000.0)
        trace.backward(base + 1000, 8000, sequence=step + 1)
        for kind, at, group in (("gradients", 2000, "1"), ("averages", 15_000, "2")):
            owners = ("torch.distributed.ddp.reducer::x",) if kind == "gradients" else ()
            trace.collective(
                "AllReduce", base + at, 300, nelems=50_000, issue=base + at - 50, group=group, seq=at, owners=owners,
                dtype="Float",
            )  # fmt: skip
        trace.annotation("DistributedDataParallel.forward", base + 10, 100)
        trace.annotation("Optimizer.step#SGD.step", base + 10_000, 500)
    run = analyze(trace.write(tmp_path / "rank0.json")).run
    assert run.data_parallel_ranks == WORLD
    assert "parts of the model" not in parameters_text(run)


def test_ranks_with_other_numbers_of_steps_are_said(tmp_path):
    traces = [hybrid(rank, steps=2 if rank < 4 else 5) for rank in range(WORLD)]
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert "2 to 5 steps each" in confidence(analysis)
    assert not any("have ranks without a trace" in notice.message for notice in analysis.data_quality)


def test_durations_below_zero_by_rounding_are_taken_as_zero(tmp_path):
    trace = hybrid(0)
    for event in trace.events:
        if event["name"].startswith("autograd"):
            event["dur"] = max(event["dur"], 1)
        elif event["cat"] == "cpu_op":
            event["dur"] = -0.001
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert not analysis.verdict.text.startswith("No verdict")
    assert "Q107" in {notice.code for notice in analysis.data_quality}


@pytest.mark.parametrize("duration", [-5.0, 1e17])
def test_collectives_of_impossible_length_carry_no_verdict(duration, tmp_path):
    trace = hybrid(0)
    whole = analyze(trace.write(tmp_path / "whole.json"))
    for event in trace.events:
        if event["name"].startswith("nccl"):
            event["dur"] = duration
    damaged = analyze(trace.write(tmp_path / "rank0.json"))
    assert not whole.verdict.text.startswith("No verdict")
    assert damaged.verdict.text.startswith("No verdict")


@pytest.mark.parametrize("listed", ["[0, 1, ..., 7]", "[0, 'a', None]", "", "[0]"])
def test_a_list_of_ranks_that_is_none_gives_way_to_the_groups_own(listed, tmp_path):
    """All ranks are on two nodes; the first of them alone would be a group inside one."""
    trace = TraceBuilder(0, 8, gpus_per_node=4)
    for step in range(2):
        trace.step(step, step * 10_000.0, 10_000.0)
        trace.backward(step * 10_000.0 + 1000, 8000, sequence=step + 1)
        trace.collective(
            "AllReduce", step * 10_000.0 + 2000, 5000, nelems=1 << 22, issue=step * 10_000.0 + 1500, seq=step, tid=2
        )
    for event in trace.events:
        if "Process Group Ranks" in event["args"]:
            event["args"] |= {"Process Group Ranks": listed, "Group size": 8 if listed == "[0]" else "eight"}
    (found,) = analyze(trace.write(tmp_path / "rank0.json")).collectives
    assert (found.op, found.span) == ("all_reduce", "mixed")


@pytest.mark.parametrize(("name", "rank", "codes"), [("trace", 0, {"Q113", "Q306"}), ("rank3", 3, {"Q113"})])
def test_a_rank_that_the_job_does_not_have_is_nobodys(name, rank, codes, tmp_path):
    document = hybrid(0).document()
    document["distributedInfo"]["rank"] = 99
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document))
    analysis = analyze(path)
    assert (analysis.run.ranks, analysis.run.world_size) == ((rank,), WORLD)
    assert any("rank 99 of 8" in notice.message for notice in analysis.data_quality if notice.code == "Q113")
    assert {notice.code for notice in analysis.data_quality} & {
        "Q113",
        "Q306",
    } == codes  # the second: a rank is guessed


def test_all_reduces_of_gradients_that_the_optimizer_shards_are_replayed_as_such():
    """DeepSpeed's ZeRO-1 sums gradients on all ranks once a step; taken for scatters, all links would look half as fast."""
    made = calibrate(analyze(DATA / "zero_runs" / "ds_z1_acc4"))
    assert (str(made.baseline), made.scatters_by_all_reduce) == ("NNG", True)


@pytest.mark.parametrize("gathers_each", [False, True])
def test_parameters_kept_over_a_steps_micro_batches_are_gathered_once_in_it(gathers_each, tmp_path):
    """FSDP2 with ``set_reshard_after_backward(False)`` until the last micro-batch, and with nothing freed before it."""
    trace = TraceBuilder(0, WORLD)
    for step in range(2):
        base = step * 20_000.0
        trace.step(step, base, 20_000.0)
        for micro in range(4):
            start = base + micro * 4000
            for unit in range(UNITS):
                at, common = start + unit * 300, {"nelems": UNIT_ELEMENTS, "dtype": "BFloat16"}
                if gathers_each or not micro:
                    owners = ("FSDP::pre_forward", "FSDP::all_gather")
                    trace.collective("AllGather", at, 200, issue=at - 1, seq=int(at), owners=owners, **common)
            trace.backward(start + 1800, 1900, sequence=4 * step + micro + 1)
            for unit in range(UNITS):
                at, late = start + 2000 + unit * 300, {"tid": 2, "owners": ("FSDP::post_backward_reduce",)}
                trace.collective("ReduceScatter", at, 200, issue=at - 1, seq=int(at), **late, **common)
        trace.annotation("Optimizer.step#AdamW.step", base + 18_500, 500)
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert (analysis.run.micro_batches, analysis.run.strategy.triple) == (4, "NGG")
    made = calibrate(analysis)
    assert made.unit_bytes == (2 * UNIT_ELEMENTS,) * UNITS
    assert made.forwards == 1.0
