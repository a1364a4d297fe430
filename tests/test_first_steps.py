"""What an impatient newcomer tries first: the wrong file, the wrong name, a trace that was cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import write_run
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run


@pytest.fixture
def traces(tmp_path):
    return write_run(tmp_path / "traces", [fsdp_rank(rank) for rank in range(2)])


def test_show_reads_plans_and_hangs_back(traces, tmp_path, capsys):
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert run(["recommend", str(traces), "-o", str(plan), "--html", str(page), "-q"]) == 0
    capsys.readouterr()
    said = []
    for path in (plan, page):
        assert run(["show", str(path), "--json", "-"]) == 0
        assert capsys.readouterr().out.encode() == plan.read_bytes()
        assert run(["show", str(path)]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "strategy" in said[0]
    hang = tmp_path / "hang.json"
    values = {"format": "paro-advise/hang", "format_version": "1.1", "text": "Rank 1 holds the others up."}
    hang.write_text(json.dumps(values))
    assert run(["show", str(hang)]) == 3  # its other keys are missing
    assert "paro-advise/hang file is not complete" in capsys.readouterr().err


def test_show_says_what_it_prints_where_it_is_given_something_else(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    assert run(["show", str(script)]) == 3
    assert "must be an analysis, a plan, a comparison or a hang that paro-advise wrote" in capsys.readouterr().err


def test_what_paro_advise_wrote_itself_is_no_recording_and_neither_is_nothing(traces, tmp_path, capsys):
    plan, page, described, empty = (tmp_path / name for name in ("plan.json", "plan.html", "run.toml", "rank0.json"))
    assert run(["recommend", str(traces), "-o", str(plan), "--html", str(page), "-q"]) == 0
    empty.write_bytes(b"")
    described.write_text('[model]\nparameters = "7e9"\n')
    for path, text in (
        (plan, "this one is a plan of paro-advise"),
        (page, "this one is a report of paro-advise"),
        (described, "`recommend` takes a description"),
        (empty, "this file is empty"),
    ):
        capsys.readouterr()
        assert run(["analyze", str(path)]) == 3
        assert text in capsys.readouterr().err


def test_the_name_of_a_page_is_refused_for_a_plan(traces, tmp_path, capsys):
    assert run(["recommend", str(traces), "-o", str(tmp_path / "plan.html")]) == 2
    assert "--html" in capsys.readouterr().err
    assert not list(tmp_path.glob("plan*"))


def test_compare_says_what_was_lost_of_its_runs_wherever_it_writes(tmp_path, capsys):
    """Rank 1's trace is cut in the middle of an event."""
    folder = write_run(tmp_path / "run", [fsdp_rank(rank, world=2) for rank in range(2)])
    cut = folder / "rank1.json"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 3 // 4])
    outputs = {name: tmp_path / f"c.{name}" for name in ("json", "markdown", "html")}
    words = [*("--json", str(outputs["json"])), *("--markdown", str(outputs["markdown"])), "-o", str(outputs["html"])]
    assert run(["compare", str(folder), str(folder), "-q", *words]) == 0
    said = capsys.readouterr().err
    lost = json.loads(outputs["json"].read_text())["after"]["warnings"]
    assert lost
    for name in ("before", "after"):
        assert any(line.startswith(("warning[", "error[")) and f"]: {name}: " in line for line in said.splitlines())
    for item in lost:
        assert item["code"] in outputs["markdown"].read_text()
        assert item["code"] in outputs["html"].read_text()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_came_on_standard_input_is_called_so(is_whole, tmp_path):
    """Not by the temporary file that holds it."""
    trace = Path(fsdp_rank(0).write(tmp_path / "rank0.json")).read_bytes() if is_whole else b"no trace"
    command = [sys.executable, "-m", "paro_advise", "analyze", "-", "-o", str(tmp_path / "page.html"), "--json", "-"]
    done = subprocess.run(command, input=trace, capture_output=True, check=False, cwd=tmp_path)
    assert b"stdin-" not in done.stdout + done.stderr
    assert done.returncode == (0 if is_whole else 3)
    if is_whole:
        assert [item["path"] for item in json.loads(done.stdout)["run"]["inputs"]] == ["standard input"]
        assert "stdin-0" not in (tmp_path / "page.html").read_text()
    else:
        assert b"--> standard input" in done.stderr
