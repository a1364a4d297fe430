"""Names of inputs and outputs that are empty, as an unset variable of the shell leaves them, and closed outputs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import DATA

from paro_advise.advisor.cli import run

RUN = str(DATA / "gpu_loops/ddp")


@pytest.mark.parametrize(
    "words",
    [
        ("analyze", RUN, "-o", ""),
        ("analyze", RUN, "--json", ""),
        ("recommend", RUN, "-o", ""),
        ("compare", RUN, RUN, "--markdown", ""),
        ("slice", RUN, "-o", ""),
        ("analyze", ""),
        ("compare", RUN, ""),
        ("capture", "-o", "", "--", "true"),
        ("run", "--plan", RUN, "--job", "", "--", "true"),
        ("index", ""),
        ("show", ""),
    ],
)
def test_an_empty_name_is_refused_before_any_work(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(list(words)) == 2
    assert "empty" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # conftest.py puts that there


@pytest.mark.parametrize("words", [("analyze", RUN, "--json", "-"), ("recommend", RUN, "-o", "-")])
def test_a_closed_standard_output_is_no_defect(words):
    command = f'"{sys.executable}" -m paro_advise {" ".join(words)} >&-'
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, env=dict(os.environ), check=False)
    assert done.returncode == 1
    assert "error[E400]: an output must be writable: the standard output is closed" in done.stderr


@pytest.mark.distributed
def test_a_job_that_failed_before_its_first_step_is_not_told_to_install_anything(tmp_path, capfd):
    assert run(["capture", "-o", str(tmp_path / "c"), "--", sys.executable, "nosuch.py"]) == 2
    said = capfd.readouterr().err
    assert "the job ended with exit code 2 before a step was logged" in said
    assert "PYTHONPATH" not in said
