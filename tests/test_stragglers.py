"""Who is blamed for waiting: a rank for what it does itself, a link by groups that do the same."""

from __future__ import annotations

import itertools
import random

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.ranks.waiting_costs import chance_of_being_slowest, chance_of_leading, least_steps

STEP_US = 20_000.0
GATHER_US = 800.0  # from the last arrival on
COMPUTE_US = 200.0
NUM_RUNS = 24


def ring_run(
    folder, *, late_end_us=None, slow_compute_us=None, slow_steps=None, jitter=None, loading_us=None,
    records=lambda rank, number: True, world=4, steps=3,
):  # fmt: skip
    """Write a run of gathers over all ranks, each issued when the last one has ended on that rank.

    Args:
        late_end_us: by rank, how much later than on the first rank every gather ends.
        slow_compute_us: by rank, how much longer it computes between two gathers.
        slow_steps: by step and rank, how many times as long it computes.
        jitter: returns how many times as long one computation takes.
        loading_us: returns by rank how long its DataLoader takes at the start of a step.
        records: tells whether a rank has recorded a step.
    """
    builders = [TraceBuilder(rank, world) for rank in range(world)]
    free = [0.0] * world
    for number in range(steps):
        base = number * STEP_US
        free = [max(item, base + 10.0) for item in free]
        recorded = [
            builder if records(rank, number) else TraceBuilder(rank, world) for rank, builder in enumerate(builders)
        ]
        for builder in recorded:
            builder.step(number, base, STEP_US)
        for rank, us in (loading_us(number) if loading_us else {}).items():
            free[rank] += us
            recorded[rank].annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", base + 5, us)
        for seq in range(12):
            arrivals = []
            for rank, builder in enumerate(recorded):
                compute = COMPUTE_US + (slow_compute_us or {}).get(rank, 0.0)
                compute *= slow_steps[number][rank] if slow_steps else 1.0
                compute *= jitter() if jitter else 1.0
                builder.compute(free[rank], compute)
                arrivals.append(free[rank] + compute)
            end = max(arrivals) + GATHER_US
            for rank, builder in enumerate(recorded):
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


@pytest.mark.parametrize(("world", "steps"), [(2, 2), (2, 5), (4, 3)])
def test_equal_ranks_on_a_busy_machine_are_rarely_named(tmp_path, world, steps):
    """What else the machine does slows each rank for a step at a time, all alike."""
    chance = random.Random(7)
    named = 0
    for number in range(NUM_RUNS):
        slow = [[chance.lognormvariate(0.0, 0.4) for _ in range(world)] for _ in range(steps)]
        named += bool(analyze(ring_run(tmp_path / str(number), slow_steps=slow, world=world, steps=steps)).stragglers)
    assert named <= 0.25 * NUM_RUNS


def test_a_rank_that_leads_most_steps_and_costs_no_more_is_not_named(tmp_path):
    """Rank 1 is late by half in five steps; rank 0 is late once, by as much as all of that."""
    slow = [[1.0, 1.5]] * 5 + [[3.5, 1.0]]
    assert analyze(ring_run(tmp_path / "run", slow_steps=slow, world=2, steps=6)).stragglers == ()


def in_turn(num_steps, late, world=8):
    """Return how many times as long ranks compute in each step, two of them in turn."""
    return [[1.6 if rank == late[step % 2] else 1.0 for rank in range(world)] for step in range(num_steps)]


def test_two_ranks_that_are_late_in_turn_are_both_named(tmp_path):
    run = analyze(ring_run(tmp_path / "run", slow_steps=in_turn(6, (1, 5)), world=8, steps=6))
    assert [(item.rank, item.share_of_steps, item.cause) for item in run.stragglers] == [
        (1, 0.5, "late compute"), (5, 0.5, "late compute"),
    ]  # fmt: skip
    # 28 pairs of 8 ranks, each with a chance of a quarter to lead a step.
    assert [item.chance for item in run.stragglers] == pytest.approx([28 / 4**6] * 2)
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert "rank 5 in 50%" in finding.text


def test_two_ranks_of_different_pairs_that_are_late_in_turn_are_both_named(tmp_path):
    """Tensor parallel pairs: each of the two meets one other rank, both together three."""
    builders = [
        TraceBuilder(
            rank, 8, groups=[("0", "default_pg", list(range(8))), (f"{rank // 2 + 1}", "tp", [rank & ~1, rank | 1])]
        )
        for rank in range(8)
    ]
    for builder in builders:
        for number in range(6):
            base = number * STEP_US
            builder.step(number, base, STEP_US)
            slow = (1, 5)[number % 2]
            start = base + (2_100.0 if builder.rank == slow else 100.0)
            builder.compute(base + 10.0, start - base - 20.0)
            end = base + (2_600.0 if builder.rank // 2 == slow // 2 else 600.0)
            builder.collective(
                "AllReduce", start, end - start, nelems=64_000, issue=base + 5.0, seq=number,
                group=f"{builder.rank // 2 + 1}", stream=21,
            )  # fmt: skip
            builder.collective("AllReduce", end, base + 3_000.0 - end, nelems=640_000, issue=base + 6.0, seq=number)
    run = analyze(write_run(tmp_path / "run", builders))
    assert [item.rank for item in run.stragglers] == [1, 5]
    assert run.stragglers[0].chance == pytest.approx(6 / 2**6)  # of 4 ranks, 6 pairs


def test_two_ranks_that_are_late_in_turn_in_few_steps_are_not_called_harmless(tmp_path):
    """Of the 6 pairs of four ranks one leads four steps with a chance of 6 / 2^4 = 0.38."""
    run = analyze(ring_run(tmp_path / "run", slow_steps=in_turn(4, (1, 3), 4), steps=4))
    assert run.stragglers == ()
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert (finding.status, finding.text[:14]) == ("could not be judged", "ranks 1, 3 cau")


def test_a_rank_is_compared_with_those_that_it_meets(tmp_path):
    """Of eight ranks two communicate often: one of them leads every step, either with a chance of a half."""
    builders = [
        TraceBuilder(rank, 8, groups=[("0", "default_pg", list(range(8))), ("1", "pair", [0, 1])]) for rank in range(8)
    ]
    for builder in builders:
        for number in range(2):
            base = number * STEP_US
            builder.step(number, base, STEP_US)
            for seq in range(4):
                start = base + 100.0 + seq * 4_000.0
                late = 900.0 if builder.rank == 1 else 0.0
                if builder.rank < 2:
                    builder.compute(start, 100.0 + late)
                    builder.collective(
                        "AllReduce", start + 110.0 + late, 1_900.0 - late, nelems=64_000, issue=start,
                        seq=number * 100 + seq, group="1", stream=21,
                    )  # fmt: skip
                builder.collective(
                    "AllReduce", start + 3_000.0, 500.0, nelems=640_000, issue=start + 5.0, seq=number * 100 + seq,
                )  # fmt: skip
    run = analyze(write_run(tmp_path / "run", builders))
    assert run.stragglers == ()
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert (finding.status, finding.text[:13]) == ("could not be judged", "rank 1 causes")


@pytest.mark.parametrize(("world", "steps", "said"), [(2, 3, "25%"), (4, 3, "6%"), (4, 5, None)])
def test_a_finding_says_how_often_one_of_equal_ranks_is_named(tmp_path, world, steps, said):
    run = analyze(ring_run(tmp_path / "run", slow_compute_us={1: 150.0}, world=world, steps=steps))
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert finding.status == "applies"
    assert ("Chance names one of equal ranks" in finding.text) is (said is not None)
    assert said is None or f"up to {said} of such recordings" in finding.text


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_the_chance_of_leading_is_a_bound_and_exact_for_more_than_half(num_ranks, num_steps):
    """Against all ways in which equal ranks can lead the steps."""
    ways = [max(map(way.count, way)) for way in itertools.product(range(num_ranks), repeat=num_steps)]
    for led in range(1, num_steps + 1):
        counted = sum(most >= led for most in ways) / len(ways)
        told = chance_of_leading(led, num_steps, num_ranks)
        assert told >= counted - 1e-12
        if 2 * led > num_steps:
            assert told == pytest.approx(counted)


def test_the_chance_of_leading_many_steps_can_be_told():
    """Against the normal distribution: half a million of a million steps, and 3 standard deviations (500) more."""
    assert chance_of_leading(500_000, 1_000_000, 2) == 1.0
    assert chance_of_leading(501_500, 1_000_000, 2) == pytest.approx(2 * 0.00135, rel=0.01)
    assert chance_of_leading(6_000, 10_000, 10_000) == 0.0


@pytest.mark.parametrize(("num_ranks", "steps"), [(1, 3), (2, 3), (3, 3), (4, 2), (10_000, 2)])
def test_how_many_steps_it_takes(num_ranks, steps):
    """All of s steps: of n ranks one leads them with a chance of n^(1 - s); asked is a quarter."""
    assert least_steps(num_ranks) == steps


def test_a_late_rank_is_found_while_another_group_communicates(tmp_path):
    """A gather ends, on all at once, after the others have arrived at the next one and before the late rank does."""
    builders = [TraceBuilder(rank, 4, groups=[("0", "default_pg", list(range(4)))]) for rank in range(4)]
    for builder in builders:
        late = 200.0 if builder.rank == 3 else 0.0
        for number in range(4):
            base = number * 1000.0
            builder.step(number, base, 1000.0)
            builder.compute(base + 10.0, 90.0)
            builder.collective(
                "AllGather", base + 100.0, 150.0, nelems=640_000, issue=base + 20.0, seq=2 * number, stream=21
            )
            builder.compute(base + 110.0, 90.0 + late)
            builder.collective(
                "AllReduce", base + 200.0 + late, 400.0 - late, nelems=64_000, issue=base + 30.0, seq=2 * number + 1
            )
            builder.compute(base + 600.0, 300.0)
    (found,) = analyze(write_run(tmp_path / "run", builders)).stragglers
    assert (found.rank, found.cause) == (3, "late compute")
    assert found.lateness_us == pytest.approx(200.0)


def test_a_late_rank_is_found_whose_partners_are_late_at_other_groups(tmp_path):
    """Tensor and data parallel: what one rank does late makes its whole pair late; the pair is not blamed."""
    world = 8
    builders = []
    for rank in range(world):
        pair, peers = [rank // 2 * 2, rank // 2 * 2 + 1], [item for item in range(world) if item % 2 == rank % 2]
        builder = TraceBuilder(rank, world, groups=[("1", "mesh_tp", pair), ("2", "mesh_dp", peers)])
        for number in range(4):
            base = number * 2000.0
            builder.step(number, base, 2000.0)
            start = base + (500.0 if rank == 5 else 200.0)
            builder.compute(base + 10.0, start - base - 10.0)
            end = base + (550.0 if 5 in pair else 250.0)
            builder.collective(
                "AllReduce", start, end - start, nelems=64_000, issue=base + 5.0, seq=number, group="1", stream=21
            )
            builder.compute(end, 100.0)
            builder.collective(
                "AllReduce",
                end + 100.0,
                base + 650.0 - end,
                nelems=640_000,
                issue=base + 6.0,
                seq=number,
                group="2",
                stream=22,
            )
            builder.compute(base + 750.0, 1240.0)
        builders.append(builder)
    found = analyze(write_run(tmp_path / "run", builders)).stragglers
    assert [(item.rank, item.cause) for item in found] == [(5, "late compute")]
    assert found[0].lateness_us == pytest.approx(300.0)


def grouped_run(folder, *, slow_group=None, factor=2.0, num_groups=4, steps=3, overlapped=False, busy=False):
    """Write gathers in groups of two ranks, of which one group takes longer for the same; under compute or not."""
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
                if busy:
                    builder.compute(start + duration + 10.0, 2_400.0 - duration - 110.0)
                if overlapped:
                    builder.compute(start - 5.0, factor * GATHER_US + 10.0)
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
    assert finding.saving_us == pytest.approx(slow.excess_us, rel=0.01)
    busy = analyze(grouped_run(tmp_path / "busy", slow_group=2, busy=True))
    said = f"Slow link: {slow.text}. No training was recorded: neither a backward pass nor an optimizer's step. "
    assert busy.verdict.text.startswith(said)
    assert busy.verdict.regime == "bandwidth_intra"


def test_of_a_slow_link_whose_transfers_are_overlapped_nothing_is_gained(tmp_path):
    run = analyze(grouped_run(tmp_path / "run", slow_group=2, overlapped=True))
    (finding,) = [item for item in run.findings if item.code == "PARO032"]
    assert finding.status == "applies"
    assert finding.saving_us < 0.05 * run.slow_groups[0].excess_us
    assert not run.verdict.text.startswith("Slow link")
    assert "The links of ranks 4-5 are slow" in run.verdict.text


@pytest.mark.parametrize(("slow_group", "num_groups"), [(None, 4), (0, 2)], ids=["all alike", "one of two"])
def test_groups_that_cannot_be_told_apart_are_not_blamed(tmp_path, slow_group, num_groups):
    run = analyze(grouped_run(tmp_path / "run", slow_group=slow_group, num_groups=num_groups))
    assert run.slow_groups == ()


def test_a_slow_node_is_named_as_one(tmp_path):
    """Two nodes of four ranks; those of the second compute 300 us longer before each of 12 gathers, give or take 20."""
    generator = random.Random(1)
    slow = {rank: 300.0 + generator.uniform(-20, 20) for rank in range(4, 8)}
    folder = ring_run(tmp_path / "run", slow_compute_us=slow, world=8, steps=6)
    (late,) = analyze(folder, gpus_per_node=4).stragglers
    assert late.alike == (4, 5, 6, 7)
    assert late.cause == "late compute"
    assert late.lateness_us == pytest.approx(12 * 300, rel=0.05)
    text = analyze(folder, gpus_per_node=4).verdict.text
    assert "anks 4-7 of one node are stragglers (late compute)" in text
    one = ring_run(tmp_path / "one", slow_compute_us={5: 300.0}, world=8, steps=6)
    (late,) = analyze(one, gpus_per_node=4).stragglers
    assert (late.rank, late.alike) == (5, ())
    # The others of its node are slower as well, a little: their links carry more beside their arithmetic.
    beside = ring_run(tmp_path / "beside", slow_compute_us={4: 40.0, 5: 300.0, 6: 40.0, 7: 40.0}, world=8, steps=6)
    (late,) = analyze(beside, gpus_per_node=4).stragglers
    assert (late.rank, late.alike) == (5, ())
    assert late.lateness_us == pytest.approx(12 * 300, rel=0.05)


def test_a_slow_node_of_equal_ranks_is_named_as_one(tmp_path):
    """None of its four ranks is later than the others for long: each kernel takes up to 4 % more or less, by chance."""
    chance = random.Random(5)
    slow = dict.fromkeys(range(4, 8), 300.0)
    jitter = lambda: 1.0 + 0.04 * (2 * chance.random() - 1)  # noqa: E731
    folder = ring_run(tmp_path / "run", slow_compute_us=slow, jitter=jitter, world=8, steps=3)
    (late,) = analyze(folder, gpus_per_node=4).stragglers
    assert (late.alike, late.cause) == ((4, 5, 6, 7), "late compute")
    assert late.lateness_us == pytest.approx(12 * 300, rel=0.05)


@pytest.mark.parametrize("slow", [(5, 12), (3, 5, 12, 14)])
def test_slow_ranks_of_several_nodes_are_all_named(slow, tmp_path):
    """Each hides behind the other: none of them is last in most steps."""
    chance = random.Random(3)
    jitter = lambda: 1.0 + 0.02 * (2 * chance.random() - 1)  # noqa: E731
    run = ring_run(tmp_path / "run", slow_compute_us=dict.fromkeys(slow, 300.0), jitter=jitter, world=16, steps=5)
    analysis = analyze(run, gpus_per_node=8)
    (late,) = analysis.stragglers
    assert (late.alike, late.are_of_one_node, late.cause, late.share_of_steps) == (slow, False, "late compute", 1.0)
    assert late.lateness_us == pytest.approx(12 * 300, rel=0.1)
    assert f"anks {', '.join(map(str, slow))} are stragglers (late compute)" in analysis.verdict.text


@pytest.mark.parametrize(("num_ranks", "num_slow", "num_steps"), [(4, 1, 2), (4, 2, 2), (5, 2, 2), (4, 1, 3)])
def test_the_chance_of_being_slowest_is_a_bound(num_ranks, num_slow, num_steps):
    """Equal ranks, every order as likely: how often is a set of up to half of them the slowest in all steps?"""
    orders = list(itertools.permutations(range(num_ranks)))
    told = [
        len({frozenset(order[:num_slow]) for order in steps}) == 1
        for steps in itertools.product(orders, repeat=num_steps)
    ]
    bound = chance_of_being_slowest(num_steps, num_steps, num_ranks, num_slow)
    assert sum(told) / len(told) == pytest.approx(bound / (num_ranks // 2))


def test_chances_of_many_ranks_can_be_told():
    assert chance_of_being_slowest(10, 10, 4096, 1000) == pytest.approx(0.0, abs=1e-12)
    assert chance_of_being_slowest(10, 0, 4096, 1000) == 1.0


def test_of_ranks_that_are_slow_alike_none_is_named_alone(tmp_path):
    """Two nodes of two ranks with a trace, two steps: which rank of the slow node is last in each is chance."""
    folder = ring_run(tmp_path / "run", slow_compute_us={2: 300.0, 3: 310.0}, world=4, steps=2)
    (late,) = analyze(folder, gpus_per_node=2).stragglers
    assert (late.alike, late.cause) == ((2, 3), "late compute")
    one = ring_run(tmp_path / "one", slow_compute_us={3: 310.0}, world=4, steps=2)
    (late,) = analyze(one, gpus_per_node=2).stragglers
    assert (late.rank, late.alike) == (3, ())


def hybrid_run(folder, slow, *, units=8, steps=3, per_node=4):
    """Two nodes: each unit's gradients are scattered inside the node, then added up between peers, which nobody waits for.

    Args:
        folder: for the traces.
        slow: how much longer (us) ranks compute for each unit of 1 ms.
    """
    ranks = range(2 * per_node)
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    peers = [[rank, rank + per_node] for rank in range(per_node)]
    everybody = ("0", "default_pg", list(ranks))
    builders = [
        TraceBuilder(
            rank, 8, gpus_per_node=per_node, host=f"host{rank // per_node}",
            groups=[everybody, ("1", "mesh_shard", nodes[rank // per_node]), ("2", "mesh_replicate", peers[rank % per_node])],
        )
        for rank in ranks
    ]  # fmt: skip
    begin = 0.0
    for step in range(steps):
        ready, link = [begin] * 8, [begin] * 8
        for unit in range(units):
            done = [ready[rank] + 1000.0 + slow.get(rank, 0.0) for rank in ranks]
            for rank, builder in enumerate(builders):
                builder.compute(ready[rank], done[rank] - ready[rank])
                builder.backward(ready[rank], 900.0, sequence=1000 * (step + 1) - unit)
            scattered = [max(done[peer] for peer in nodes[rank // per_node]) + 100.0 for rank in ranks]
            arrived = [max(scattered[rank], link[rank]) for rank in ranks]
            link = [max(arrived[peer] for peer in peers[rank % per_node]) + 200.0 for rank in ranks]
            for rank, builder in enumerate(builders):
                for kind, group, stream, start, end in (
                    ("ReduceScatter", "1", 20, done[rank], scattered[rank]), ("AllReduce", "2", 21, arrived[rank], link[rank]),
                ):  # fmt: skip
                    builder.collective(
                        kind, start, end - start, nelems=8_000_000, issue=ready[rank] + 500, seq=step * units + unit,
                        tid=2, group=group, stream=stream, owners=("FSDP::post_backward_reduce",),
                    )  # fmt: skip
            ready = done
        for builder in builders:
            builder.step(step, begin, max(link) + 100.0 - begin)
        begin = max(link) + 100.0
    return write_run(folder, builders)


def test_a_late_rank_costs_what_it_takes_longer_however_often_others_find_it_late(tmp_path):
    """At the scattering of unit k rank 5 is late by k times 300 us; at the end of the step the others waited for 8."""
    run = analyze(hybrid_run(tmp_path / "run", {5: 300.0}))
    (late,) = run.stragglers
    assert (late.rank, late.alike) == (5, ())
    assert late.lateness_us == pytest.approx(8 * 300.0, rel=0.01)
    assert run.late_once_us == pytest.approx(8 * 300.0, rel=0.01)


def test_another_late_rank_in_each_step_is_waited_for_under_any_strategy(tmp_path):
    """In each step another of eight ranks pauses once, as for garbage collection, by 4 ms: ten computations of 12."""
    pauses = [[1.0 + 20.0 / 12 * (rank == (3 * step) % 8) for rank in range(8)] for step in range(6)]
    run = analyze(ring_run(tmp_path / "run", slow_steps=pauses, world=8, steps=6))
    paused_us = 20.0 * COMPUTE_US
    assert run.stragglers == ()
    assert run.late_once_us == pytest.approx(paused_us, rel=0.05)
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert finding.status == "applies"
    assert "again and again one is late by its own doing, and the others wait" in finding.text
    # Seven of eight ranks wait, and that is no saving of another strategy's.
    (exposed,) = [item for item in run.findings if item.code == "PARO010"]
    entry = run.states["parameter"]
    assert entry.wait_us == pytest.approx(paused_us * 7 / 8, rel=0.05)
    assert exposed.saving_us == pytest.approx(entry.exposed_us - entry.wait_us, rel=0.05)


def test_what_ranks_are_late_by_chance_shrinks_with_their_meetings(tmp_path):
    """Each computation of each rank takes up to half as long again, by chance: ranks meet 12 times a step."""
    chance = random.Random(3)
    run = analyze(ring_run(tmp_path / "run", jitter=lambda: 1.0 + 0.5 * chance.random(), world=8, steps=6))
    assert 0.0 < run.late_once_us < 0.5 * run.states["parameter"].wait_us


def test_a_straggler_that_exposes_nothing_itself_is_the_headline(tmp_path):
    """Seven gathers of 2.5 ms beside 2 ms of computing; rank 2 computes 0.6 ms longer, for which the others wait exposed.

    A quarter of the gathers is waiting, but all that is exposed of them.
    """
    builders = [TraceBuilder(rank, 4) for rank in range(4)]
    for builder in builders:
        late = 600.0 if builder.rank == 2 else 0.0
        for number in range(3):
            base = number * STEP_US
            builder.step(number, base, STEP_US)
            for seq in range(7):
                start = base + 10.0 + 2_800.0 * seq
                builder.compute(start, 2_000.0 + late)
                builder.collective(
                    "AllGather", start + 100.0 + late, 2_500.0 - late, nelems=64_000_000, issue=start,
                    seq=number * 100 + seq, owners=("FSDP::pre_forward", "FSDP::all_gather"),
                )  # fmt: skip
    run = analyze(write_run(tmp_path / "run", builders))
    parameter = run.states["parameter"]
    assert parameter.wait_us < 0.25 * parameter.total_us
    assert (run.verdict.regime, run.verdict.limiting_state) == ("straggler", "parameter")
    assert run.verdict.text.startswith("Straggler bound: rank 2 is a straggler (late compute)")
