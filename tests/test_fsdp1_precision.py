"""FSDP1's mixed precision is what FSDP1 makes of it, before training too, or is refused with its reason."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks

WORKER = ROOT / "tests/workers/fsdp1_precision.py"
ROUNDING = 2e-3  # of bf16 sums in another order, as in test_redirect.py


def told_by(done):
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    words = [re.sub(r"-?\d\.\d+e[-+]\d+", "#", line) for line in lines]
    return words, [float(number) for line in lines for number in re.findall(r"-?\d\.\d+e[-+]\d+", line)]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["plain", "buffers", "buffers in fp32", "buffers alone"])
def test_types_are_those_of_the_framework(way, a_plan, tmp_path):
    words, numbers = told_by(run_ranks(WORKER, way))
    types = {line.split()[-1] for line in words if line.startswith("buffer ")}
    assert types == {"torch.int64", "torch.bfloat16" if way in ("buffers", "buffers alone") else "torch.float32"}
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        found = told_by(run_ranks(WORKER, way, plan=plan, drift="parameter_count"))
        assert sorted(found[0]) == sorted(words), strategy
        assert found[1][:4] == pytest.approx(numbers[:4], rel=ROUNDING), strategy


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("root in fp32", "cast_root_forward_inputs"),
        ("parts cast", "cast_forward_inputs"),
        ("small gradients", "keep_low_precision_grads"),
        ("norms", "BatchNorm1d in its own type"),
    ],
)
def test_what_a_plan_cannot_express_is_refused_at_the_start(way, why, a_plan, tmp_path):
    plan = plan_for(a_plan, tmp_path / "plan.json", "GGG")
    done = run_ranks(WORKER, way, plan=plan, drift="parameter_count")
    assert done.returncode != 0
    assert why in done.stderr
    assert "E510" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
