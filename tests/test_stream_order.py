"""Communication on streams, as on GPUs: proved on CPUs, where a simulated device judges the order of every operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).parent / "workers" / "stream_order.py"


@pytest.mark.parametrize(
    "strategies",
    ["NNN,NNI,NNG,NII,NIG,NGG,INI", pytest.param("ING,III,IIG,IGG,GNG,GIG,GGG", marks=pytest.mark.variant)],
)
def test_streams_are_in_order_and_the_host_never_waits(strategies):
    """Equal to one process; nothing is read too early, written or given away too soon; no step asks for a number."""
    done = run_ranks(WORKER, strategies)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("held")] == strategies.split(",")


def test_an_executor_that_leaves_an_order_out_is_found():
    """Without waiting for a job, without waiting for what a job reads, without waiting before memory is let go."""
    done = run_ranks(WORKER, "broken")
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    for name in ("drain", "submit", "release"):
        assert f"without {name} found" in done.stdout
