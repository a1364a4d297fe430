"""What is read from a run that NCCL's own kernels made, against what its script does (tests/data/README.md)."""

from __future__ import annotations

import gzip
import json

import pytest
from conftest import ROOT

from paro_advise.advisor.api import analyze

RUN = ROOT / "tests/data/nccl_run"
# benchmarks/gpu_scripts.py: an embedding and a head, and three blocks, each of a norm and three layers; fp32
ROOT_UNIT = 512 * 128 + 128 * 512 + 512
BLOCK = 2 * 128 + (64 * 64 + 64) + (128 * 512 + 512) + (512 * 128 + 128)
MICRO_BATCHES, FP32_BYTES, STEPS, RANKS = 2, 4, 3, 4


@pytest.fixture(scope="module")
def analysis(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARO_ADVISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return analyze(RUN).analysis


def test_the_run_is_told_as_its_script_says(analysis):
    run = analysis.run
    assert (run.framework, run.strategy.triple, run.micro_batches) == ("FSDP2", "GGG", MICRO_BATCHES)
    assert run.parameter_count == ROOT_UNIT + 3 * BLOCK
    assert run.world_size == RANKS


def test_each_state_moves_what_the_script_moves(analysis):
    """A forward pass gathers all units and a backward pass the blocks, of which each micro-batch reduces all."""
    parameter, gradient = analysis.states["parameter"], analysis.states["gradient"]
    assert (parameter.count, gradient.count) == (MICRO_BATCHES * (4 + 3), MICRO_BATCHES * 4)
    assert parameter.bytes == MICRO_BATCHES * FP32_BYTES * (ROOT_UNIT + 3 * BLOCK + 3 * BLOCK)
    assert gradient.bytes == MICRO_BATCHES * FP32_BYTES * (ROOT_UNIT + 3 * BLOCK)
    assert analysis.states["unknown"].count == 0


def test_steps_are_the_devices_where_hosts_run_ahead(analysis):
    """A step of a host that never waits takes 0.1 s; on the GPU, three take from the first loss to the last kernel."""
    spans = []
    for rank in range(RANKS):
        events = json.loads(gzip.decompress((RUN / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        marked = [event for event in kernels if "Process Group Name" in event["args"]]  # launched in recorded steps
        spans.append(max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in marked))
    mean_us = sum(analysis.step_time_us.values) / STEPS
    assert mean_us == pytest.approx(sum(spans) / RANKS / STEPS, rel=0.01)
