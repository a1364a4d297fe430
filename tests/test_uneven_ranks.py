"""Ranks that compute unlike amounts, each the most in its turn: what communication hides of that, less of it shows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from helpers import analyze, write_run
from test_recommend import calibration, estimate
from test_stragglers import COMPUTE_US, ring_run
from trace_builder import fsdp_rank

from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.policies.strategy import Strategy

WORLD, GATHERS = 4, 12
UNEVEN_US = 20_000.0  # beside 100 ms of arithmetic, in two micro-batches
# Times as long as usual, by step and rank.
LENGTHS = [[1.0, 1.4, 0.9, 1.1], [1.5, 0.8, 1.0, 1.0], [0.9, 1.0, 1.0, 1.3], [1.0, 0.7, 1.6, 0.9]]


def time_of(triple, *, uneven_us, gbps, anew=1.0):
    links = {
        f"{where}_{what}": estimate(value)
        for where in ("inter", "intra")
        for what, value in (("alpha_us", 1.0), ("gbps", gbps))
    }
    run = calibration(
        is_gpu=True,
        native_reduce_scatter_is_all_reduce=False,
        baseline=Strategy.parse("GGG"),
        uneven_us=uneven_us,
        uneven_anew_us=anew * uneven_us,
        **links,
    )
    candidate = next(
        item
        for item in candidates(run)
        if str(item.strategy) == triple and item.collectives == "native" and not item.variant
    )
    return float(step_us(run, candidate, measured_links(run)))


def longer_by(triple, gbps, anew=1.0):
    return time_of(triple, uneven_us=UNEVEN_US, gbps=gbps, anew=anew) - time_of(triple, uneven_us=0.0, gbps=gbps)


@pytest.mark.parametrize(("triple", "meetings"), [("GGG", 2), ("III", 2), ("NNN", 1)])
def test_ranks_wait_for_the_longest_wherever_they_meet(triple, meetings):
    """Of two independent micro-batches each has 1 / sqrt(2) of a step's spread: twice that where they meet in both."""
    assert longer_by(triple, gbps=1e4) == pytest.approx(meetings / math.sqrt(meetings) * UNEVEN_US, rel=0.05)


def test_a_rank_that_is_always_longer_is_waited_for_once():
    assert longer_by("GGG", gbps=1e4, anew=0.0) == pytest.approx(UNEVEN_US, rel=0.05)


def test_communication_that_takes_longer_hides_it():
    assert longer_by("GGG", gbps=0.05) < 0.2 * UNEVEN_US


def test_how_uneven_ranks_are_is_read_from_their_computing(tmp_path):
    run = analyze(ring_run(tmp_path / "run", slow_steps=LENGTHS, world=WORLD, steps=len(LENGTHS)))
    beyond = np.array(LENGTHS) * GATHERS * COMPUTE_US
    beyond -= beyond.mean(axis=1, keepdims=True)
    assert run.uneven_us == pytest.approx(beyond.max(axis=1).mean(), rel=1e-3)
    anew = (beyond - beyond.mean(axis=0)).max(axis=1).mean() * math.sqrt(4 / 3)  # of four steps one tells the mean
    assert run.uneven_anew_us == pytest.approx(min(run.uneven_us, anew), rel=1e-3)


def test_one_rank_that_is_always_longer_is_no_other_one_each_time(tmp_path):
    slow = [[1.0, 1.0, 1.2, 1.0]] * 4
    run = analyze(ring_run(tmp_path / "run", slow_steps=slow, world=WORLD, steps=4))
    assert run.uneven_us == pytest.approx(0.15 * GATHERS * COMPUTE_US, rel=1e-3)  # 0.2 beyond others, 0.05 of the mean
    assert run.uneven_anew_us == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize(("share", "is_told"), [(0.01, False), (0.2, True)])
def test_what_differs_by_noise_is_left_as_it_is(share, is_told, tmp_path):
    run = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))
    assert run.uneven_us == pytest.approx(0.0, abs=0.1)
    uneven_us = share * run.breakdown_us.compute
    found = calibrate(replace(run, uneven_us=uneven_us))
    assert found.uneven_us == (uneven_us if is_told else 0.0)
    assert any("compute unlike amounts" in note for note in found.assumptions) is is_told
