"""`make gpu` without a GPU: every check is there, and says why it is skipped."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_check_of_the_suite_exists_and_every_existing_one_is_run():
    suite, checks = load("gpu"), load("gpu_checks")
    assert {check.name for check in suite.SUITE} - {"capture", "scripts", "attach", "loop"} == set(checks.CHECKS)
    assert {check.framework for check in suite.SUITE} - {""} == set(load("gpu_scripts").FRAMEWORKS)
    assert [check for job in suite.jobs_of(suite.SUITE) for check in job] == list(suite.SUITE)
    page = (BENCHMARKS.parent / "docs/gpu.md").read_text(encoding="utf-8")
    assert all(f"`{check.name}`" in page for check in suite.SUITE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_each_check_says_why_it_is_skipped(tmp_path):
    path = tmp_path / "table.json"
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--json", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["device"].startswith("no GPU")
    assert len(table["rows"]) == len(load("gpu").SUITE)
    assert {row["skipped"] for row in table["rows"]} == {"torch finds no GPU"}


def test_a_check_that_fails_is_told_and_ends_the_suite_with_an_error(monkeypatch, capsys):
    suite = load("gpu")
    monkeypatch.setattr(suite, "run_checks", lambda *_: [{"holds": False, "failed": "a reason"}])
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--on-cpu", "--only", "layouts"])
    with pytest.raises(SystemExit) as ended:
        suite.main()
    assert ended.value.code == 1
    assert "FAILS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("got", "wanted", "difference"),
    [
        ([2.0, 3.0], [2.0, 4.0], 0.25),
        ([0.0, math.inf], [0.0, math.inf], 0.0),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([math.nan, 1.0], [math.nan, 1.0], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
    ],
)
def test_numbers_that_are_none_are_never_near(got, wanted, difference):
    assert load("gpu_jobs").worst_difference(got, wanted) == difference


def test_norms_of_scripts_are_compared_beside_their_losses():
    assert load("gpu").numbers_in("R 0 2.5 0.5\nwarning\nR 1 nan 0.25\n")[:2] == [2.5, 0.5]


def test_checks_run():
    """On the CPU, with four ranks: their own code is right."""
    suite = load("gpu")
    checks = [suite.Check(name=name, ranks=4, backend="gloo") for name in ("out_of_memory", "memory")]
    caught, memory = suite.run_checks(checks, "cpu")
    assert caught["holds"], caught
    assert caught["caught"] == 1
    assert memory["holds"], memory


def test_a_check_without_a_result_is_told_from_those_behind_it(monkeypatch):
    suite = load("gpu")
    ended = suite.jobs.Ended(code=1, output='{"name": "memory", "holds": true}\n', errors="RuntimeError: no memory\n")
    monkeypatch.setattr(suite.jobs, "run", lambda *_, **__: ended)
    checks = [suite.Check(name=name, ranks=4, backend="gloo") for name in ("memory", "traces", "compiled")]
    memory, traces, compiled = suite.run_checks(checks, "cpu")
    assert memory["holds"]
    assert traces["failed"] == "RuntimeError: no memory"
    assert compiled["failed"] == "not reached, for traces ended the job"


@pytest.mark.variant
def test_an_unchanged_script_trains_alike_under_plans_of_its_own_recording():
    """On the CPU, as two hosts by gloo."""
    suite = load("gpu")
    (found,) = suite.run_checks([suite.Check(name="scripts", ranks=2, backend="nccl", framework="ddp")], "cpu")
    assert found["holds"], found
    assert found["NNG"] <= 1e-6
