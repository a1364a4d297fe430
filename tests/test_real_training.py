"""The whole way on a run that this machine makes: torchrun, FSDP2, torch.profiler, analyze."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from paro_advise.advisor.cli import run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("traces")
    small = ["--width", "64", "--layers", "2", "--vocabulary", "512", "--sequence", "16", "--micro-batches", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "examples/train.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [*command, "--traces", str(folder), *small],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def parameters():
    """The example's parameters by hand: embeddings, two blocks, final norm, untied head."""
    width, vocabulary = 64, 512
    norm = 2 * width
    block = 2 * norm + (3 * width * width + 3 * width) + (width * width + width) + (8 * width * width + 5 * width)
    return vocabulary * width + 2 * block + norm + vocabulary * width


def test_a_fresh_run_is_understood(recorded, tmp_path, capsys):
    report, data = tmp_path / "r.html", tmp_path / "r.json"
    assert run(["analyze", str(recorded), "-o", str(report), "--json", str(data)]) == 0
    analysis = json.loads(data.read_text())
    assert analysis["run"]["framework"] == "FSDP2"
    assert analysis["run"]["strategy"]["triple"] == "GGG"
    assert analysis["run"]["micro_batches"] == 2
    assert analysis["run"]["world_size"] == 2
    assert analysis["run"]["num_steps"] == 3
    assert analysis["run"]["parameter_count"] == pytest.approx(parameters(), rel=0.01)
    states = analysis["states"]
    # Two blocks and the root, gathered in forward; the blocks again in backward; two micro-batches.
    assert states["parameter"]["count"] == pytest.approx(2 * 3 + 2 * 2, abs=2)
    assert states["gradient"]["count"] == 2 * 3
    assert states["parameter"]["evidence"] == states["gradient"]["evidence"] == "annotation"
    assert states["unknown"]["count"] == 0
    parts = analysis["breakdown_us"]
    assert sum(parts.values()) == pytest.approx(sum(analysis["step_time_us"]["values"]) / 3, rel=1e-6)
