"""A folder that a capture wrote is analyzed without a complaint about the capture's own files."""

from __future__ import annotations

import json
import sys

import pytest
from helpers import write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.cli import run
from paro_advise.core.capture_files import write_whole


def steady_rank(rank):
    trace = TraceBuilder(rank=rank)
    for index in range(3):
        begin = index * 1000.0
        trace.step(index, begin, 1000.0)
        trace.compute(begin + 100, 300)
        trace.collective("AllReduce", begin + 450, 200, nelems=1 << 20, issue=begin + 440, seq=index)
    return trace


def test_logs_beside_traces_are_no_errors(tmp_path, capsys):
    folder = write_run(tmp_path / "before", [steady_rank(0), steady_rank(1)])
    (folder / "run.json").write_text(json.dumps({"format": "paro-advise/run", "format_version": "1.2"}))
    header = {"format": "paro-advise/steps", "format_version": "1.2", "rank": 0, "world_size": 2}
    (folder / "steps.rank0.jsonl").write_text(json.dumps(header) + "\n")
    logs = folder / "logs"
    logs.mkdir()
    for node in range(2):
        (logs / f"node{node}.log").write_text("[W1122] the socket cannot be named\nstep 0: loss 7.1184\n" * 3)
    assert run(["analyze", str(folder)]) == 0
    said = capsys.readouterr().err
    assert "error[" not in said
    assert "left out 2 files without a recording: node0.log, node1.log" in said


def test_profiled_times_are_marked_where_others_are_known(tmp_path, capsys):
    """Steps of 1000 us in the traces, of 800 us without the profiler: one is not shown for the other."""
    folder = write_run(tmp_path / "before", [steady_rank(0), steady_rank(1)])
    usual = {"overhead_us": 0, "micro_batches": 1, "loss": 1.0, "gradient_norm_squared": 1.0, "peak_memory_bytes": 1}
    for rank in range(2):
        header = {
            "format": "paro-advise/steps",
            "format_version": "1.2",
            "rank": rank,
            "world_size": 2,
            "steps": [10, 13],
        }
        rows = [usual | {"step": step, "step_us": 800.0, "cpu_us": 1, "profiled": False} for step in range(10)]
        rows += [usual | {"step": step, "step_us": 1000.0, "cpu_us": 1, "profiled": True} for step in range(10, 13)]
        lines = [json.dumps(row) for row in (header, *rows)]
        (folder / f"steps.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    report = tmp_path / "run.html"
    assert run(["analyze", str(folder), "-o", str(report)]) == 0
    assert "Times are profiled, 1.25x as long as the 800 us without the profiler." in capsys.readouterr().out
    page = report.read_text()
    assert "<b>800 us</b><span>step without the profiler, median</span>" in page
    assert "<b>1 ms</b><span>profiled step, mean</span>" in page
    assert run(["analyze", str(folder / "rank0.json")]) == 0
    assert "profiled" not in capsys.readouterr().out


def test_what_cannot_take_its_place_leaves_nothing_behind(tmp_path):
    """As on a full disk: a file that others wait for is there whole or not at all."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def recorded_before(folder):
    """Write what an earlier capture left, and return it."""
    folder.mkdir()
    for name in ("rank0.json.gz", "steps.rank0.jsonl", "run.json"):
        (folder / name).write_bytes(b"earlier")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("job", "code"),
    [
        (["no-such-command"], 2),
        ([sys.executable, "-c", "raise SystemExit(7)"], 7),
        ([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], 137),
    ],
    ids=["no command", "fails before a step", "killed"],
)
def test_a_job_that_records_nothing_leaves_an_earlier_capture(job, code, tmp_path):
    before = recorded_before(tmp_path / "kept")
    assert run(["capture", "-o", str(tmp_path / "kept"), "--force", "--", *job]) == code
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == before


def test_a_job_that_records_replaces_an_earlier_capture_whole(tmp_path):
    recorded_before(tmp_path / "kept")
    script = "import os, pathlib; pathlib.Path(os.environ['PARO_CAPTURE'], 'rank1.json.gz').write_bytes(b'new')"
    assert run(["capture", "-o", str(tmp_path / "kept"), "--force", "-q", "--", sys.executable, "-c", script]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "kept").iterdir()} == {"rank1.json.gz": b"new"}


def test_a_capture_that_could_write_nothing_is_refused_before_the_job(tmp_path, capsys):
    (tmp_path / "file").write_text("the user's")
    marker = tmp_path / "started"
    script = f"open({str(marker)!r}, 'w')"
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert run(["capture", "-o", str(folder), "--force", "--", sys.executable, "-c", script]) == 1
        assert "error[E400]: a capture must get a folder that can be written" in capsys.readouterr().err
    assert not marker.exists()
    assert (tmp_path / "file").read_text() == "the user's"


def test_ranks_that_the_job_does_not_have_are_named_as_the_cause(tmp_path, capsys):
    header = {"format": "paro-advise/steps", "format_version": "1.2", "rank": 0, "world_size": 2, "steps": [2, 4]}
    row = {"step_us": 9.0, "cpu_us": 1, "overhead_us": 0, "micro_batches": 1, "loss": None, "profiled": False}
    row |= {"gradient_norm_squared": None, "peak_memory_bytes": 1}
    text = "\n".join(json.dumps(line) for line in (header, *(row | {"step": step} for step in range(6))))
    script = (
        "import os, pathlib; folder = pathlib.Path(os.environ['PARO_CAPTURE']); folder.mkdir(); "
        f"(folder / 'steps.rank0.jsonl').write_text({text!r})"
    )
    words = [
        "capture",
        "-o",
        str(tmp_path / "new"),
        "--steps",
        "2:4",
        "--ranks",
        "9",
        "--",
        sys.executable,
        "-c",
        script,
    ]
    assert run(words) == 0
    assert "the steps 2:4 ran, but none of the ranks 9 wrote a trace of them" in capsys.readouterr().err
