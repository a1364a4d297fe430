"""Which ranks share a clock: those of one machine, whatever machines are called."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

STEP_US, TRANSFER_US, WAIT_US = 12_000.0, 2000.0, 1500.0
ELEMENTS = 50_000_000


def run_of(folder, *, host, clock_us=0.0, late_us=WAIT_US, drift_us=0.0):
    """Rank 1 computes for longer, so that rank 0 waits; rank 1's clock is ahead."""
    ranks = []
    for rank in range(2):
        trace = TraceBuilder(rank, 2, host=host.format(rank), clock_offset_us=clock_us * rank, gpus_per_node=1)
        for number in range(5):
            now = number * (STEP_US + drift_us * rank)
            trace.step(number + 3, now, STEP_US)
            trace.annotation("DistributedDataParallel.forward", now + 1, 30)
            trace.backward(now + 100, 200, sequence=100 * number)
            trace.compute(now + 50, 7900 + late_us * rank)
            begin = now + 7950 + late_us * rank
            trace.collective(
                "AllReduce", begin, TRANSFER_US + late_us * (1 - rank), nelems=ELEMENTS, issue=now + 150, seq=number, tid=2
            )  # fmt: skip
        ranks.append(trace)
    return write_run(folder, ranks)


@pytest.mark.parametrize("clock_us", [0.0, 700.0, -700.0, 3.1e6])
@pytest.mark.parametrize(
    ("host", "gpus_per_node"), [("node{}", None), ("node", 1), ("node", None), ("", None)], ids=str
)
def test_waiting_and_transferring_are_parted_on_any_clock(clock_us, host, gpus_per_node, tmp_path):
    """Machines of one name have clocks of their own: where the user says so, and where collectives end apart."""
    folder = run_of(tmp_path, host=host, clock_us=clock_us)
    analysis = analyze(folder, gpus_per_node=gpus_per_node)
    gradient = analysis.states["gradient"]
    assert gradient.transfer_us == pytest.approx(TRANSFER_US, rel=0.01)
    assert gradient.wait_us == pytest.approx(WAIT_US / 2, rel=0.01)
    assert [straggler.rank for straggler in analysis.stragglers] == [1]
    assert analysis.stragglers[0].lateness_us == pytest.approx(WAIT_US, rel=0.01)
    told = "Q339" in {note.code for note in analysis.data_quality}
    assert told == (host == "node" and gpus_per_node is None and clock_us != 0.0)


def test_ends_that_are_apart_now_and_then_leave_the_clock_of_a_host(tmp_path):
    """A clock is off by the same all along; by 400 us more from step to step, it is not."""
    analysis = analyze(run_of(tmp_path, host="node", late_us=0.0, drift_us=400.0))
    assert "Q339" not in {note.code for note in analysis.data_quality}
    assert analysis.run.gpus_per_node == 2


DRIFTING_STEP_US = 100_000.0


def drifting_run(folder, drift_ppm, drifting):
    """Write a run of four hosts over 3 s, of which some have clocks that drift."""
    ranks = [
        TraceBuilder(rank, 4, host=f"node{rank}", clock_offset_us=5e5 * rank, gpus_per_node=1) for rank in range(4)
    ]
    for rank, trace in enumerate(ranks):
        rate = 1 + 1e-6 * drift_ppm * (rank in drifting)
        for number in range(30):
            base = number * DRIFTING_STEP_US
            trace.step(number, base * rate, DRIFTING_STEP_US * rate)
            for place in range(4):
                begin = base + 10_000.0 * (place + 1) + 7.0 * ((rank + place) % 4)  # each is the last in its turn
                end = base + 10_000.0 * (place + 1) + 21.0 + 50.0
                trace.compute((begin - 5_000.0) * rate, 5_000.0)
                trace.collective(
                    "AllReduce", begin * rate, (end - begin) * rate, nelems=4_000, issue=(base + place) * rate,
                    seq=4 * number + place, owners=("DistributedDataParallel.backward",),
                )  # fmt: skip
    return write_run(folder, ranks)


@pytest.mark.parametrize("drifting", [(3,), (0,), (1, 3)], ids=str)
@pytest.mark.parametrize("drift_ppm", [20.0, -60.0])
def test_clocks_that_drift_part_no_collectives(drift_ppm, drifting, tmp_path):
    """At 20 us a second ends of collectives come to lie 60 us apart over 3 s, more than the transfers take."""
    analysis = analyze(drifting_run(tmp_path, drift_ppm, drifting))
    assert sum(entry.transfer_us for entry in analysis.states.values()) == pytest.approx(4 * 50.0, abs=4 * 0.5)
    assert sum(entry.wait_us for entry in analysis.states.values()) == pytest.approx(4 * 7.0 * 1.5, abs=4 * 0.5)
    assert analysis.clock_error_us < 1.0
    (told,) = [note.message for note in analysis.data_quality if note.code == "Q340"]
    assert f"by up to {abs(drift_ppm):g} us a second" in told


def test_what_rounds_times_is_no_drift(tmp_path):
    """Of 0.1 us a second 0.3 us add up, less than the times of events are good for."""
    analysis = analyze(drifting_run(tmp_path, 0.1, (3,)))
    assert "Q340" not in {note.code for note in analysis.data_quality}


def test_clocks_that_keep_their_distance_are_not_said_to_drift(tmp_path):
    analysis = analyze(run_of(tmp_path, host="node{}", clock_us=700.0))
    assert "Q340" not in {note.code for note in analysis.data_quality}
