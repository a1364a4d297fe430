"""A rank that dies, hangs or disagrees gives a clear error on every other rank, in time.

The ranks wait for each other to start, and the test for the ranks to end: no clock decides. Only
a rank that hangs is told by a timeout. Of one that dies the others must hear at once: gloo's
timeout of 30 minutes lies far above the last resort here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from paro_advise.runtime.lab.ports import reserved_port

pytestmark = pytest.mark.distributed

WORKER = ROOT / "tests/workers/sharding_faults.py"
RANKS, VICTIM = 4, 2  # as in the worker
LAST_RESORT_S = 1200
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


@pytest.fixture
def port():
    pytest.importorskip("torch")
    with reserved_port() as held:
        yield held


def start(port, folder, point, *folders, ranks=RANKS):
    """Start the ranks without torchrun, which would end the survivors itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, str(WORKER), point, *map(str, folders)]
            processes.append(subprocess.Popen(command, env=environment | own, stdout=log, stderr=log))
    return processes


def finish(processes, waited_for):
    """Return the exit codes of some of the ranks, None for one that never ends; end all others."""
    deadline = time.monotonic() + LAST_RESORT_S
    codes = []
    for process in waited_for:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for process in processes:
        process.kill()
        process.wait()
    return codes


@pytest.mark.parametrize("point", POINTS)
def test_survivors_end_with_a_clear_error(point, port, tmp_path):
    folder = tmp_path
    processes = start(port, folder, point, folder)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM or point == "diverge"]
    codes = finish(processes, [processes[rank] for rank in survivors])
    if point != "diverge":
        assert processes[VICTIM].returncode == -signal.SIGKILL
    for rank, code in zip(survivors, codes, strict=True):
        log = (folder / f"rank{rank}.log").read_text()
        assert "saved" in log, (rank, code, log[-2000:])
        assert "went on" not in log
        assert code == 1, (rank, code, log[-2000:])
        assert f"paro_advise.errors.{POINTS[point]}: " in log, (rank, log[-2000:])


def test_the_last_complete_checkpoint_loads_after_a_save_that_broke_off(port, tmp_path):
    processes = start(port, tmp_path, "save", tmp_path)
    assert finish(processes, processes)[VICTIM] == -signal.SIGKILL
    assert not (tmp_path / "lost/.metadata").exists()
    processes = start(port, tmp_path, "load", tmp_path, ranks=1)
    codes = finish(processes, processes)
    log = (tmp_path / "rank0.log").read_text()
    assert codes == [0], log[-2000:]
    assert "loaded" in log
