"""How long others wait for a straggler: not for what its transfers hide, and for what it does behind a step's last one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conftest import DATA
from helpers import analyze, write_run
from test_stragglers import ring_run
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.fitting.step_parts import step_parts

WORLD, PER_NODE, STEPS = 8, 4, 8
COMPUTE_US = 1000.0
TRANSFER_US = 1000.0
BESIDE_US = 500.0  # of arithmetic while the first of two transfers runs


def overlapped_run(folder, *, slow_us, behind_us=lambda _: {}, transfer_us=lambda _: TRANSFER_US):
    """Write steps of arithmetic, a transfer with arithmetic beside it, and a transfer behind both.

    Args:
        folder: for the traces.
        slow_us: by rank, how much longer each of the two pieces of arithmetic takes.
        behind_us: returns by rank what a step's host does behind its last transfer.
        transfer_us: returns how long each transfer of a step takes.
    """
    builders = [TraceBuilder(rank, WORLD, gpus_per_node=PER_NODE) for rank in range(WORLD)]
    begins = [0.0] * WORLD
    for number in range(STEPS):
        first = [begin + COMPUTE_US + slow_us.get(rank, 0.0) for rank, begin in enumerate(begins)]
        moved = max(first) + transfer_us(number)
        beside = [at + BESIDE_US + slow_us.get(rank, 0.0) for rank, at in enumerate(first)]
        arrivals = [max(moved, at) for at in beside]
        end = max(arrivals) + transfer_us(number)
        for rank, builder in enumerate(builders):
            begin, after = begins[rank], end + 50.0 + behind_us(number).get(rank, 0.0)
            builder.step(number, begin, after - begin)
            builder.compute(begin, first[rank] - begin)
            builder.compute(first[rank], beside[rank] - first[rank])
            for place, (at, until) in enumerate(((first[rank], moved), (arrivals[rank], end))):
                builder.collective(
                    "AllReduce", at, until - at, nelems=(1 << 24) + place, issue=begin + 10 + place,
                    seq=2 * number + place, owners=("DistributedDataParallel.backward",),
                )  # fmt: skip
            begins[rank] = after
    return write_run(folder, builders)


@pytest.mark.parametrize("late", [(5,), (4, 5, 6, 7), (2, 3, 6)], ids=["a rank", "a node", "some ranks"])
def test_others_wait_for_what_no_transfer_hides_of_a_straggler(late, tmp_path):
    """600 us more of arithmetic a step: 300 before a transfer, and 300 beside it, which it covers."""
    folder = overlapped_run(tmp_path / "run", slow_us=dict.fromkeys(late, 300.0))
    found = analyze(folder, gpus_per_node=PER_NODE)
    (straggler,) = found.stragglers
    assert set(straggler.alike or (straggler.rank,)) == set(late)
    assert straggler.lateness_us == pytest.approx(300.0, rel=0.02)
    assert found.late_once_us == pytest.approx(300.0, rel=0.02)
    assert found.verdict.regime != "straggler"  # of some 1,750 us that are exposed


def test_a_node_that_is_the_last_by_next_to_nothing_is_no_straggler(tmp_path):
    folder = overlapped_run(tmp_path / "run", slow_us=dict.fromkeys(range(4, 8), 0.5))
    assert analyze(folder, gpus_per_node=PER_NODE).stragglers == ()


def test_what_a_rank_does_behind_the_last_transfer_of_a_step_is_waited_for_in_the_next(tmp_path):
    """Rank 0's host works for 3 ms behind six of eight steps, none of them the last."""
    folder = overlapped_run(
        tmp_path / "run", slow_us={}, behind_us=lambda number: {0: 3000.0} if number % 4 < 3 else {}
    )
    found = analyze(folder, gpus_per_node=PER_NODE)
    (straggler,) = found.stragglers
    assert (straggler.rank, straggler.cause) == (0, "host")
    assert straggler.lateness_us == pytest.approx(6 * 3000.0 / STEPS, rel=0.02)
    assert found.verdict.regime == "straggler"


def test_stragglers_in_turn_are_all_named_with_what_they_cost_together(tmp_path):
    """Ranks 1 and 6 each in every second step, 2 ms before the first transfer."""
    builders_of = {0: {1: 2000.0}, 1: {6: 2000.0}}
    folder = overlapped_run(tmp_path / "run", slow_us={}, behind_us=lambda number: builders_of[number % 2])
    found = analyze(folder, gpus_per_node=PER_NODE)
    assert {straggler.rank for straggler in found.stragglers} == {1, 6}
    assert "rank 1 and rank 6 are stragglers in turn" in found.verdict.text.lower()
    assert "the others wait 1.75 ms a step for them" in found.verdict.text


@pytest.mark.parametrize("late_steps", [(1, 4, 6), (0, 2, 3, 5, 7)], ids=["3 of 8", "5 of 8"])
def test_a_straggler_is_late_in_the_steps_in_which_others_wait_for_it(late_steps, tmp_path):
    """In the others it is the last by half a microsecond, as it may be by its clock."""
    slow = [
        [1.0 + (0.6 if step in late_steps else 0.0002) * (rank == 5) for rank in range(WORLD)] for step in range(STEPS)
    ]
    (straggler,) = analyze(ring_run(tmp_path / "run", slow_steps=slow, world=WORLD, steps=STEPS)).stragglers
    assert (straggler.rank, straggler.share_of_steps) == (5, len(late_steps) / STEPS)
    assert straggler.chance == pytest.approx(WORLD / WORLD ** len(late_steps))


def test_a_rank_that_others_wait_for_in_a_step_of_eight_is_none(tmp_path):
    slow = [[1.0 + (5.0 if step == 3 else 0.0002) * (rank == 5) for rank in range(WORLD)] for step in range(STEPS)]
    assert analyze(ring_run(tmp_path / "run", slow_steps=slow, world=WORLD, steps=STEPS)).stragglers == ()


@pytest.mark.parametrize("steps", [(2, 5), (2, 5, 6)], ids=["2 of 8", "3 of 8"])
def test_transfers_that_take_longer_in_some_steps_are_no_ranks_lateness(steps, tmp_path):
    """A link that others use in some steps, in which devices compute no more: all ranks are there in time, so healing one gains nothing."""
    longer = overlapped_run(
        tmp_path / "run", slow_us={}, transfer_us=lambda step: 8 * TRANSFER_US if step in steps else TRANSFER_US
    )
    run = analyze(longer, gpus_per_node=PER_NODE)
    assert run.step_time_us.has_stalls
    assert step_parts(run, 0.0, is_gpu=True, own_way=False).most_late_us < 10.0


@pytest.mark.parametrize(
    ("late", "named", "steps_late"),
    [
        ((7, 4, 5, 7, 6, 7, 4, 5), (4, 5, 6, 7), 7),
        ((7, 4, 7, 7, 6, 7, 7, 5), (7,), 5),
    ],
    ids=["a node's ranks in turn", "one of them mostly"],
)
def test_what_others_of_its_node_cost_is_no_ranks(late, named, steps_late, tmp_path):
    """In each step the host of one rank of the second node pauses for 3 ms, behind its last transfer."""
    folder = overlapped_run(tmp_path / "run", slow_us={}, behind_us=lambda step: {late[step]: 3000.0})
    found = analyze(folder, gpus_per_node=PER_NODE)
    assert tuple(rank for item in found.stragglers for rank in item.alike or (item.rank,)) == named
    for straggler in found.stragglers:
        assert straggler.share_of_steps == steps_late / STEPS
        assert straggler.lateness_us == pytest.approx(steps_late / STEPS * 3000.0, rel=0.02)


def test_transfers_that_share_links_are_not_slow_ones():
    """Gathers and reductions of two queues: each is as slow as both together, and alone it takes its share of that."""
    found = analyze(DATA / "nccl_like/fsdp2-inter-bw")
    alone_us = step_parts(found, 0.0, is_gpu=True, own_way=False).transfer_us
    assert found.efficiency.concurrent == pytest.approx({"inter": 1.0}, rel=0.01)
    sharing = replace(found, efficiency=replace(found.efficiency, concurrent={"inter": 2.0}))
    assert step_parts(sharing, 0.0, is_gpu=True, own_way=False).transfer_us == pytest.approx(alone_us / 2, rel=0.01)
