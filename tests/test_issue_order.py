"""On NCCL ranks that issue the collectives of a communicator in different orders wait for each other for ever."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from loop import torchrun

from paro_advise.policies.strategy import KEPT

WORKER = Path(__file__).parent / "workers" / "issue_order.py"


@pytest.mark.parametrize("passes", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_all_ranks_issue_the_collectives_of_a_communicator_in_one_order(passes):
    """Eight ranks in groups of two, hosts late at random, all strategies with the backend's own collectives.

    In processes of their own: forked ones hash alike, and an order of a set would be the same on all.
    """
    done = subprocess.run(
        torchrun(WORKER, passes, ranks=8),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert set(counted) == {str(strategy) for strategy in KEPT}
    assert all(int(count) > 0 for count in counted.values())
    assert "a change is seen by 8 ranks" in done.stdout
