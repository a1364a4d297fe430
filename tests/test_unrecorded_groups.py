"""Groups whose ranks a trace does not record, as torch 2.2 and earlier leave them out."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.errors import InputError
from paro_advise.policies.plan import Verdict

NOT_RECORDED = ("Process Group Ranks", "Process Group Name", "Process Group Description")


def hybrid_rank(rank, world=8, shards=2, *, is_recorded, also=None):
    """Blocks gathered in 20 us among ranks in a row, whose gradients are summed in 300 us among ranks a row apart."""
    row = list(range(rank // shards * shards, (rank // shards + 1) * shards))
    apart = list(range(rank % shards, world, shards))
    groups = [("0", "default_pg", list(range(world))), ("1", "shards", row), ("2", "copies", apart)]
    trace = TraceBuilder(rank, world, groups=groups, gpus_per_node=shards, host=f"node{rank // shards}")
    for step in range(3):
        base = step * 2000.0
        trace.step(step + 3, base, 2000.0)
        trace.annotation("FSDP::root_pre_forward", base + 1, 100)
        for block in range(2):
            owners = (f"FSDP::pre_forward (blocks.{block})", f"FSDP::all_gather (blocks.{block})")
            at = base + 100 * block
            trace.collective("AllGather", at + 10, 20, nelems=64000, issue=at + 5, seq=block, owners=owners, group="1")
            trace.compute(at + 30, 80)
        if also:
            trace.collective("AllReduce", base + 220, 90, nelems=also, issue=base + 215, seq=9, group="1")
        trace.backward(base + 320, 1400, sequence=100 * step + 50)
        for block in range(2):
            at = base + 600 * block
            name = f"blocks.{1 - block}"
            owners = (f"FSDP::pre_backward ({name})", f"FSDP::all_gather ({name})")
            trace.collective(
                "AllGather", at + 330, 20, nelems=64000, issue=at + 325, seq=2 + block, owners=owners, group="1", tid=2
            )
            trace.compute(at + 350, 200)
            reduced = (f"FSDP::post_backward_reduce ({name})",)
            trace.collective(
                "ReduceScatter",
                at + 550,
                20,
                nelems=64000,
                issue=at + 545,
                seq=4 + block,
                owners=reduced,
                group="1",
                tid=2,
            )
            trace.collective(
                "AllReduce", at + 570, 300, nelems=32000, issue=at + 565, seq=block, owners=reduced, group="2", tid=2
            )
        trace.annotation("Optimizer.step#AdamW.step", base + 1740, 50)
        trace.compute(base + 1800, 150)
    if not is_recorded:
        for row in trace.events:
            row["args"] = {key: value for key, value in row["args"].items() if key not in NOT_RECORDED}
        trace.groups = trace.groups[:1]
    return trace


def hybrid_run(folder, **how):
    return analyze(write_run(folder, [hybrid_rank(rank, **how) for rank in range(8)]))


def test_groups_of_hybrid_sharding_lie_as_its_mesh_lays_them_out(tmp_path):
    """What a trace says that records the ranks, one that does not says too, and that they are assumed."""
    told = hybrid_run(tmp_path / "told", is_recorded=True)
    left_out = hybrid_run(tmp_path / "left_out", is_recorded=False)
    for found in (told, left_out):
        assert (found.run.strategy.triple_at_rest, found.run.strategy.group_size) == ("III", 2)
        spans = {(entry.op, entry.span) for entry in found.collectives if entry.bytes > 1000}
        assert spans == {("all_gather", "intra"), ("reduce_scatter", "intra"), ("all_reduce", "inter")}
    assert "Q321" not in {notice.code for notice in told.data_quality}
    (notice,) = [notice for notice in left_out.data_quality if notice.code == "Q321"]
    assert "shards among 2 ranks in a row, copies 2 ranks apart" in notice.message
    ours, theirs = calibrate(left_out), calibrate(told)
    assert (ours.inter_gbps, ours.intra_gbps) == (theirs.inter_gbps, theirs.intra_gbps)


def test_smaller_groups_that_no_layout_explains_are_measured_first(tmp_path):
    """Sums of activations in groups of two: tensor parallelism, whose ranks of one shard may lie anywhere."""
    found = hybrid_run(tmp_path / "run", is_recorded=False, also=500_000)
    assert {entry.span for entry in found.collectives if entry.group_size == 2} == {"unknown"}
    calibration = calibrate(found)
    assert calibration.inter_gbps.source == "prior"
    plan = recommend(calibration, Limits())
    assert plan.verdict in (Verdict.MEASURE_FIRST, Verdict.KEEP)
    assert any("the ranks of its groups of 2 and 4 are not recorded" in note for note in plan.assumptions)


@pytest.mark.parametrize("also", [1, 16])
def test_norms_in_groups_of_shards_speak_for_no_other_parallelism(tmp_path, also):
    found = hybrid_run(tmp_path / "run", is_recorded=False, also=also)
    assert "unknown" not in {entry.span for entry in found.collectives}


def kernels_only(trace):
    """What a compiled model leaves: kernels with their groups, and the profiler's marks."""
    trace.events = [row for row in trace.events if row["cat"] == "kernel" or row["name"].startswith("ProfilerStep")]
    return trace


def test_what_scatters_leave_and_another_group_sums_is_hybrid_sharding_without_any_annotation(tmp_path):
    ranks = [kernels_only(hybrid_rank(rank, is_recorded=True)) for rank in range(8)]
    found = analyze(write_run(tmp_path / "run", ranks))
    assert (found.run.strategy.triple_at_rest, found.run.strategy.group_size) == ("III", 2)
    assert found.states["unknown"].count == 0
    assert {entry.detail for entry in found.collectives if entry.op == "all_reduce"} == {"replica"}


def passes_of_kernels(rank, passes):
    """Per pass: root and two blocks gathered, blocks again in backward, three scatters; nothing names a pass."""
    trace = TraceBuilder(rank, 2)
    for step in range(2):
        base = step * 9000.0
        trace.step(step + 3, base, 9000.0)
        for index in range(passes):
            at = base + index * 9000.0 / passes
            kinds = [("AllGather", size) for size in (4000, 64000, 64000)]
            kinds += [("AllGather", 64000), ("AllGather", 64000), ("ReduceScatter", 64000), ("ReduceScatter", 64000)]
            for place, (kind, size) in enumerate([*kinds, ("ReduceScatter", 4000)]):
                trace.collective(kind, at + 10 + 100 * place, 60, nelems=size, issue=at + 5 + 100 * place, seq=place)
                trace.compute(at + 70 + 100 * place, 40)
    return kernels_only(trace)


def test_passes_are_not_counted_where_nothing_tells_where_steps_begin(tmp_path):
    """What repeats may be steps; a recommendation needs to know."""
    ranks = [passes_of_kernels(rank, 4) for rank in range(2)]
    for trace in ranks:
        trace.events = [row for row in trace.events if row["cat"] == "kernel"]
    found = analyze(write_run(tmp_path / "run", ranks))
    assert found.run.micro_batches is None
    with pytest.raises(InputError, match="must know where steps begin"):
        calibrate(found)


@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_passes_that_nothing_names_are_counted_by_the_order_that_repeats(tmp_path, passes):
    """A root of 4,000 elements and two blocks of 64,000, whatever the number of micro-batches."""
    found = analyze(write_run(tmp_path / "run", [passes_of_kernels(rank, passes) for rank in range(2)]))
    assert found.run.micro_batches == (passes if passes > 1 else None)
    assert found.run.strategy.triple == "GGG"
    assert found.run.parameter_count == 132_000
    assert any(f"{passes} micro-batches a step are read off" in item.message for item in found.data_quality) == (
        passes > 1
    )
