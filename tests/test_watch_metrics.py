"""What `watch` writes for Prometheus of a job that runs; read back by Prometheus' own client library."""

from __future__ import annotations

import time
from functools import partial

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_watch import log_lines, watched

from paro_advise.advisor.cli import run


def value_of(path, name, **labels):
    """The value of a sample; None where there is none."""
    found = {
        sample.value
        for family in text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if sample.name == f"paro_advise_{name}" and labels.items() <= sample.labels.items()
    }
    assert len(found) <= 1
    return next(iter(found), None)


def logged(folder, times, cpu=None):
    """Two ranks' logs, whose hosts work as told."""
    for rank in range(2):
        lines = log_lines(rank, times, cpu if rank else None)
        (folder / f"steps.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_newest_steps_the_hosts_and_the_alarms(tmp_path, monkeypatch, capsys):
    job, target = tmp_path / "job", tmp_path / "job.prom"
    job.mkdir()
    options = ["--prometheus", str(target), "--label", "run=llama"]
    seen = []

    def look(times, cpu=None):
        def write():
            if target.exists():
                seen.append(target.read_text())
            logged(job, times, cpu)

        return write

    quick = [1e6 + 1e3 * (index % 7) for index in range(60)]
    slow = [*quick, *[1.6e6] * 40]
    cpu = [4e5] * 60 + [9e5] * 40
    watched(monkeypatch, job, [look(quick), look(slow, cpu), lambda: None], options)
    assert "step 66: steps take 1.60x as long since step 60" in capsys.readouterr().out
    target_before = tmp_path / "before.prom"
    target_before.write_text(seen[0])
    # 30 steps of 1 s and 0 to 6 ms, and of 0.4 s on a core.
    assert value_of(target_before, "job_step_seconds", run="llama") == pytest.approx(1.003, abs=1e-3)
    assert value_of(target_before, "job_alarms") == 0
    assert value_of(target_before, "job_newest_step") == 59
    assert value_of(target_before, "job_slowdown_ratio") is None
    assert value_of(target, "job_step_seconds") == pytest.approx(1.6)
    assert value_of(target, "job_alarms", run="llama") == 1
    assert value_of(target, "job_newest_step") == 99
    assert value_of(target, "job_slowdown_ratio") == pytest.approx(1.6 / 1.003, rel=1e-3)
    assert value_of(target, "job_looked_timestamp_seconds") == pytest.approx(time.time(), abs=600)
    assert value_of(target, "job_host_seconds", rank="0", host="node0") == pytest.approx(0.4)
    assert value_of(target, "job_host_seconds", rank="1", host="node1") == pytest.approx(0.9)


def test_another_job_begins_without_the_alarms_of_the_last_one(tmp_path, monkeypatch, capsys):
    """The old logs are removed some time before the new ones are there, or are replaced by ones that are empty yet."""
    target = tmp_path / "job.prom"
    quick = [1e6 + 1e3 * (index % 7) for index in range(60)]

    def remove(job):
        for path in job.glob("*.jsonl"):
            path.unlink()

    def empty(job):
        for path in job.glob("*.jsonl"):
            path.with_suffix(".new").touch()
            path.with_suffix(".new").replace(path)

    for number, end in enumerate((remove, empty)):
        job = tmp_path / f"job{number}"
        job.mkdir()
        looks = [
            partial(logged, job, [*quick, *[1.6e6] * 300]), partial(end, job), lambda: None,
            partial(logged, job, [4e6] * 60), partial(logged, job, [*[4e6] * 60, *[8e6] * 9]), lambda: None,
        ]  # fmt: skip
        watched(monkeypatch, job, looks[:4], ["--prometheus", str(target), "--force"])
        assert capsys.readouterr().out.count("as long since step 60") == 1
        assert value_of(target, "job_alarms") == 0
        assert value_of(target, "job_slowdown_ratio") is None
        remove(job)
        watched(monkeypatch, job, looks, ["--prometheus", str(target), "--force"])
        out = capsys.readouterr().out
        assert (out.count("1.60x"), out.count("2.00x")) == (1, 1)
        assert value_of(target, "job_alarms") == 1


def test_a_rank_whose_log_is_seen_late_hides_no_change(tmp_path, monkeypatch, capsys):
    """Rank 1's log comes 900 steps late, as over a network file system that caches."""
    times = [1e6 + 1e3 * (index % 7) for index in range(700)] + [1.6e6] * 500
    lines = [log_lines(rank, times) for rank in range(2)]

    def look(first, second):
        for rank, count in enumerate((first, second)):
            (tmp_path / f"steps.rank{rank}.jsonl").write_text("\n".join(lines[rank][:count]) + "\n")

    counts = [(300, 300), (600, 300), (900, 300), (1201, 300), (1201, 1201)]
    watched(monkeypatch, tmp_path, [partial(look, *pair) for pair in counts])
    assert capsys.readouterr().out.count("1.60x as long since step 700") == 1


def test_before_the_first_step_there_is_no_step_time(tmp_path):
    (tmp_path / "job").mkdir()
    logged(tmp_path / "job", [])
    assert run(["watch", str(tmp_path / "job"), "--once", "--prometheus", str(tmp_path / "job.prom")]) == 0
    assert value_of(tmp_path / "job.prom", "job_step_seconds") is None
    assert value_of(tmp_path / "job.prom", "job_alarms") == 0


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--prometheus", "-"], 2, "must be a file"),
        (["--prometheus", "{}/job.prom", "--label", "rank=7"], 2, "one that a metric has itself"),
        (["--prometheus", "{}/job.prom", "--label", "rank"], 2, "NAME=VALUE"),
        (["--prometheus", "{}/job.prom", "--label", "run=\udcff"], 2, "in UTF-8"),
        (["--label", "run=7"], 2, "--label must come with --prometheus"),
        (["--prometheus", ""], 2, "must be a file"),
        (["--prometheus", "{}/there.prom"], 1, "--force"),
        (["--prometheus", "{}/job/steps.rank0.jsonl", "--force"], 1, "read as an input"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_else(tmp_path, options, code, text, capsys):
    (tmp_path / "job").mkdir()
    if "rank=7" not in options:  # which is refused before there are logs
        logged(tmp_path / "job", [1e6] * 20)
    (tmp_path / "there.prom").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run(["watch", str(tmp_path / "job"), "--once", *(word.format(tmp_path) for word in options)]) == code
    assert text in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_file_that_cannot_be_written_any_more_does_not_end_the_watch(tmp_path, monkeypatch, capsys):
    job, place = tmp_path / "job", tmp_path / "place"
    job.mkdir()
    place.mkdir()

    def is_gone():
        (place / "job.prom").unlink()
        place.rmdir()
        place.write_text("a file")

    logs = [lambda: logged(job, [1e6] * 20), is_gone, lambda: None, place.unlink, lambda: None]
    watched(monkeypatch, job, logs, ["--prometheus", str(place / "job.prom")])
    assert capsys.readouterr().err.count("error[") == 1
    assert value_of(place / "job.prom", "job_newest_step") == 19
