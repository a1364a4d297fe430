"""A rank that dies, hangs or disagrees gives a clear error on every other rank, in time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import ROOT

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests/workers/sharding_faults.py"
RANKS, VICTIM, TIMEOUT_S = 4, 2, 10  # as in the worker
POINTS = {
    "forward": "CommunicationError",
    "backward": "CommunicationError",
    "boundary": "CommunicationError",
    "step": "CommunicationError",
    "save": "CommunicationError",
    "switch": "SwitchError",
    "hang": "CommunicationError",
    "diverge": "DivergedError",
}


def start(folder, point, *folders, ranks=RANKS):
    """Start the ranks without torchrun, which would end the survivors itself."""
    pytest.importorskip("torch")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, str(WORKER), point, *map(str, folders)]
            processes.append(subprocess.Popen(command, env=environment | own, stdout=log, stderr=log))
    return processes


def finish(processes, deadline_s):
    """Return the exit codes; None for those that still run at the deadline."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    return codes


@pytest.mark.parametrize("point", POINTS)
def test_survivors_end_with_a_clear_error(point, tmp_path):
    folder = tmp_path
    processes = start(folder, point, folder)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM or point == "diverge"]
    others = [processes[rank] for rank in survivors]
    # Start-up takes some seconds of its own on a busy machine; a hang would take gloo's 30 minutes.
    codes = finish(others, 60 + TIMEOUT_S)
    victim = processes[VICTIM]
    if point == "hang":
        victim.kill()
    if point != "diverge":
        assert victim.wait() == -signal.SIGKILL
    for rank, code in zip(survivors, codes, strict=True):
        log = (folder / f"rank{rank}.log").read_text()
        assert "saved" in log
        assert "went on" not in log
        assert code == 1, (rank, code, log[-2000:])
        assert f"paro_advise.errors.{POINTS[point]}: " in log, (rank, log[-2000:])


def test_the_last_complete_checkpoint_loads_after_a_save_that_broke_off(tmp_path):
    finish(start(tmp_path, "save", tmp_path), 60 + TIMEOUT_S)
    assert not (tmp_path / "lost/.metadata").exists()
    codes = finish(start(tmp_path, "load", tmp_path, ranks=1), 120)
    log = (tmp_path / "rank0.log").read_text()
    assert codes == [0], log[-2000:]
    assert "loaded" in log
