"""What recordings leave out, or show in unusual ways, is told and not guessed."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace

import polars as pl
import pytest
from conftest import ROOT
from helpers import analyze, read, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.model import QualityEntry
from paro_advise.advisor.cli import run
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.ranks.links.latency import Fabric
from paro_advise.advisor.ranks.links.link_fit import fit_links
from paro_advise.advisor.rendering.texts.analysis_text import parameters_text
from paro_advise.errors import BrokenInputError, InputError

RUNS = ROOT / "tests/data/zero_runs"
NCCL = Fabric(is_gloo=False, device_name=None, ranks_per_node=8)
FSDP1_GATHER = ("FullyShardedDataParallel.forward", "FullyShardedDataParallel._pre_forward")
FSDP1_REDUCE = ("FullyShardedDataParallel._post_backward_hook",)
IN_REDUCER = ("torch::autograd::AccumulateGrad",)


def without_shapes(run_name, folder):
    """Copy a recording as torch.profiler writes it by default."""
    folder.mkdir()
    for path in (RUNS / run_name).glob("rank*.json.gz"):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        for event in trace["traceEvents"]:
            for key in ("Input Dims", "Input type", "Input Strides", "Concrete Inputs"):
                event.get("args", {}).pop(key, None)
        (folder / path.name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    return folder


@pytest.mark.parametrize("run_name", ["fsdp2_ggg_acc1", "ddp_acc4"])
def test_collectives_on_gloo_are_timed_without_shapes(run_name, tmp_path):
    whole, stripped = analyze(RUNS / run_name), analyze(without_shapes(run_name, tmp_path / "stripped"))
    for state in ("parameter", "gradient"):
        assert stripped.states[state].count == whole.states[state].count
        assert stripped.states[state].exposed_us == pytest.approx(whole.states[state].exposed_us, rel=1e-6)
        assert stripped.states[state].bytes is None or not stripped.states[state].count
    assert "Sharding will not help" not in stripped.verdict.text
    assert stripped.run.parameter_count is None
    assert "Q112" in {notice.code for notice in stripped.data_quality} - {notice.code for notice in whole.data_quality}
    with pytest.raises(InputError, match="sizes are not recorded"):
        calibrate(stripped)


def fsdp1_run(path, *, shards):
    """Write FSDP1's steps of one unit over two ranks, or those of NO_SHARD, which only reduces."""
    trace = TraceBuilder(0, 2)
    for number in range(2):
        base = number * 10_000.0
        trace.step(number, base, 10_000.0)
        trace.backward(base + 5000, 4000, sequence=number + 1)
        if shards:
            trace.collective("AllGather", base + 100, 200, nelems=40_000, issue=base + 50, seq=0, owners=FSDP1_GATHER)
        kind = "ReduceScatter" if shards else "AllReduce"
        trace.collective(
            kind, base + 6000, 300, nelems=40_000, issue=base + 5500, seq=1, tid=2, owners=FSDP1_REDUCE
        )  # fmt: skip
    return trace.write(path)


def test_fsdp1_without_shards_reduces_gradients_of_known_size(tmp_path):
    found = analyze(fsdp1_run(tmp_path / "rank0.json", shards=False)).run
    assert (found.framework, found.strategy.triple, found.parameter_count) == ("FSDP1", "NNN", 40_000)


def test_what_fsdp1_is_advised_is_in_its_own_words_and_not_for_a_single_unit(tmp_path):
    one_unit = analyze(fsdp1_run(tmp_path / "rank0.json", shards=True))
    (prefetch,) = [finding for finding in one_unit.findings if finding.code == "PARO021"]
    assert (prefetch.status, "nothing to prefetch" in prefetch.text) == ("does not apply", True)
    for framework, words in (("FSDP1", "forward_prefetch=True"), ("FSDP2", "set_modules_to_forward_prefetch")):
        folder = tmp_path / framework
        trace = TraceBuilder(0, 2)
        trace.step(1, 0.0, 10_000.0)
        trace.backward(5000, 4000, sequence=1)
        owners = FSDP1_GATHER if framework == "FSDP1" else ("FSDP::pre_forward", "FSDP::all_gather")
        for unit in range(4):
            trace.collective(
                "AllGather", 100 + unit * 300, 200, nelems=40_000, issue=50 + unit * 300, seq=unit, owners=owners
            )  # fmt: skip
        folder.mkdir()
        (prefetch,) = [item for item in analyze(trace.write(folder / "rank0.json")).findings if item.code == "PARO021"]
        assert (prefetch.status, words in prefetch.text) == ("applies", True)


def test_all_ranks_of_hybrid_sharding_on_gloo_share_the_data():
    """gloo records no group size of the all-reduce between groups."""
    calibration = calibrate(analyze(RUNS / "fsdp2_hsdp_gated_acc4"))
    assert calibration.world_size == 8
    assert not any("share the data" in note for note in calibration.assumptions)


@pytest.mark.parametrize(("reduces_each_pass", "status"), [(False, "does not apply"), (True, "applies")])
def test_replicas_that_are_reduced_once_a_step_are_not_advised_to_be(tmp_path, reduces_each_pass, status):
    """With set_requires_gradient_sync(False) for all micro-batches but the last, nothing is left to gate."""
    groups = [("0", "default_pg", [0, 1, 2, 3]), ("1", "mesh_shard", [0, 1]), ("2", "mesh_replicate", [0, 2])]
    trace = TraceBuilder(0, 4, groups=groups)
    for step in range(2):
        trace.step(step, step * 40_000.0, 40_000.0)
        for micro in range(4):
            base = step * 40_000.0 + micro * 10_000.0
            trace.annotation("FSDP::root_pre_forward", base + 10, 20)
            trace.backward(base + 5000, 4000, sequence=4 * step + micro + 1)
            for unit in range(3):
                common = {"nelems": 40_000 + unit, "seq": 10 * micro + unit}
                trace.collective(
                    "AllGather", base + 100 + unit * 300, 200, issue=base + 50 + unit * 300, group="1",
                    owners=("FSDP::pre_forward", "FSDP::all_gather"), **common,
                )  # fmt: skip
                trace.collective(
                    "AllGather", base + 5050 + unit * 1000, 100, issue=base + 5040 + unit * 1000, group="1", tid=2,
                    owners=("FSDP::pre_backward", "FSDP::all_gather"), **common,
                )  # fmt: skip
                for kind, group, late in (("ReduceScatter", "1", 0), ("AllReduce", "2", 150)):
                    if micro == 3 or reduces_each_pass:
                        trace.collective(
                            kind, base + 5200 + late + unit * 1000, 100, issue=base + 5150 + late + unit * 1000, group=group,
                            tid=2, owners=("FSDP::post_backward_reduce",), **common,
                        )  # fmt: skip
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.micro_batches == 4
    (found,) = [finding for finding in analysis.findings if finding.code == "PARO020"]
    assert found.status == status
    assert calibrate(analysis).replicates_each_pass is reduces_each_pass
    single = replace(analysis, run=replace(analysis.run, micro_batches=1))
    assert not calibrate(single).replicates_each_pass  # once a step is each time


def ddp_steps(path, passes, *, has_steps=True):
    """Write DDP's steps, each with backward passes that reduce buckets of some elements."""
    trace = TraceBuilder(0, 2)
    for step in range(2):
        begin = step * 10_000.0 * len(passes)
        if has_steps:
            trace.step(step, begin, 10_000.0 * len(passes))
        for number, buckets in enumerate(passes):
            base = begin + number * 10_000.0
            trace.annotation("DistributedDataParallel.forward", base + 10, 100)
            trace.backward(base + 1000, 8000, sequence=step * len(passes) + number + 1)
            for place, elements in enumerate(buckets):
                trace.collective(
                    "AllReduce", base + 2000 + 500 * place, 300, nelems=elements, issue=base + 1500 + 500 * place, tid=2,
                    seq=10 * number + place, owners=IN_REDUCER, dtype="Float",
                )  # fmt: skip
    return trace.write(path)


@pytest.mark.parametrize(
    ("passes", "micro_batches", "parameters"),
    [
        ([[20_000, 30_000]], 1, 50_000),
        ([[20_000, 30_000], [20_000, 30_000]], 2, 50_000),
        ([[20_000], [20_000, 30_000]], None, 50_000),  # a GAN: the second pass goes through both of its models
        ([[20_000], [30_000]], None, 50_000),
    ],
)
def test_passes_of_different_parameters_are_no_micro_batches(tmp_path, passes, micro_batches, parameters):
    found = analyze(ddp_steps(tmp_path / "rank0.json", passes)).run
    assert (found.micro_batches, found.parameter_count) == (micro_batches, parameters)
    # What is frozen leaves no trace where parameters are never gathered.
    assert parameters_text(found) == "50000 trained parameters"


def test_without_steps_nothing_says_how_often_parameters_were_counted(tmp_path):
    trace = TraceBuilder(0, 2)
    for step in range(3):
        trace.collective("AllGather", step * 1000.0, 200, nelems=40_000, issue=step * 1000.0, seq=2 * step)
        trace.collective(
            "ReduceScatter", step * 1000.0 + 300, 200, nelems=40_000, issue=step * 1000.0 + 300, seq=2 * step
        )
    trace.events = [event for event in trace.events if event["cat"] == "kernel"]
    analysis = analyze(trace.write(tmp_path / "rank0.json"))
    assert analysis.run.parameter_count is None
    with pytest.raises(InputError, match="where steps begin"):
        calibrate(analysis)


def test_a_recommendation_from_traces_that_end_early_is_to_measure_first(tmp_path, capsys):
    cut = tmp_path / "cut"
    shutil.copytree(RUNS / "fsdp2_ggg_acc1", cut, ignore=shutil.ignore_patterns("*.jsonl.gz", "truth.json"))
    for path in cut.iterdir():
        text = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(text[: text.rindex(b"gloo:all_reduce")]))
    assert run(["analyze", str(cut), "--no-cache", "--gpus-per-node", "2"]) == 0
    assert "No verdict" in capsys.readouterr().out
    assert run(["recommend", str(cut), "--gpus-per-node", "2"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("Measure first")
    assert "the traces end early or are damaged" in told


def test_buckets_in_flight_together_are_waited_for_once(tmp_path):
    """Rank 3 begins both of its all-reduces 1,000 us after the others: they wait 1,000 us, not twice as long."""
    builders = [TraceBuilder(rank, 4) for rank in range(4)]
    for rank, builder in enumerate(builders):
        late = 1000.0 if rank == 3 else 0.0
        for step in range(4):
            base = step * 10_000.0
            builder.step(step, base, 10_000.0)
            builder.compute(base + 100, 2000 + late)
            for bucket in range(2):
                begin = base + 2100 + late
                end = base + 3600 + 200 * bucket
                builder.collective(
                    "AllReduce", begin, end - begin, nelems=4_000_000, issue=begin - 10, seq=2 * step + bucket,
                    owners=IN_REDUCER, stream=20 + bucket,
                )  # fmt: skip
    found = analyze(write_run(tmp_path / "run", builders)).stragglers
    assert [item.rank for item in found] == [3]
    assert found[0].lateness_us == pytest.approx(1000.0, rel=0.01)


def test_what_takes_as_long_as_the_shortest_messages_is_latency():
    """Gathers of 256 B to 128 KiB that all take 7 ms, of which a bandwidth of 0.6 MB/s was made."""
    rows = [("all_gather", "intra", 4, size, 7000.0 + 10 * (number % 3 - (size > 1000)), False)
            for size in (256, 1024, 131_072) for number in range(12)]  # fmt: skip
    names = ["op", "span", "group_size", "bytes", "time_us", "lone"]
    ((link,), _) = fit_links(pl.DataFrame(rows, schema=names, orient="row"), NCCL)
    assert link.busbw_gbps is None
    assert link.alpha_us == pytest.approx(7000.0, rel=0.01)


@pytest.mark.parametrize(("apart_us", "is_merged"), [(400.0, True), (5.0, False)])
def test_the_merged_trace_of_several_ranks_is_none_of_one(tmp_path, apart_us, is_merged):
    """Marks that one process wrote twice begin at the same time, or nearly so."""
    trace = TraceBuilder(0, 2)
    for number in range(3):
        for rank in range(2):
            trace.step(number, number * 10_000.0 + rank * apart_us, 10_000.0)
        trace.compute(number * 10_000.0 + 10, 100.0)
    path = trace.write(tmp_path / "merged.json")
    if not is_merged:
        assert analyze(path).run.num_steps >= 3
        return
    with pytest.raises(BrokenInputError, match="this one holds the steps of 2 at the same time"):
        read(path)


def test_ranks_of_several_frameworks_are_of_several_jobs(tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for run_name, rank in (("fsdp2_ggg_acc1", 0), ("ds_z3_acc1", 1)):
        shutil.copy(RUNS / run_name / f"rank{rank}.json.gz", mixed)
    analysis = analyze(mixed, gpus_per_node=2)
    (said,) = [notice for notice in analysis.data_quality if notice.code == "Q325"]
    assert "DeepSpeed: 1 rank (1); FSDP2: 1 rank (0)" in said.message
    assert not any(notice.code == "Q325" for notice in analyze(RUNS / "fsdp2_ggg_acc1").data_quality)


def test_a_large_message_beside_a_slow_scalar_is_no_latency():
    """A 4-byte all-reduce that waits as long as a bucket of 64 MiB takes says nothing of the bucket."""
    rows = [("all_reduce", "intra", 4, size, time + number, False)
            for size, time in ((4, 31_000.0), (64 << 20, 30_000.0)) for number in range(12)]  # fmt: skip
    names = ["op", "span", "group_size", "bytes", "time_us", "lone"]
    ((link,), _) = fit_links(pl.DataFrame(rows, schema=names, orient="row"), NCCL)
    assert link.alpha_us is None
    assert link.busbw_gbps == pytest.approx((64 << 20) * 2 * 3 / 4 / 30_000.0 / 1e3, rel=0.01)


@pytest.mark.parametrize(("world", "expected"), [(16, 16), (2, 10)])
def test_the_largest_group_tells_the_world_where_nothing_else_does(tmp_path, world, expected):
    """Rows of torch before 2.4 name the size of a group and not its ranks; files may be of some ranks only."""
    traces = [fsdp_rank(rank, world) for rank in (0, 1, 8, 9)]
    for trace in traces:
        for event in trace.events:
            event.get("args", {}).pop("Process Group Ranks", None)
    folder = write_run(tmp_path / "run", traces)
    for path in folder.iterdir():
        whole = json.loads(path.read_bytes())
        del whole["distributedInfo"]
        path.write_text(json.dumps(whole))
    analysis = analyze(folder)
    assert analysis.run.world_size == expected
    (said,) = [item.message for item in analysis.data_quality if item.code == "Q336"]
    assert f"{expected} assumed" in said


@pytest.mark.parametrize(
    ("lacks", "rule", "next_step"),
    [
        ("ranks", "of several ranks", "whose ranks talk to each other"),
        ("steps", "timed steps", "call prof.step"),
        ("strategy", "of no strategy", "in which gradients are reduced"),
        ("purposes", "no known purpose", "with_stack=True"),
        ("marks", "not those of its optimizer", "after each step of the optimizer"),
    ],
)
def test_a_recommendation_says_which_of_its_needs_a_run_does_not_tell(lacks, rule, next_step, tmp_path):
    whole = analyze(fsdp1_run(tmp_path / "rank0.json", shards=True))
    unknown = replace(whole.run, strategy=replace(whole.run.strategy, triple=None))
    states = {**whole.states, "unknown": replace(whole.states["unknown"], total_us=whole.step_time_us.median)}
    marks = QualityEntry(code="Q326", severity="warning", message="2 steps of the optimizer", help="")
    lacking = {
        "ranks": replace(whole, run=replace(whole.run, world_size=None)),
        "steps": replace(whole, step_time_us=replace(whole.step_time_us, values=())),
        "strategy": replace(whole, run=unknown),
        "purposes": replace(whole, run=unknown, states=states),
        "marks": replace(whole, run=unknown, data_quality=(*whole.data_quality, marks)),
    }
    with pytest.raises(InputError, match=rule) as raised:
        calibrate(lacking[lacks])
    assert next_step in raised.value.hint
