"""Who is blamed for waiting: a rank for what it does itself, a link by groups that do the same."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

STEP_US = 20_000.0
GATHER_US = 800.0  # from the last arrival on
COMPUTE_US = 200.0


def ring_run(folder, *, late_end_us=None, slow_compute_us=None, world=4, steps=3):
    """Write a run of gathers over all ranks, each issued when the last one has ended on that rank.

    Args:
        late_end_us: by rank, how much later than on the first rank every gather ends.
        slow_compute_us: by rank, how much longer it computes between two gathers.
    """
    builders = [TraceBuilder(rank, world) for rank in range(world)]
    free = [0.0] * world
    for number in range(steps):
        base = number * STEP_US
        free = [max(item, base + 10.0) for item in free]
        for builder in builders:
            builder.step(number, base, STEP_US)
        for seq in range(12):
            arrivals = []
            for rank, builder in enumerate(builders):
                compute = COMPUTE_US + (slow_compute_us or {}).get(rank, 0.0)
                builder.compute(free[rank], compute)
                arrivals.append(free[rank] + compute)
            end = max(arrivals) + GATHER_US
            for rank, builder in enumerate(builders):
                free[rank] = end + (late_end_us or {}).get(rank, 0.0)
                builder.collective(
                    "AllGather", arrivals[rank], free[rank] - arrivals[rank], nelems=4_000_000, issue=base + seq,
                    seq=number * 100 + seq, owners=("FSDP::pre_forward", "FSDP::all_gather"),
                )  # fmt: skip
    return write_run(folder, builders)


def test_the_rank_behind_a_slow_link_is_not_blamed(tmp_path):
    """Collectives end 150 us later on rank 3, which so arrives last at each; it does nothing slowly itself."""
    run = analyze(ring_run(tmp_path / "run", late_end_us={0: 60.0, 2: 80.0, 3: 150.0}))
    assert run.stragglers == ()


def test_a_rank_that_computes_longer_is_blamed_beside_late_ends(tmp_path):
    run = analyze(ring_run(tmp_path / "run", late_end_us={3: 40.0}, slow_compute_us={1: 150.0}))
    (late,) = run.stragglers
    assert (late.rank, late.cause) == (1, "late compute")
    # 12 gathers a step. At 11 of them its last gather has ended on it when on the typical others, so it is 150 us
    # behind a typical one; the first of a step meets ranks that waited for the step.
    assert late.lateness_us == pytest.approx(12 * 150.0, rel=0.05)


def grouped_run(folder, *, slow_group=None, factor=2.0, num_groups=4, steps=3):
    """Write gathers in groups of two ranks, of which one group takes longer for the same."""
    world = 2 * num_groups
    groups = [(str(index), "mesh_shard", [2 * index, 2 * index + 1]) for index in range(num_groups)]
    builders = [TraceBuilder(rank, world, groups=groups, gpus_per_node=2) for rank in range(world)]
    for builder in builders:
        group = builder.rank // 2
        duration = GATHER_US * (factor if group == slow_group else 1.0)
        for number in range(steps):
            base = number * STEP_US
            builder.step(number, base, STEP_US)
            for seq in range(8):
                start = base + 100.0 + seq * 2_400.0
                builder.compute(start - 90.0, 80.0)
                builder.collective(
                    "AllGather", start, duration, nelems=4_000_000, issue=start - 50.0, seq=number * 100 + seq,
                    group=str(group), owners=("FSDP::pre_forward", "FSDP::all_gather"),
                )  # fmt: skip
    return write_run(folder, builders)


def test_a_group_slower_than_its_peers_has_a_slow_link(tmp_path):
    run = analyze(grouped_run(tmp_path / "run", slow_group=2))
    (slow,) = run.slow_groups
    assert (slow.ranks, slow.num_peers) == ((4, 5), 3)
    assert slow.factor == pytest.approx(2.0, rel=0.01)
    assert slow.excess_us == pytest.approx(8 * GATHER_US, rel=0.01)
    (finding,) = [item for item in run.findings if item.code == "PARO032"]
    assert finding.status == "applies"
    assert "ranks 4-5" in finding.text


@pytest.mark.parametrize(("slow_group", "num_groups"), [(None, 4), (0, 2)], ids=["all alike", "one of two"])
def test_groups_that_cannot_be_told_apart_are_not_blamed(tmp_path, slow_group, num_groups):
    run = analyze(grouped_run(tmp_path / "run", slow_group=slow_group, num_groups=num_groups))
    assert run.slow_groups == ()
