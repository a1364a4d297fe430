"""The critical path of a step across ranks: hand-written runs, and sums that must hold for all."""

from __future__ import annotations

import pytest
from conftest import recorded
from helpers import analyze, write_run
from trace_builder import TraceBuilder

GATHER = ("FSDP::pre_forward", "FSDP::all_gather")


def two_ranks(folder, *, compute_us, transfer_us=100.0, gathers=3, steps=2):
    """Write runs in which each rank computes, then gathers; the gather ends `transfer_us` after the last arrival."""
    builders = [TraceBuilder(rank, 2) for rank in range(2)]
    for number in range(steps):
        base = now = number * 10_000.0
        for seq in range(gathers):
            arrivals = [now + compute_us[rank] for rank in range(2)]
            end = max(arrivals) + transfer_us
            for rank, builder in enumerate(builders):
                builder.compute(now, compute_us[rank])
                builder.collective(
                    "AllGather", arrivals[rank], end - arrivals[rank], nelems=1 << 22, issue=now + 1,
                    seq=number * 10 + seq, owners=GATHER,
                )  # fmt: skip
            now = end
        for builder in builders:
            builder.step(number, base, now - base)
    return write_run(folder, builders)


def test_the_path_runs_along_the_rank_that_arrives_last(tmp_path):
    """Rank 1 computes 400 us before each of 3 gathers of 100 us, rank 0 only 150: 1,200 us of its work, 300 of transfers."""
    path = analyze(two_ranks(tmp_path / "run", compute_us=(150.0, 400.0))).critical_path
    assert path.num_steps == 2
    assert path.transfer_us == pytest.approx({"parameter": 3 * 100.0}, abs=0.1)
    assert path.work_us["1"] == pytest.approx(3 * 400.0, abs=0.1)
    assert sum(path.work_us.values()) == pytest.approx(3 * 400.0, abs=0.1)


def test_what_is_overlapped_is_not_on_the_path(tmp_path):
    """A gather under compute on both ranks costs the step nothing."""
    builders = [TraceBuilder(rank, 2) for rank in range(2)]
    for builder in builders:
        for number in range(2):
            base = number * 1000.0
            builder.step(number, base, 1000.0)
            builder.collective(
                "AllGather", base + 100, 300, nelems=1 << 22, issue=base + 50, seq=2 * number, owners=GATHER
            )
            builder.compute(base, 800.0)
            builder.collective(
                "AllGather", base + 800, 200, nelems=1 << 22, issue=base + 60, seq=2 * number + 1, owners=GATHER
            )
    path = analyze(write_run(tmp_path / "run", builders)).critical_path
    assert path.transfer_us == pytest.approx({"parameter": 200.0}, abs=0.1)
    assert sum(path.work_us.values()) == pytest.approx(800.0, abs=0.1)


@pytest.mark.parametrize(
    "folder", recorded("nccl_like", ["fsdp2-straggler"]) + recorded("zero_runs", ["straggler_fsdp2_ggg"])
)
def test_the_parts_sum_up_to_the_step_and_the_straggler_does_most_of_the_work(folder):
    analysis = analyze(folder)
    path = analysis.critical_path
    whole = sum(path.work_us.values()) + sum(path.transfer_us.values())
    # Ranks begin and end a step at slightly different times; the path spans from one's begin to another's end.
    assert whole == pytest.approx(analysis.breakdown_us.step_us, rel=0.05)
    (late,) = analysis.stragglers
    assert max(path.work_us, key=path.work_us.get) == str(late.rank)


def test_no_more_can_be_saved_than_lies_on_the_path(tmp_path):
    """Rank 1 arrives 900 us after rank 0 and computes 400 us more beside the gather, which rank 0 waits for idly.

    200 us of the transfer are exposed on rank 0, yet all of the step is rank 1's own work.
    """
    builders = [TraceBuilder(rank, 2) for rank in range(2)]
    for number in range(4):
        base = number * 2000.0
        for builder, arrival, computed in zip(builders, (100.0, 1000.0), (800.0, 1400.0), strict=True):
            builder.step(number, base, max(1300.0, computed))
            builder.compute(base, computed)
            builder.collective(
                "AllGather", base + arrival, 1200 - arrival, nelems=1 << 22, issue=base + 50, seq=number, owners=GATHER
            )
    analysis = analyze(write_run(tmp_path / "run", builders))
    assert sum(analysis.critical_path.work_us.values()) == pytest.approx(1400.0, abs=0.1)
    assert analysis.critical_path.transfer_us == {}
    (finding,) = [item for item in analysis.findings if item.code == "PARO010"]
    assert (finding.status, finding.saving_us) == ("applies", 0.0)


def test_exposed_collectives_of_which_one_rank_is_recorded_hide_the_path(tmp_path):
    """Two of four ranks: each reduces for 300 us with a peer on the other node, who may be what it waits for."""
    groups = [("0", "default_pg", (0, 1, 2, 3)), ("1", "mesh_replicate", (0, 2)), ("2", "mesh_replicate", (1, 3)),
              ("3", "mesh_shard", (0, 1))]  # fmt: skip
    builders = [TraceBuilder(rank, 4, groups=[groups[0], groups[1 + rank], groups[3]]) for rank in range(2)]
    for rank, builder in enumerate(builders):
        for number in range(2):
            base = number * 2000.0
            builder.step(number, base, 1000.0)
            builder.compute(base, 500.0)
            builder.collective(
                "AllGather", base + 500, 200, nelems=1 << 22, issue=base + 50, seq=2 * number, owners=GATHER, group="3"
            )
            builder.collective(
                "AllReduce", base + 700, 300, nelems=1 << 22, issue=base + 60, seq=2 * number + 1, group=str(1 + rank),
                owners=("FSDP::post_backward_reduce",), stream=21,
            )  # fmt: skip
    assert analyze(write_run(tmp_path / "run", builders)).critical_path is None


def test_one_rank_alone_has_no_path_across_ranks(tmp_path):
    assert analyze(two_ranks(tmp_path / "run", compute_us=(150.0, 400.0)) / "rank0.json").critical_path is None
