"""Draws that are spread evenly over their distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paro_advise.advisor.prediction.sampler import Sampler


def test_normal_draws_have_the_quantiles_of_their_distribution():
    """Of 1,000 deviations 841 lie below 1 and 977 below 2, whatever the seed."""
    for seed in range(3):
        drawn = Sampler(seed).normal(1_000)
        assert (np.sum(drawn < 1), np.sum(drawn < 2)) == (841, 977)
        assert np.median(drawn) == pytest.approx(0.0, abs=1e-9)


def test_factors_have_a_median_of_one():
    drawn = Sampler(0).factors(0.5, 200)
    assert np.median(drawn) == pytest.approx(1.0, abs=1e-4)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.02)
    assert np.all(Sampler(0).factors(0.0, 200) == 1.0)


def test_uniform_draws_take_each_part_of_their_range_once():
    drawn = np.sort(Sampler(0).uniform(2.0, 4.0, 4))
    assert drawn == pytest.approx([2.25, 2.75, 3.25, 3.75])


def test_quantities_are_drawn_independently():
    sampler = Sampler(0)
    assert abs(np.corrcoef(sampler.normal(1_000), sampler.normal(1_000))[0, 1]) < 4 / math.sqrt(1_000)


def test_items_are_picked_as_often_as_their_weights_tell():
    for seed in range(5):
        counts = np.bincount(Sampler(seed).pick(np.array([1.0, 0.0, 2.0, 1.0]), 40), minlength=4)
        assert np.abs(counts - [10, 0, 20, 10]).max() <= 1
        assert counts[1] == 0


def test_equal_seeds_give_equal_draws_and_others_do_not():
    assert np.array_equal(Sampler(1).normal(50), Sampler(1).normal(50))
    assert not np.array_equal(Sampler(1).normal(50), Sampler(2).normal(50))
