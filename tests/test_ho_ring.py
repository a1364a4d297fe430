"""HO-Ring against torch's own collectives, on real gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import ROOT
from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring.grid import Grid

WORKER = ROOT / "tests/workers/ho_ring_worker.py"


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "per_node"), [(4, "1,2,4"), (6, "2,3")])
def test_collectives_equal_torch_on_every_grid(ranks, per_node):
    """n x m = 4x1, 2x2, 1x4, 3x2 and 2x3; all types, odd sizes, SUM, AVG, MAX, one to many chunks."""
    pytest.importorskip("torch")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(WORKER),
        per_node,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_grid_is_node_major():
    grid = Grid.of(8, 5, 2)
    assert (grid.num_nodes, grid.node, grid.local) == (4, 2, 1)
    assert grid.at(2, 1) == 5
    assert grid.at(4, 0) == 0  # nodes count round the ring
    assert Grid.of(8, 5, 4).peers == (2, 3, 0)


@pytest.mark.parametrize(("size", "index", "per_node"), [(8, 0, 3), (8, 8, 2), (8, 0, 0)])
def test_impossible_grids_are_refused(size, index, per_node):
    with pytest.raises(UsageError):
        Grid.of(size, index, per_node)
