"""Capture from inside a script: the context, the callback, and nothing at all when it is off."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from loop import paro, torchrun

pytestmark = pytest.mark.distributed

SCRIPT = """
import sys, torch
from paro_advise.runtime.capture import CaptureCallback, capture

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


how, folder = sys.argv[1:]


def make_states():  # as torch's checkpoint helpers do
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def count_operations():  # as scripts do on the meta device
    torch.nn.Linear(4, 1, device="meta")(torch.ones(2, 4, device="meta")).sum().backward()


def backward():
    (model(torch.ones(2, 4)).square().mean() / 3).backward()


def last_pass():  # with what comes before the step, as Lightning does
    backward()
    if how != "closure":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def step():
    for _ in range(2):
        backward()
    if how.startswith("closure"):
        optimizer.step(last_pass)
    else:
        last_pass()
        optimizer.step()
    optimizer.zero_grad()


if how.startswith(("context", "closure")):
    with capture(folder, steps="4:6") as recording:
        if "states" in how:
            make_states()
        if "meta" in how:
            count_operations()
        for _ in range(8):
            step()
            recording.step()
elif how == "callback":
    callback = CaptureCallback(folder, steps="4:6")
    callback.on_train_begin()
    for _ in range(8):
        step()
        callback.on_step_end()
    callback.on_train_end()
else:
    with capture() as recording:
        for _ in range(3):
            step()
            recording.step()
    assert "paro_advise.runtime.capture.recorder" not in sys.modules
before = torch.autograd.backward
assert before.__module__ == "torch.autograd", before  # nothing of ours is left behind
"""


def run(how, folder):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how, str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", ["context", "callback"])
def test_steps_are_logged_where_the_script_says_they_end(how, tmp_path):
    run(how, tmp_path / "c")
    assert (tmp_path / "c/rank0.json.gz").stat().st_size > 100
    header, *rows = map(json.loads, (tmp_path / "c/steps.rank0.jsonl").read_text().splitlines())
    assert header["inputs"] == [[[2, 4], "torch.float32"]]
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["micro_batches"] for row in rows} == {3}
    assert [row["profiled"] for row in rows] == [False] * 3 + [True] * 4 + [False]
    # d/dw of mean((w x + b)^2) with x = 1: 2 (w.1 + b) for each weight and the bias.
    loss = rows[0]["loss"]
    assert rows[0]["gradient_norm_squared"] == pytest.approx(5 * 4 * loss, rel=1e-5)
    assert rows[1]["loss"] < loss


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("closure", marks=pytest.mark.variant),
        "closure that clips",
        pytest.param("context with states", marks=pytest.mark.variant),
        pytest.param("context with a pass on the meta device", marks=pytest.mark.variant),
    ],
)
def test_gradients_are_recorded_whole_and_of_training_only(how, tmp_path):
    for folder in (how, "context"):
        run(folder, tmp_path / folder)
    recorded, expected = (
        [
            (row["gradient_norm_squared"], row["loss"], row["micro_batches"])
            for row in map(json.loads, path.read_text().splitlines()[1:])
        ]
        for path in (tmp_path / how / "steps.rank0.jsonl", tmp_path / "context/steps.rank0.jsonl")
    )
    assert len(recorded) == 8
    assert np.array(recorded) == pytest.approx(np.array(expected), rel=1e-6)


def test_an_unset_capture_does_nothing(tmp_path):
    run("off", tmp_path)
    assert list(tmp_path.iterdir()) == []


TRAINING = """
import os, signal, subprocess, sys, time
import torch

steps, what = int(sys.argv[1]), sys.argv[2]
def save(*_):
    print("saved", flush=True)
    sys.exit(0)
if what == "terminated":
    signal.signal(signal.SIGTERM, save)
if what == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(steps):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if what == "starts another" and step == 3:
        subprocess.run([sys.executable, __file__, "2", "alone"], check=True)
    if what in ("terminated", "ignores") and step == 6:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def captured(tmp_path, *arguments):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, "-m", "paro_advise", "capture", "-o", str(tmp_path / "c"), "--steps", "5:9"]
    job = [sys.executable, str(script), *arguments]
    return subprocess.run([*command, "--", *job], capture_output=True, text=True, timeout=120, check=False)


def test_a_script_that_saves_when_it_is_told_to_end_still_does(tmp_path):
    done = captured(tmp_path, "20", "terminated")
    assert "saved" in done.stdout
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "c/rank0.json.gz").stat().st_size > 100


def test_a_script_that_does_not_end_when_it_is_told_to_goes_on(tmp_path):
    done = captured(tmp_path, "20", "ignores")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "c/steps.rank0.jsonl").read_text().splitlines()[-1])["step"] == 19


def test_a_script_may_choose_the_steps_and_leave_the_folder_to_the_environment(monkeypatch, tmp_path):
    from paro_advise.runtime.capture.request import CaptureRequest

    assert CaptureRequest.chosen(None, "20:23") is None
    monkeypatch.setenv("PARO_CAPTURE", str(tmp_path))
    found = CaptureRequest.chosen(None, "20:23")
    assert (found.first, found.last, found.folder) == (20, 23, tmp_path)
    assert CaptureRequest.chosen(None, None).first == 10  # as documented
    monkeypatch.setenv("PARO_CAPTURE_STEPS", "4:6")  # who starts the job has the last word
    assert CaptureRequest.chosen(None, "20:23").first == 4


def test_what_a_recorded_process_starts_is_another_run(tmp_path):
    done = captured(tmp_path, "12", "starts another")
    assert done.returncode == 0, done.stderr
    _, *rows = map(json.loads, (tmp_path / "c/steps.rank0.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows] == list(range(12))
    assert json.loads((tmp_path / "c/run.json").read_text())["command"].endswith("'starts another'")


@pytest.mark.parametrize("who", ["all", pytest.param("one", marks=pytest.mark.variant)])
def test_the_script_profiles_itself(who, tmp_path):
    """Its own traces of steps 3 and 4 are whole; ours, asked for in steps 4 and 5, are of the same later steps."""
    job = torchrun(ROOT / "tests/workers/own_profiler.py", tmp_path, who, ranks=2)
    done = paro("capture", "-o", tmp_path / "before", "--steps", "4:6", job=job)
    assert done.returncode == 0, done.stderr
    assert "own profiler" in done.stderr
    for rank in range(2):
        text = gzip.decompress((tmp_path / f"before/rank{rank}.json.gz").read_bytes())
        assert recorded_steps(text) == {7, 8}
        own = tmp_path / f"own{rank}.json"
        assert own.exists() == (who == "all" or rank == 0)
        if own.exists():
            assert recorded_steps(own.read_bytes()) == {3, 4}
            assert own.read_text().count('"DistributedDataParallel.forward"') == 2
    assert json.loads((tmp_path / "before/run.json").read_text())["steps"] == [7, 9]


def recorded_steps(trace):
    names = {event.get("name", "") for event in json.loads(trace)["traceEvents"]}
    return {int(name.removeprefix("ProfilerStep#")) for name in names if name.startswith("ProfilerStep#")}
