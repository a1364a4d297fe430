"""Who is late in some of the steps only, or in those that it recorded."""

from __future__ import annotations

import random

import pytest
from helpers import analyze
from test_stragglers import ring_run

from paro_advise.advisor.ranks.waiting_costs import num_late


@pytest.mark.parametrize(("every", "world", "steps"), [(2, 8, 8), (4, 16, 12)])
def test_a_rank_that_is_late_in_every_few_steps_is_named_beside_jitter(tmp_path, every, world, steps):
    """Each computation takes up to a third longer, so ranks wait in every step; rank 5 is late by more in some."""
    chance = random.Random(11)
    slow = [[2.0 if rank == 5 and not step % every else 1.0 for rank in range(world)] for step in range(steps)]
    jitter = lambda: 1.0 + 0.3 * chance.random()  # noqa: E731
    run = analyze(ring_run(tmp_path / "run", slow_steps=slow, jitter=jitter, world=world, steps=steps))
    (late,) = run.stragglers
    assert (late.rank, late.share_of_steps, late.cause) == (5, 1 / every, "late compute")
    assert late.chance is not None
    # That one of equal ranks leads all of the worst steps is the world size to the power of these less one, at least.
    assert world ** (1 - steps // every) <= late.chance <= 0.25
    equal = ring_run(tmp_path / "equal", jitter=jitter, world=world, steps=steps)
    assert analyze(equal).stragglers == ()


@pytest.mark.parametrize(
    ("costs_ms", "num_led", "late"),
    [
        ([7, 11, 15, 18, 23, 27, 31, 35, 39, 43], 5, 9),  # it slows down: 35 ms where it leads, a fourth of that counts
        ([100, 3, 0, 5, 98, 2, 6, 1], 2, 2),  # late in every fourth step, and the slowest by a little in others
        ([0, 0, 0, 60, 61], 2, 2),
        ([], 0, 0),
    ],
)
def test_a_rank_is_late_where_it_costs_a_fourth_of_what_it_costs_where_it_leads(costs_ms, num_led, late):
    assert num_late([1000.0 * cost for cost in costs_ms], num_led) == late


def test_a_rank_is_late_in_so_many_of_the_steps_that_it_recorded(tmp_path):
    """Of eight steps even ranks record the first five, odd ones the last five; rank 5 computes 150 us longer in all."""
    in_its_five = lambda rank, number: number >= 3 if rank % 2 else number < 5  # noqa: E731
    run = ring_run(tmp_path / "run", slow_compute_us={5: 150.0}, records=in_its_five, world=8, steps=8)
    (late,) = analyze(run).stragglers
    assert (late.rank, late.share_of_steps) == (5, 1.0)
    assert late.lateness_us == pytest.approx(12 * 150.0, rel=0.05)


def test_a_rank_that_is_late_in_one_step_alone_is_named_with_it(tmp_path):
    """Rank 3 loads data for 20 ms in the third of six steps, and nobody is late in the others."""
    pauses = [[1.0 + 100.0 / 12 * (rank == 3 and step == 2) for rank in range(8)] for step in range(6)]
    run = analyze(ring_run(tmp_path / "run", slow_steps=pauses, world=8, steps=6))
    assert run.stragglers == ()
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert finding.status == "applies"
    assert finding.text.startswith("in one of 6 steps (step 2) rank 3 is late by its own doing")
