"""Stages of a pipeline: what they send each other shares one group's numbers, and most of it is waiting."""

from __future__ import annotations

from helpers import analyze, write_run
from trace_builder import TraceBuilder

STAGES, MICRO_BATCHES, STEPS = 4, 4, 3
FORWARD_US, SEND_US, STEP_US = 1000.0, 20.0, 7_300.0
KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PIPELINE = ("20", "PIPELINE_MODEL_PARALLEL_GROUP", list(range(STAGES)))


def stage(rank):
    """Forward passes of one stage: each receives what the one before computed, from when it asked for it.

    Stage s can begin micro-batch m when stage s - 1 has computed and sent it.
    """
    trace = TraceBuilder(rank, STAGES)
    trace.groups = [*trace.groups, PIPELINE]
    for step in range(STEPS):
        base = step * STEP_US
        trace.step(step, base, STEP_US)
        trace.backward(base + STEP_US - 600, 100, sequence=step + 1)
        free, seq = base, 0
        for micro in range(MICRO_BATCHES):
            begins = base + (rank + micro) * (FORWARD_US + SEND_US)
            if rank:
                # Asked for as soon as this stage is free; there 20 us after the stage before sent it.
                trace.collective(
                    "Recv", free, begins - free, nelems=1 << 19, issue=free, seq=seq, group="20", kernel=KERNEL
                )
                seq += 1
            trace.compute(begins, FORWARD_US)
            free = begins + FORWARD_US
            if micro == MICRO_BATCHES - 1:
                trace.compute(free + SEND_US, base + STEP_US - free - SEND_US)  # what else a step does
            if rank < STAGES - 1:
                trace.collective("Send", free, SEND_US, nelems=1 << 19, issue=free, seq=seq, group="20", kernel=KERNEL)
                seq += 1
    return trace


def test_what_stages_of_a_pipeline_wait_for_is_no_bandwidth(tmp_path):
    """Stage s waits for s passes before its first micro-batch; which end a transfer waits for nothing in a trace tells."""
    analysis = analyze(write_run(tmp_path / "run", [stage(rank) for rank in range(STAGES)]))
    other = analysis.states["other"]
    assert (other.regime, other.transfer_us, other.wait_us) == ("unknown", None, None)
    assert "whose waiting for each other cannot be told from transfer" in other.text
    assert not [link for link in analysis.links if link.op in ("send", "recv")]
    assert "bound by the pipeline, by its bubble, a slower stage or the links" in analysis.verdict.text
    assert analysis.critical_path is None
