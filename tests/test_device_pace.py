"""How long a step takes where hosts run ahead of their devices: the devices' own time, or unknown."""

from __future__ import annotations

import itertools
import json

import pytest

from paro_advise.advisor.facts.capture_log import captured_of
from paro_advise.advisor.watching.job import job_steps
from paro_advise.trace_parsers.logs.step_log import LoggedSteps, StepRow

# Of the ranks' hosts in milliseconds, as logged on an H100 that four ranks shared: only the first waits for its loss.
HOSTS_MS = [(99.7, 807.0), (101.9, 68.6), (62.8, 61.2), (52.9, 52.1)]
WARM = 10  # steps before those count neither for a capture nor for an alarm


def log_of(rank, world, host_ms, *, device_ms=None, device_name="NVIDIA H100 80GB HBM3"):
    rows = tuple(
        StepRow(
            step=WARM + number, step_us=1e3 * host_ms[number], overhead_us=1.0, cpu_us=None, profiled=False, micro_batches=2,
            loss=1.0, gradient_norm_squared=1.0, peak_memory_bytes=1, device_us=1e3 * device_ms[number] if device_ms else None,
        )
        for number in range(len(host_ms))
    )  # fmt: skip
    return LoggedSteps(
        rank=rank, world_size=world, local_world_size=1, backend="nccl", host="vm", machine=None, cores=None,
        device_name=device_name, device_memory_bytes=None, torch_version=None, traced=None, inputs=(), autocast=None,
        rows=rows, num_broken=0,
    )  # fmt: skip


def test_a_devices_own_time_counts_and_not_its_hosts():
    logs = [log_of(rank, 4, host, device_ms=(800.0, 820.0)) for rank, host in enumerate(HOSTS_MS)]
    captured = captured_of(logs)
    assert captured.median_step_us == pytest.approx(810e3)
    assert not captured.hosts_ran_ahead


def test_hosts_of_different_paces_time_nothing():
    captured = captured_of([log_of(rank, 4, host) for rank, host in enumerate(HOSTS_MS)])
    assert captured.hosts_ran_ahead
    assert captured.median_step_us is None
    assert captured.profiler_slowdown is None
    assert not any(step.timed for step in captured.steps)


def test_alarms_are_of_a_devices_pace():
    logs = [log_of(rank, 4, host, device_ms=(800.0, 820.0)) for rank, host in enumerate(HOSTS_MS)]
    assert job_steps(logs) == [(WARM, pytest.approx(800e3)), (WARM + 1, pytest.approx(820e3))]
    hosts = [log_of(rank, 4, host) for rank, host in enumerate(HOSTS_MS)]  # the capture took 1 us of each
    assert job_steps(hosts)[0] == (WARM, pytest.approx(1e3 * sum(host[0] for host in HOSTS_MS) / 4 - 1))


@pytest.mark.parametrize("device_name", ["NVIDIA H100 80GB HBM3", None])
def test_hosts_that_wait_time_steps(device_name):
    """On a CPU there is nothing to run ahead of, whatever ranks differ by."""
    paces = [(100.0, 120.0), (105.0, 118.0)] if device_name else HOSTS_MS[:2]
    captured = captured_of([log_of(rank, 2, host, device_name=device_name) for rank, host in enumerate(paces)])
    assert not captured.hosts_ran_ahead
    assert captured.median_step_us is not None


def test_a_capture_logs_when_the_device_came_to_the_ends_of_steps(tmp_path, monkeypatch):
    """Events tell; here they stand for a device that takes 250 ms a step however fast its host is."""
    pytest.importorskip("torch")
    from paro_advise.runtime.capture import recorder as recording
    from paro_advise.runtime.capture.request import CaptureRequest

    waited = []

    class Mark:
        numbers = itertools.count()

        def __init__(self):
            self.number = next(self.numbers)

        def synchronize(self):
            waited.append(self.number)

        def elapsed_time(self, end):
            assert end.number in waited  # torch raises for an event that the device has not reached
            return 250.0 * (end.number - self.number)

    monkeypatch.setattr(recording, "mark_on_device", Mark)
    one = recording.Recorder(CaptureRequest(folder=tmp_path, first=90, last=92))
    for _ in range(4):
        one.step()
    one.close()
    rows = [json.loads(line) for line in (tmp_path / "steps.rank0.jsonl").read_text().splitlines()[1:]]
    assert [row["device_us"] for row in rows] == [None, 250e3, 250e3, 250e3]
    assert rows[1]["step_us"] < 250e3
