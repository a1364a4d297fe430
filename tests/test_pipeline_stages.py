"""Stages of a pipeline: what they send each other shares one group's numbers, and most of it is waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, facts_of, write_run
from trace_builder import TraceBuilder

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options

STAGES, MICRO_BATCHES, STEPS = 4, 4, 3
FORWARD_US, SEND_US, STEP_US = 1000.0, 20.0, 7_300.0
KERNEL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
PIPELINE = ("20", "PIPELINE_MODEL_PARALLEL_GROUP", list(range(STAGES)))


def stage(rank, *, group=PIPELINE, tells_peers=False):
    """Forward passes of one stage: each receives what the one before computed, from when it asked for it.

    Stage s can begin micro-batch m when stage s - 1 has computed and sent it.
    """
    trace = TraceBuilder(rank, STAGES)
    trace.groups = [*trace.groups, group]
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
                    "Recv", free, begins - free, nelems=1 << 19, issue=free, seq=seq, group="20", kernel=KERNEL,
                    peer=rank - 1 if tells_peers else None,
                )  # fmt: skip
                seq += 1
            trace.compute(begins, FORWARD_US)
            free = begins + FORWARD_US
            if micro == MICRO_BATCHES - 1:
                trace.compute(free + SEND_US, base + STEP_US - free - SEND_US)  # what else a step does
            if rank < STAGES - 1:
                trace.collective(
                    "Send", free, SEND_US, nelems=1 << 19, issue=free, seq=seq, group="20", kernel=KERNEL,
                    peer=rank + 1 if tells_peers else None,
                )  # fmt: skip
                seq += 1
    return trace


def test_what_stages_of_a_pipeline_wait_for_is_no_bandwidth(tmp_path):
    """Stage s waits for s passes before its first micro-batch; older torch records no ranks of a transfer."""
    analysis = analyze(write_run(tmp_path / "run", [stage(rank) for rank in range(STAGES)]))
    other = analysis.states["other"]
    assert (other.regime, other.transfer_us, other.wait_us) == ("unknown", None, None)
    assert "whose waiting for each other cannot be told from transfer" in other.text
    assert not [link for link in analysis.links if link.op in ("send", "recv")]
    assert "bound by the pipeline, by its bubble, a slower stage or the links" in analysis.verdict.text
    assert analysis.critical_path is None


def test_the_ranks_that_torch_records_tell_waiting_from_transfer(tmp_path):
    """Stage s waits for s passes, less the 20 us of the transfer; what it sends and receives at once counts once."""
    analysis = analyze(write_run(tmp_path / "run", [stage(rank, tells_peers=True) for rank in range(STAGES)]))
    other = analysis.states["other"]
    waits = [max(0.0, rank * (FORWARD_US + SEND_US) - SEND_US) for rank in range(STAGES)]
    assert other.wait_us == pytest.approx(sum(waits) / STAGES, rel=0.01)
    # Four sends; a first receive and four sends; the same; four receives.
    assert other.transfer_us == pytest.approx((4 + 5 + 5 + 4) * SEND_US / STAGES, rel=0.01)
    assert "bound by the pipeline's bubble, a slower stage or a slow link" in analysis.verdict.text


@pytest.mark.parametrize(
    ("slow", "named"),
    [({3}, "slowest stage of the pipeline (rank 3 computes 6.8 ms, most others 4 ms)"), ({2, 3}, "a slower stage or")],
    ids=["one of four", "half of all"],
)
def test_a_stage_whose_passes_compute_longer_than_the_others_is_named(slow, named, tmp_path):
    folder = write_run(tmp_path / "run", [stage(rank, tells_peers=True) for rank in range(STAGES)])
    facts = []
    for rank in range(STAGES):
        found = facts_of(folder / f"rank{rank}.json")
        us = 4000.0 * (1.7 if rank in slow else 1.0)
        steps = tuple(replace(step, forward_us=us / 4, backward_us=3 * us / 4) for step in found.steps)
        facts.append(replace(found, steps=steps))
    assert named in build_analysis(facts, (), Options()).verdict.text


@pytest.mark.parametrize(
    ("description", "headline"),
    [
        ("mesh_cp", "ranks of context parallelism send each other"),
        ("", "ranks send each other, as stages of a pipeline do"),
    ],
)
def test_not_all_that_ranks_send_each_other_is_of_a_pipeline(description, headline, tmp_path):
    """Ring attention sends keys and values around."""
    group = ("20", description, list(range(STAGES)))
    analysis = analyze(write_run(tmp_path / "run", [stage(rank, group=group) for rank in range(STAGES)]))
    assert headline in analysis.verdict.text
    assert "pipeline" not in analysis.states["other"].text + " ".join(item.text for item in analysis.findings)


# Start and end (us) of what two stages of one forward and one backward in turn send: activations, then gradients.
FIRST = (("Send", 3000, 3300), ("Send", 6300, 10200), ("Recv", 6600, 9600), ("Recv", 10500, 16500))
SECOND = (("Recv", 300, 3300), ("Send", 9300, 9600), ("Recv", 9900, 10200), ("Send", 16200, 16500))
NODE = 2  # ranks of each stage, on a node of its own


def two_stages(*, clock_us=0.0, tells_calls=True):
    """Two nodes of one stage each, whose ranks reduce among themselves; nothing but transfers joins the nodes."""
    traces = []
    for rank in range(2 * NODE):
        place, column = divmod(rank, NODE)
        trace = TraceBuilder(
            rank, 2 * NODE, host=f"node{place}", clock_offset_us=clock_us * place, gpus_per_node=NODE,
            groups=[
                ("0", "default_pg", list(range(2 * NODE))),
                ("20", "PIPELINE_MODEL_PARALLEL_GROUP", [column, NODE + column]),
                ("30", "DATA_PARALLEL_GROUP", [place * NODE, place * NODE + 1]),
            ],
        )  # fmt: skip
        for step in range(STEPS):
            base = step * 24_000.0
            trace.step(step, base, 24_000)
            trace.compute(base, 3000)
            trace.backward(base + 16_800, 600, sequence=step + 1)
            for number, (kind, begin, end) in enumerate(SECOND if place else FIRST):
                if tells_calls:
                    trace.collective(
                        kind, base + begin, end - begin, nelems=1 << 20, issue=base + begin - 3, seq=step, group="20",
                        kernel=KERNEL, stream=20 + number,
                    )  # fmt: skip
                else:
                    trace.compute(base + begin, end - begin, KERNEL, stream=20 + number)
            trace.collective(
                "AllReduce", base + 17_400, 1200, nelems=1 << 22, issue=base + 17_100, seq=step, group="30", tid=2
            )  # fmt: skip
        traces.append(trace)
    return traces


@pytest.mark.parametrize("clock_us", [0.0, 2.7e3, -4e5])
def test_each_send_meets_its_receive(clock_us, tmp_path):
    """The second kernel of the one stage is not the partner of the second of the other; transfers join clocks, too.

    Each transfer takes the 300 us from the later end's start. By hand: of 10,200 us in which stage 0 sends or receives
    it waits 9000, stage 1 waits 2700 of 3900.
    """
    analysis = analyze(write_run(tmp_path / "run", two_stages(clock_us=clock_us)))
    other = analysis.states["other"]
    assert (other.transfer_us, other.wait_us) == (pytest.approx(1200, rel=0.01), pytest.approx(5850, rel=0.01))
    offsets = [analysis.clock_offsets_us[str(rank)] for rank in range(2 * NODE)]
    assert offsets == pytest.approx([0.0, 0.0, clock_us, clock_us], abs=1.0)


def test_transfers_of_no_recorded_call_are_no_collective_of_all_ranks(tmp_path):
    """Kernels of several transfers at once say neither how much nor between whom."""
    analysis = analyze(write_run(tmp_path / "run", two_stages(tells_calls=False)))
    other = analysis.states["other"]
    assert (other.regime, other.transfer_us, other.wait_us) == ("unknown", None, None)


def test_transfers_of_steps_without_marks_stay_alone(tmp_path):
    """The first step of a recording on demand is another one on each stage."""
    traces = [stage(rank, tells_peers=True) for rank in range(STAGES)]
    for trace in traces:
        for event in trace.events:
            if event["name"].startswith("ProfilerStep"):
                event["name"] = "Optimizer.step#AdamW.step"
                event["ts"], event["dur"] = event["ts"] + event["dur"] - 20, 10
    other = analyze(write_run(tmp_path / "run", traces)).states["other"]
    assert (other.transfer_us, other.wait_us) == (None, None)


def test_a_slow_link_between_two_stages_is_named(tmp_path):
    """Of eight pairs that send 2 MB one takes ten times as long as the others, on nodes of their own."""
    traces, pairs, slow = [], [(stage, column) for stage in range(2) for column in range(4)], 3
    for place, column in pairs:
        rank = 4 * place + column
        trace = TraceBuilder(rank, 8, host=f"node{rank}", gpus_per_node=1)
        trace.groups = [*trace.groups, ("20", "PIPELINE_MODEL_PARALLEL_GROUP", [column, 4 + column])]
        for step in range(STEPS):
            base, took = step * 8000.0, 2000.0 if column == slow else 200.0
            trace.step(step, base, 8000)
            trace.compute(base, 1000)
            trace.collective(
                "Recv" if place else "Send", base + 1000, took, nelems=1 << 20, issue=base + 900, seq=step, group="20",
                kernel=KERNEL,
            )  # fmt: skip
            trace.backward(base + 4000, 100, sequence=step + 1)
        traces.append(trace)
    (found,) = analyze(write_run(tmp_path / "run", traces)).slow_groups
    assert (found.ranks, found.factor) == ((slow, 4 + slow), pytest.approx(10.0))
