"""Ranks that wait for their data are named as that, beside those that compute longer or whose host is slow."""

from __future__ import annotations

import pytest
from helpers import analyze
from test_stragglers import ring_run


def test_a_rank_that_waits_for_its_data_is_told_from_one_whose_host_is_slow(tmp_path):
    run = analyze(ring_run(tmp_path / "run", loading_us=lambda _: {1: 1000.0}))
    (late,) = run.stragglers
    assert (late.rank, late.cause) == (1, "data loading")
    assert late.lateness_us == pytest.approx(1000.0, rel=0.05)
    assert "Rank 1 is a straggler (data loading): the others wait 1 ms a step for it." in run.verdict.text


def test_data_loading_that_holds_another_rank_in_each_step_is_named(tmp_path):
    run = analyze(ring_run(tmp_path / "run", loading_us=lambda step: {(3 * step) % 8: 4000.0}, world=8, steps=6))
    assert run.stragglers == ()
    assert run.late_once_us == pytest.approx(4000.0, rel=0.05)
    (finding,) = [item for item in run.findings if item.code == "PARO030"]
    assert "again and again one is late by its own doing, mostly while it waits for its DataLoader," in finding.text
