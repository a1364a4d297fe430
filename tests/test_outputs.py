"""What commands write, and what they never replace."""

from __future__ import annotations

import json
import os
import stat
import tarfile

import pytest
from helpers import write_run
from trace_builder import fsdp_rank

import paro_advise
from paro_advise.advisor.cli import run


@pytest.fixture
def traces(tmp_path):
    return write_run(tmp_path / "traces", [fsdp_rank(0), fsdp_rank(1, late_us=30)])


def test_outputs_are_not_overwritten_without_force(traces, tmp_path, capsys):
    target = tmp_path / "report.html"
    target.write_text("mine")
    assert run(["analyze", str(traces), "-o", str(target)]) == 1
    assert "E401" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert run(["analyze", str(traces), "-o", str(target), "--force"]) == 0
    assert target.read_text().lstrip().startswith("<!doctype html>")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".report")]


def test_a_trace_among_the_inputs_is_not_overwritten_even_with_force(traces, capsys):
    target = next(iter(sorted(traces.iterdir())))
    before = target.read_bytes()
    for command in (
        ["analyze", str(traces), "--json", str(target)],
        ["analyze", str(traces / "*.json"), "--json", str(target)],
        ["recommend", str(traces), "-o", str(target)],
        ["slice", str(traces), "-o", str(target)],
        ["export", str(traces), "--prometheus", str(target)],
        ["compare", str(traces), str(traces), "-o", str(target)],
    ):
        assert run([*command, "--force"]) == 1
        assert "E401" in capsys.readouterr().err
    assert target.read_bytes() == before


@pytest.mark.parametrize("verb", [["analyze", "{}"], ["compare", "{}", "{}"], ["show", "{}/run.json"]])
def test_a_document_on_the_standard_output_stands_alone(verb, traces, tmp_path, capsys):
    """Whatever it is; another one beside it is refused before any work."""
    (traces / "run.json").write_bytes(paro_advise.analyze(str(traces)).to_json())
    words = [word.format(traces) for word in verb]
    assert run([*words, "--json", "-"]) in (0, 5)
    json.loads(capsys.readouterr().out)
    if verb[0] == "show":
        return
    assert run([*words, "-o", "-", "--json=" + str(tmp_path / "made.json")]) == 0
    assert capsys.readouterr().out.rstrip().endswith("</html>")
    assert run([*words, "-o", "-", "--json", "-"]) == 2
    assert "two are the same" in capsys.readouterr().err
    link = tmp_path / "x.html"
    assert run([*words, "-o", str(link), "--json", f"{tmp_path}/./x.html", "--force"]) == 2
    assert not link.exists()


def test_an_index_on_the_standard_output_and_in_the_place_of_a_comparison(traces, tmp_path, capsys):
    folder = tmp_path / "runs"
    assert run(["compare", str(traces), str(traces), "-o", str(folder / "report.html")]) == 0
    capsys.readouterr()
    assert run(["index", str(folder), "-o", "-"]) == 0
    out, err = capsys.readouterr()
    assert out.rstrip().endswith("</html>")
    assert err.strip() == "1 comparison"
    before = (folder / "report.html").read_bytes()
    assert run(["index", str(folder), "-o", str(folder / "report.html"), "--force"]) == 1
    assert "must not replace a comparison" in capsys.readouterr().err
    assert (folder / "report.html").read_bytes() == before
    assert run(["index", str(folder)]) == run(["index", str(folder), "--force"]) == 0


@pytest.mark.parametrize("option", [["--json", "-"], ["--json=-"]])
def test_an_error_is_json_where_json_was_to_be(option, tmp_path, capsys):
    assert run(["analyze", str(tmp_path / "none"), *option]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E301"


@pytest.mark.parametrize("name", ["steps.rank0.jsonl", "run.json", "record.decided.json"])
def test_what_a_capture_wrote_beside_traces_is_not_overwritten_even_with_force(traces, name, capsys):
    """A run's own facts and the log of its steps, which an analysis reads too."""
    target = traces / name
    kind = {"steps.rank0.jsonl": "paro-advise/steps", "run.json": "paro-advise/run"}.get(name, "")
    target.write_text(json.dumps({"format": kind, "format_version": "1.2", "rank": 0, "world_size": 1}) + "\n")
    before = target.read_bytes()
    for command in (
        ["analyze", str(traces), "--json", str(target)],
        ["watch", str(traces), "--prometheus", str(target)],
    ):
        assert run([*command, "--force"]) == 1
        assert "E401" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_what_lies_among_the_inputs_and_is_none_is_replaced(traces):
    commands = (
        ["analyze", str(traces), "-o", str(traces / "report.html")],
        ["analyze", str(traces), "--json", str(traces / "run.json")],
        ["recommend", str(traces), "-o", str(traces / "plan.json")],
        ["export", str(traces), "--prometheus", str(traces / "paro.prom"), "--grafana", str(traces / "board.json")],
        ["slice", str(traces), "-o", str(traces / "step.json.gz")],
    )
    for command in (*commands, *commands):
        quiet = [] if command[0] == "slice" else ["-q"]
        assert run([*command, "--force", *quiet]) in (0, 4), command


def test_an_archive_in_a_folder_that_is_read_is_not_replaced(traces, capsys):
    target = traces / "more.tar.gz"
    with tarfile.open(target, "w:gz") as archive:
        archive.add(traces / "rank0.json", "rank0.json")
    before = target.read_bytes()
    assert run(["analyze", str(traces), "--json", str(target), "--force"]) == 1
    assert "E401" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_what_else_a_command_reads_is_not_replaced(traces, tmp_path, capsys):
    plan = tmp_path / "plan.json"
    assert run(["recommend", str(traces), "-o", str(plan), "-q"]) in (0, 4)
    before = plan.read_bytes()
    for command in (
        ["compare", str(traces), str(traces), "--plan", str(plan), "--json", str(plan)],
        ["export", str(traces), "--plan", str(plan), "--prometheus", str(plan)],
        ["recommend", str(traces), "--learn-from", str(plan), "-o", str(plan)],
    ):
        assert run([*command, "--force"]) == 1
        assert "E401" in capsys.readouterr().err
    assert plan.read_bytes() == before


def test_a_slice_beside_the_traces_is_not_read_as_one_of_them(traces, capsys):
    assert run(["analyze", str(traces), "--json", "-", "-q"]) == 0
    before = json.loads(capsys.readouterr().out)
    for name in ("step.json", "step.json.gz"):
        assert run(["slice", str(traces), "-o", str(traces / name)]) == 0
    assert run(["analyze", str(traces), "--json", "-", "-q"]) == 0
    after = json.loads(capsys.readouterr().out)
    left_out = [item for item in after["data_quality"] if item["code"] == "Q302"]
    assert [item["message"] for item in left_out] == ["left out 2 files without a recording: step.json, step.json.gz"]
    assert {**after, "data_quality": []} == {**before, "data_quality": []}
    assert run(["analyze", str(traces / "step.json")]) == 3
    assert "a part that paro-advise has cut" in capsys.readouterr().err


def test_an_output_never_replaces_a_device_or_a_pipe(traces, tmp_path, capsys):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run(["analyze", str(traces), "--json", str(pipe), "--force", "-q"]) != 0
    assert "a device or a pipe" in capsys.readouterr().err
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    for device in ("/dev/null", "/dev/stdout"):  # the latter leads to a file where the shell has redirected it
        assert run(["analyze", str(traces), "--json", device, "--force", "-q"]) != 0
        assert "a device or a pipe" in capsys.readouterr().err


def test_a_link_that_leads_to_itself_or_nowhere_is_neither_output_nor_input(traces, tmp_path, capsys):
    loop, nowhere = tmp_path / "loop.json", tmp_path / "nowhere.json"
    loop.symlink_to(loop)
    nowhere.symlink_to(tmp_path / "missing")
    assert run(["analyze", str(traces), "--json", str(loop), "--force", "-q"]) != 0
    assert "a link that leads to itself" in capsys.readouterr().err
    for link in (loop, nowhere):
        assert run(["analyze", str(link)]) == 3
        assert "nothing found" in capsys.readouterr().err
        assert run(["apply", str(link), str(link)]) == 3
        assert run(["recommend", str(traces), "-o", str(loop), "--html", str(loop), "-q"]) != 0
        assert "a defect" not in capsys.readouterr().err


def test_a_link_stays_one(traces, tmp_path):
    (tmp_path / "today").mkdir()
    link = tmp_path / "report.json"
    link.symlink_to(tmp_path / "today" / "report.json")
    assert run(["analyze", str(traces), "--json", str(link), "-q"]) == 0
    assert link.is_symlink()
    assert json.loads((tmp_path / "today" / "report.json").read_text())["format"] == "paro-advise/analysis"
