"""A rank that dies, hangs or disagrees gives a clear error on every other rank, in time.

The ranks wait for each other to start, and the test for the ranks to end: no clock decides. Only
a rank that hangs is told by a timeout. Of one that dies the others must hear at once: gloo's
timeout of 30 minutes lies far above the last resort here.
"""

from __future__ import annotations

import signal

import pytest
from conftest import ROOT
from ranks import codes_of_ranks

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


def codes_at(point, folder, *, ranks=RANKS, survivors=None):
    return codes_of_ranks(WORKER, point, folder, ranks=ranks, timeout_s=LAST_RESORT_S, survivors=survivors)[0]


@pytest.mark.parametrize("point", POINTS)
def test_survivors_end_with_a_clear_error(point, tmp_path):
    survivors = [rank for rank in range(RANKS) if rank != VICTIM or point == "diverge"]
    codes = codes_at(point, tmp_path, survivors=survivors)
    if point != "diverge":
        assert codes[VICTIM] == -signal.SIGKILL
    for rank in survivors:
        code = codes[rank]
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert "saved" in log, (rank, code, log[-2000:])
        assert "went on" not in log
        assert code == 1, (rank, code, log[-2000:])
        assert f"paro_advise.errors.{POINTS[point]}: " in log, (rank, log[-2000:])


def test_the_last_complete_checkpoint_loads_after_a_save_that_broke_off(tmp_path):
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    codes = codes_at("save", tmp_path, survivors=survivors)
    assert codes[VICTIM] == -signal.SIGKILL
    assert not (tmp_path / "lost/.metadata").exists()
    codes = codes_at("load", tmp_path, ranks=1)
    log = (tmp_path / "rank0.log").read_text()
    assert codes == [0], log[-2000:]
    assert "loaded" in log
