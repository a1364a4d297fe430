"""Buffers of DDP are rank 0's where DDP makes them so, and each rank's own where it does not."""

from __future__ import annotations

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks

WORKER = ROOT / "tests/workers/unlike_buffers.py"


def told_by(plan=None):
    done = run_ranks(WORKER, plan=plan, drift="parameter_count")
    assert done.returncode == 0, done.stderr[-3000:]
    told = dict(line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    return {name: [float(word) for word in text.split()] for name, text in told.items()}


@pytest.mark.distributed
def test_buffers_are_sent_when_ddp_sends_them(a_plan, tmp_path):
    plain = told_by()
    assert len(plain) == 11
    kinds = ["as it is", "no broadcasts", "at first only"]  # here these differ
    assert len({tuple(plain[name]) for name in kinds}) == len(kinds)
    for strategy in ("NNG", "GGG"):
        found = told_by(plan_for(a_plan, tmp_path / f"{strategy}.json", strategy))
        for name, numbers in plain.items():
            assert found[name] == pytest.approx(numbers, rel=2e-6), (strategy, name)


@pytest.mark.distributed
def test_mixed_precision_by_position_is_refused_as_by_name(a_plan, tmp_path):
    done = run_ranks(WORKER, "mixed", plan=plan_for(a_plan, tmp_path / "plan.json", "GGG"), drift="parameter_count")
    assert done.returncode != 0
    assert "a plan cannot express DDP's mixed_precision" in done.stderr
    assert done.stdout == ""
