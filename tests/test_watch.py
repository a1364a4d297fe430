"""A job that becomes slower is noticed within ten steps, and one that does not is left alone."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from helpers import analyze
from loop import torchrun

from paro_advise.advisor.cli import run
from paro_advise.advisor.watching.change import false_alarm_chance, find_changes
from paro_advise.advisor.watching.constants import WATCH_WARM_UP_STEPS
from paro_advise.advisor.watching.follow import FollowedJob


def noise(rng, count, *, spread, memory):
    """Step times around 1 s: log-normal, each like the one before to a degree, and one pause in a hundred."""
    value, out = 0.0, []
    for _ in range(count):
        value = memory * value + math.sqrt(1 - memory**2) * rng.gauss(0.0, spread)
        out.append(1e6 * math.exp(value) * (rng.uniform(1.5, 4.0) if rng.random() < 0.01 else 1.0))
    return out


def numbered(times):
    return list(enumerate(times, start=WATCH_WARM_UP_STEPS))


@pytest.mark.parametrize(("spread", "memory"), [(0.02, 0.0), (0.05, 0.3), (0.1, 0.3)])
def test_quiet_jobs_raise_no_alarm(spread, memory):
    """1,000 windows of 100 steps, whose steps vary, follow each other and pause: at most one false alarm."""
    alarms = 0
    for seed in range(1000):
        alarms += bool(find_changes(numbered(noise(random.Random(seed), 100, spread=spread, memory=memory))))
    assert alarms <= 1


@pytest.mark.parametrize(("spread", "factor"), [(0.02, 1.2), (0.05, 1.4), (0.1, 2.0)])
def test_slower_steps_are_noticed_within_ten(spread, factor):
    """100 jobs that a throttled port slows from step 80 of 120 on: 95 alarms or more, at most ten steps later."""
    noticed = 0
    for seed in range(100):
        times = noise(random.Random(seed), 120, spread=spread, memory=0.2)
        times = [time * (factor if index >= 80 else 1.0) for index, time in enumerate(times)]
        found = find_changes(numbered(times))
        noticed += bool(found) and 80 <= found[0].step - WATCH_WARM_UP_STEPS <= 90
    assert noticed >= 95


def test_the_stated_chance_is_that_of_steps_in_any_order():
    """By drawing: m of n + m values in any order all exceed the k-th largest of the n others; here with smaller numbers."""
    rng = random.Random(3)
    drawn, n, m, k = 200_000, 8, 2, 3
    hits = 0
    for _ in range(drawn):
        values = rng.sample(range(1000), n + m)
        hits += min(values[n:]) > sorted(values[:n])[-k]
    assert hits / drawn == pytest.approx(math.comb(k + m - 1, m) / math.comb(n + m, m), rel=0.02)
    pairs = ((7, 3), (10, 5), (20, 15))
    assert false_alarm_chance() == pytest.approx(sum(math.comb(k + m - 1, m) / math.comb(60 + m, m) for m, k in pairs))
    assert 1 / false_alarm_chance() == pytest.approx(22.7e6, rel=0.02)


@pytest.mark.parametrize(("every", "told_after"), [(40, 7), (15, 10), (5, 20)])
def test_a_job_that_pauses_is_still_told_that_it_became_slower(every, told_after):
    """Every few steps a checkpoint of 5 s beside steps of 1 s; from step 80 on the others take 1.5 s."""
    times = [5e6 if index % every == 3 else 1.5e6 if index >= 80 else 1e6 for index in range(160)]
    found = find_changes(numbered(times))
    assert [change.step - WATCH_WARM_UP_STEPS - 79 for change in found] == [told_after]


def test_a_change_is_told_once_and_the_next_one_again():
    times = [1e6] * 60 + [1.5e6] * 60 + [3e6] * 20
    times = [time * (1 + 0.01 * math.sin(17 * index)) for index, time in enumerate(times)]
    found = find_changes(numbered(times))
    assert [round(change.factor, 1) for change in found] == [1.5, 2.0]
    assert [change.since_step - WATCH_WARM_UP_STEPS for change in found] == [60, 120]


def test_the_first_slow_step_is_named_where_the_baseline_was_still_filling_up():
    """Judging begins with 30 steps before the newest seven: slow steps 28 and 29 fill them up."""
    found = find_changes(numbered([1e6 + index for index in range(28)] + [2e6] * 12))
    assert [change.since_step - WATCH_WARM_UP_STEPS for change in found] == [28]


@pytest.mark.parametrize("looked_every", [1, 5, 33])
def test_a_change_is_told_the_same_however_often_one_looks(looked_every):
    """What was judged before is not judged again, and of the steps before only those that a baseline needs are kept."""
    times = [1e6] * 60 + [1.5e6] * 60 + [3e6] * 30 + [1e6] * 90 + [1.2e6] * 60
    steps = numbered(time * (1 + 0.01 * math.sin(17 * index)) for index, time in enumerate(times))
    found, judged, since = [], -1, 0
    for end in [*range(0, len(steps), looked_every), len(steps)]:
        new = find_changes(steps[max(0, end - 80 - looked_every) : end], since_step=since, judged_step=judged)
        found += new
        since = new[-1].since_step if new else since
        judged = steps[end - 1][0] if end else -1
    assert found == find_changes(steps)
    assert len(found) == 3


def log_lines(rank, times, cpu=None, micro_batches=None):
    """A step log as `capture` writes it."""
    header = {
        "format": "paro-advise/steps",
        "format_version": "1.2",
        "rank": rank,
        "world_size": 2,
        "host": f"node{rank}",
    }
    lines = [json.dumps(header)]
    for step, time_us in enumerate(times):
        row = {
            "step": step, "step_us": time_us, "overhead_us": 0.0, "profiled": False, "loss": 1.0,
            "micro_batches": (micro_batches or [1] * len(times))[step],
            "gradient_norm_squared": None, "peak_memory_bytes": 1, "cpu_us": (cpu or [4e5] * len(times))[step],
        }  # fmt: skip
        lines.append(json.dumps(row))
    return lines


def test_a_followed_job_is_read_on_from_where_it_was_read_to(tmp_path, monkeypatch):
    """Whatever is added, in parts of lines or from the start again: the steps are those of a whole reading.

    All that was added is there, and the newest steps before it.
    """
    lines = log_lines(0, [1e6 + index for index in range(60)])
    text = "\n".join(lines) + "\n"
    path = tmp_path / "steps.rank0.jsonl"
    followed = FollowedJob(tmp_path, keep_steps=20)
    path.write_text(text[: len(text) // 3])
    begun = [row.step for row in followed.logs()[0].rows]
    assert begun == list(range(len(begun)))  # all of what was there
    whole = len(begun)
    for part in (1 / 2, 2 / 3, 1.0):
        before = whole
        path.write_text(text[: int(part * len(text))])
        monkeypatch.setattr("paro_advise.advisor.watching.follow.read_step_log", None)  # not read whole again
        found = followed.logs()[0]
        whole = text[: int(part * len(text))].count("\n") - 1
        assert [row.step for row in found.rows] == list(range(max(0, before - 20), whole))
    assert found.rows[-1].step_us == 1e6 + 59
    monkeypatch.undo()
    assert followed.num_replaced == 0
    path.write_text("\n".join(lines[:3]) + "\n")  # another job
    assert [row.step for row in followed.logs()[0].rows] == [0, 1]
    other = log_lines(0, [2e6] * 80)
    path.write_text("\n".join([other[0].replace("node0", "node7"), *other[1:]]) + "\n")  # and one that is longer
    found = followed.logs()[0]
    assert (found.host, len(found.rows), followed.num_replaced) == ("node7", 80, 2)
    path.unlink()
    assert followed.logs() == []


def test_a_row_of_nonsense_does_not_end_the_reading(tmp_path):
    lines = log_lines(0, [1e6] * 30)
    path = tmp_path / "steps.rank0.jsonl"
    followed = FollowedJob(tmp_path, keep_steps=20)
    path.write_text("\n".join(lines[:11]) + "\n")
    followed.logs()
    odd = json.dumps(json.loads(lines[1]) | {"step": 10**9})
    path.write_text("\n".join([*lines[:11], odd]) + "\n")
    followed.logs()
    path.write_text("\n".join([*lines[:11], odd, *lines[11:]]) + "\n")
    assert [row.step for row in followed.logs()[0].rows] == [*range(30), 10**9]


def watched(monkeypatch, folder, states, options=()):
    """Run `watch` over states of a folder, one a look; return what it says."""
    looks = iter(states)

    def look(_):
        try:
            next(looks)()
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("paro_advise.advisor.commands.jobs.watch.time.sleep", look)
    look(0)
    assert run(["watch", str(folder), "--interval", "0.1", *options]) == 130


def test_ranks_that_lag_neither_double_an_alarm_nor_hide_it(tmp_path, monkeypatch, capsys):
    """The log of rank 1 comes late: with its header only, then in parts."""
    times = [1e6] * 80 + [2e6] * 40
    one, other = log_lines(0, times), log_lines(1, times)

    def write(rank, lines):
        return lambda: (tmp_path / f"steps.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")

    watched(
        monkeypatch, tmp_path, [write(0, one), write(1, other[:1]), write(1, other[:30]), write(1, other), lambda: None]
    )
    assert capsys.readouterr().out.count("2.00x as long since step 80") == 1
    (tmp_path / "steps.rank0.jsonl").unlink()
    watched(monkeypatch, tmp_path, [write(1, other[:1]), write(0, one), write(1, other), lambda: None])
    assert capsys.readouterr().out.count("2.00x as long since step 80") == 1


@pytest.mark.parametrize(
    ("slow_host", "says"), [(True, "host of rank 1 works longer (node1)"), (False, "look at the network")]
)
def test_an_alarm_says_whose_host_works_longer(tmp_path, slow_host, says, capsys):
    times = [1e6 + 1e3 * (index % 7) for index in range(60)] + [1.6e6] * 20
    cpu = [4e5] * 60 + [(9e5 if slow_host else 4e5)] * 20
    (tmp_path / "steps.rank0.jsonl").write_text("\n".join(log_lines(0, times)) + "\n")
    (tmp_path / "steps.rank1.jsonl").write_text("\n".join(log_lines(1, times, cpu)) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    out = capsys.readouterr().out
    assert "1.60x as long since step 60" in out
    assert says in out
    assert run(["watch", str(tmp_path), "--once", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["since_step"], told["rank"]) == (60, 1 if slow_host else None)


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (20, "watched 10 steps of 1 rank, too few to judge: 37 or more are needed after the first 10"),
        (60, "watched 50 steps of 1 rank: no alarm"),
    ],
)
def test_one_look_says_what_it_rests_on(count, told, tmp_path, capsys):
    (tmp_path / "steps.rank0.jsonl").write_text("\n".join([*log_lines(0, [1e6] * count), "{"]) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert err.strip() == f"{told}; no log is there of rank 1; 1 line could not be read"


def test_steps_that_do_more_are_told_from_steps_that_take_longer(tmp_path, capsys):
    times, passes = [1e6] * 60 + [2e6] * 20, [4] * 60 + [8] * 20
    for rank in range(2):
        lines = log_lines(rank, times, micro_batches=passes)
        (tmp_path / f"steps.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    told = capsys.readouterr().out
    assert "2.00x as long since step 60" in told
    assert "a step has 8 micro-batches since then, 4 before" in told
    assert "network" not in told


def test_hosts_of_ranks_without_a_log_are_not_spoken_for(tmp_path, capsys):
    times = [1e6 + 1e3 * (index % 7) for index in range(60)] + [1.6e6] * 20
    (tmp_path / "steps.rank0.jsonl").write_text("\n".join(log_lines(0, times, [4e5] * 80)) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    assert "no host of the one rank of 2 whose logs are here works longer: look at others" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, 30])
def test_a_log_that_has_stopped_growing_hides_no_alarm(tmp_path, kept, capsys):
    """A step counts when all ranks have logged it; one that cannot write any more would end the watch unseen."""
    times = [100e3] * 140 + [150e3] * 40
    for rank in range(3):
        lines = log_lines(rank, times)
        (tmp_path / f"steps.rank{rank}.jsonl").write_text("\n".join(lines if rank != 1 else lines[: 1 + kept]) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    told = capsys.readouterr()
    assert "1.50x as long" in told.out
    assert told.err.count("warning: the log of rank 1") == 1
    assert ("ends at step" if kept else "holds no step") in told.err


def test_profiled_steps_and_the_start_do_not_count(tmp_path, capsys):
    lines = log_lines(0, [9e6] * 9 + [1e6 + 1e3 * (index % 5) for index in range(80)])
    for number in range(60, 70):
        lines[number] = (
            lines[number].replace('"profiled": false', '"profiled": true').replace('"step_us": 100', '"step_us": 900')
        )
    (tmp_path / "steps.rank0.jsonl").write_text("\n".join(lines) + "\n")
    assert run(["watch", str(tmp_path), "--once"]) == 0
    assert capsys.readouterr().out == ""


def test_a_job_that_runs_is_followed(tmp_path):
    """Its log grows, also by half a line; the alarm comes while it runs, and Ctrl-C ends the watch without a trace."""
    log = tmp_path / "steps.rank0.jsonl"
    lines = log_lines(0, [1e6 + 1e3 * (index % 7) for index in range(60)] + [2e6] * 12)
    command = [sys.executable, "-m", "paro_advise", "watch", str(tmp_path), "--interval", "0.05", "--json"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as watch:
        with log.open("w") as file:
            for number, line in enumerate(lines):
                file.write(line[:20])
                file.flush()
                file.write(line[20:] + "\n")
                file.flush()
                if number % 10 == 0:
                    time.sleep(0.06)  # lets the watch see the log half grown; nothing depends on how often
        alarm = json.loads(watch.stdout.readline())
        watch.send_signal(2)
        _, err = watch.communicate(timeout=60)
    assert alarm["since_step"] == 60
    assert watch.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_a_folder_without_logs_is_said(tmp_path, place, capsys):
    folder = tmp_path / place
    if place == "empty":
        folder.mkdir()
    assert run(["watch", str(folder), "--once"]) == 3
    assert "capture" in capsys.readouterr().err


@contextmanager
def running_job(folder):
    """A job under ``capture`` that becomes slow when "slow" is in the folder, and ends with the block."""
    folder.mkdir()
    job = torchrun(ROOT / "tests/workers/until_told.py", folder, ranks=2)
    words = ["capture", "-o", str(folder / "run"), "--steps", "3:5", "--", *job]
    with subprocess.Popen(
        [sys.executable, "-m", "paro_advise", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        try:
            wait_for(lambda: num_steps(folder / "run") > 60 or process.poll() is not None)
            yield folder / "run"
        finally:
            (folder / "end").touch()
            _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-3000:]


def num_steps(run):
    """The steps that both ranks have logged."""
    logs = [run / f"steps.rank{rank}.jsonl" for rank in range(2)]
    return min((len(log.read_text().splitlines()) if log.exists() else 0) for log in logs)


def wait_for(happened):
    until = time.monotonic() + 300
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.distributed
def test_an_alarm_has_the_running_job_record_and_says_what_limits_it(tmp_path, capsys):
    """The whole way: a rank becomes slow, the alarm, three steps of a job that goes on, the verdict; nonsense is ignored."""
    with running_job(tmp_path / "job") as folder:
        words = ["watch", str(folder), "--interval", "0.2", "--json", "--record", "alarm"]
        command = [sys.executable, "-m", "paro_advise", *words]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as watch:
            wait_for(lambda: num_steps(folder) > 80)
            (folder.parent / "slow").write_text("0.2")
            lines = read_lines(watch, lambda line: "recorded" in line)
            watch.send_signal(2)
            watch.communicate(timeout=60)
        assert "since_step" in lines[0]
        told = lines[-1]
        recorded = Path(told["recorded"])
        assert recorded.parent == folder.with_name("run.recordings")  # what is read of the run stays what it was
        assert sorted(path.name for path in recorded.glob("*.gz")) == ["rank0.json.gz", "rank1.json.gz"]
        assert told["verdict"]
        assert [item.rank for item in analyze(recorded).stragglers] == [1]
        steps = json.loads((recorded / "run.json").read_text())["steps"]
        assert steps[1] - steps[0] == 3
        looked_at = time.monotonic()
        for number, text in enumerate(NONSENSE):
            (folder / "record.wanted.json").write_text(text)
            wait_for(lambda number=number: time.monotonic() > looked_at + 1.5 * (number + 1))
        (folder / "record.wanted.json").unlink()
        os.mkfifo(folder / "record.wanted.json")
        wait_for(lambda: time.monotonic() > looked_at + 1.5 * len(NONSENSE) + 3)
        assert json.loads((folder / "record.decided.json").read_text())["name"] == recorded.name
        # The job trains on, and records again.
        assert run(["watch", str(folder), "--once", "--interval", "0.2", "--record", "now"]) == 0
        assert "next: paro-advise recommend" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


NONSENSE = (
    "{",
    "[" * 3000,
    '{"name": "../out", "count": 3, "ranks": "all"}',
    '{"name": "steps-a", "count": 0, "ranks": "all"}',
    '{"name": "steps-a", "count": 2.5, "ranks": "all"}',
    '{"name": "run.json", "count": 3, "ranks": "all"}',
)


def read_lines(process, is_last):
    """The lines of JSON that a process prints up to one; it must print that within five minutes."""
    lines: list[dict] = []
    reading = threading.Thread(target=lambda: take(process, is_last, lines), daemon=True)
    reading.start()
    reading.join(300)
    assert lines and is_last(lines[-1]), lines
    return lines


def take(process, is_last, lines):
    for text in process.stdout:
        lines.append(json.loads(text))
        if is_last(lines[-1]):
            return


def test_a_job_that_has_ended_records_nothing_and_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("paro_advise.advisor.commands.jobs.watch.ENDED_S", 0.5)
    times = [1e3 + (index % 7) for index in range(60)]
    (tmp_path / "steps.rank0.jsonl").write_text("\n".join(log_lines(0, times)) + "\n")
    assert run(["watch", str(tmp_path), "--once", "--record", "now"]) == 3
    assert "must take steps" in capsys.readouterr().err
