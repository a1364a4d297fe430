"""Mixed precision is what the framework makes of it, FSDP1's before training too, or is refused with its reason."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from loop import plan_for
from ranks import run_ranks

WORKER = ROOT / "tests/workers/mixed_precision.py"
ROUNDING = 2e-3  # of bf16 sums in another order, as in test_redirect.py
SAME_TYPES = 1e-6  # what is computed in the same types; an input in bf16 changes 1e-4 and more


def told_by(done):
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    words = [re.sub(r"-?\d\.\d+e[-+]\d+", "#", line) for line in lines]
    return words, [float(number) for line in lines for number in re.findall(r"-?\d\.\d+e[-+]\d+", line)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way",
    [
        "plain",
        "buffers",
        "root in fp32",
        *(pytest.param(way, marks=pytest.mark.variant) for way in ("buffers in fp32", "buffers alone", "parts cast")),
    ],
)
def test_types_are_those_of_the_framework(way, a_plan, tmp_path):
    words, numbers = told_by(run_ranks(WORKER, way))
    types = {line.split()[-1] for line in words if line.startswith("buffer ")}
    assert types == {"torch.int64", "torch.bfloat16" if way in ("buffers", "buffers alone") else "torch.float32"}
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        found = told_by(run_ranks(WORKER, way, plan=plan, drift="parameter_count"))
        assert sorted(found[0]) == sorted(words), strategy
        assert found[1][1] == pytest.approx(numbers[1], rel=SAME_TYPES), strategy  # the first loss, of equal parameters
        assert found[1][:4] == pytest.approx(numbers[:4], rel=ROUNDING), strategy


@pytest.mark.distributed
@pytest.mark.parametrize(
    "way",
    [
        "parts in parts",
        "the whole alone",
        "outputs",
        *(
            pytest.param(way, marks=pytest.mark.variant)
            for way in ("no inputs", "outputs of the whole alone", "outputs without inputs")
        ),
    ],
)
def test_what_fsdp2_casts_is_cast(way, a_plan, tmp_path):
    """Not more: the units of a plan are the outermost wrapped modules, or blocks of a model wrapped as a whole."""
    _, numbers = told_by(run_ranks(WORKER, way))
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        _, found = told_by(run_ranks(WORKER, way, plan=plan, drift="parameter_count"))
        assert found[1] == pytest.approx(numbers[1], rel=SAME_TYPES), strategy  # the first loss, of equal parameters
        assert found[:4] == pytest.approx(numbers[:4], rel=ROUNDING), strategy


@pytest.mark.distributed
def test_a_scripts_hooks_see_what_they_see_under_fsdp2(a_plan, tmp_path):
    """Inputs before or after they are cast, by whether the hook comes before FSDP2's or after."""

    def seen(done):
        return [line for line in told_by(done)[0] if line.startswith(("inputs ", "output "))]

    expected = seen(run_ranks(WORKER, "hooks"))
    assert {line.split()[-1] for line in expected} == {"torch.float32", "torch.bfloat16"}
    for strategy in ("NNG", "GGG"):
        plan = plan_for(a_plan, tmp_path / f"{strategy}.json", strategy)
        assert seen(run_ranks(WORKER, "hooks", plan=plan, drift="parameter_count")) == expected, strategy


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("small gradients", "keep_low_precision_grads"),
        ("norms", "BatchNorm1d in its own type"),
        ("parts unlike the whole", "one mixed_precision for all parts"),
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


@pytest.mark.distributed
def test_sharded_gradients_of_many_passes_lose_no_more_digits_than_fsdp2s():
    """FSDP2 adds each pass's sum in bfloat16 to float32; in bfloat16 alone 64 of them are six times as far off."""
    done = run_ranks(ROOT / "tests/workers/low_precision_sums.py", "GGG,NGG")
    assert done.returncode == 0, done.stderr[-3000:]
    errors = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert set(errors) == {"FSDP2", "GGG", "NGG"}
    for strategy in ("GGG", "NGG"):
        assert errors[strategy] < 1.5 * errors["FSDP2"], strategy
