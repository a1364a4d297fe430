"""Collectives whose time on the device was lost are no idle time: their steps are left out, or nothing is concluded."""

from __future__ import annotations

import pytest
from helpers import analyze, write_run
from trace_builder import TraceBuilder

STEP_US, GATHER_US = 10_000.0, 2000.0


def ddp_rank(rank, *, steps=5, world=2):
    """8 ms of computing, then 2 ms of an all-reduce that nothing overlaps, launched in its call."""
    trace = TraceBuilder(rank, world)
    for number in range(steps):
        now = number * STEP_US
        trace.step(number + 3, now, STEP_US)
        trace.annotation("DistributedDataParallel.forward", now + 1, 30)
        trace.compute(now + 50, 2900)
        trace.backward(now + 100, 200, sequence=100 * number)
        trace.compute(now + 2950, 5000)
        trace.collective("AllReduce", now + 7950, GATHER_US, nelems=50_000_000, issue=now + 150, seq=number, tid=2)
        kernel = trace.events[-1]
        trace.row("cuda_runtime", "cudaLaunchKernelExC", now + 153, 2, 2, correlation=kernel["args"]["correlation"])
    return trace


def kernels_of(trace):
    return [event for event in trace.events if event["name"].startswith("nccl")]


def without_kernels(trace, which):
    lost = kernels_of(trace)[which]
    trace.events = [event for event in trace.events if not any(event is other for other in lost)]


def without_times(trace, which):
    for event in kernels_of(trace)[which]:
        event["dur"] = 0.0


def with_negative_times(trace, which):
    for event in kernels_of(trace)[which]:
        event["dur"] = -5.0


def with_nan(trace, which):
    for event in kernels_of(trace)[which]:
        event["dur"] = float("nan")


WAYS = [without_kernels, without_times, with_negative_times, with_nan]


@pytest.mark.parametrize("lose", WAYS)
def test_steps_that_lost_a_collective_are_left_out(lose, tmp_path):
    ranks = [ddp_rank(rank) for rank in range(2)]
    for trace in ranks:
        lose(trace, slice(2, 3))
    analysis = analyze(write_run(tmp_path, ranks))
    assert len(analysis.step_time_us.values) == 4
    assert analysis.breakdown_us.exposed_communication == pytest.approx(GATHER_US)
    (told,) = [note.message for note in analysis.data_quality if note.code == "Q126"]
    assert "1 collective has no time on the device: 1 step is left out" in told


@pytest.mark.parametrize("lose", WAYS)
def test_without_any_time_of_collectives_nothing_is_concluded(lose, tmp_path):
    """Where they are missing, devices look idle, and sharding useless."""
    ranks = [ddp_rank(rank) for rank in range(2)]
    for trace in ranks:
        lose(trace, slice(None))
    analysis = analyze(write_run(tmp_path, ranks))
    assert analysis.verdict.text.startswith("No verdict")
    assert "sharding will not help" not in analysis.verdict.text
    assert "Q108" in {note.code for note in analysis.data_quality}
    assert not any(finding.status == "applies" and finding.code == "PARO031" for finding in analysis.findings)


def test_few_of_many_in_a_recording_without_steps_are_told_and_count_as_none(tmp_path):
    ranks = [ddp_rank(rank, steps=120) for rank in range(2)]
    for trace in ranks:
        trace.events = [event for event in trace.events if not event["name"].startswith("ProfilerStep")]
        without_times(trace, slice(7, 8))
    analysis = analyze(write_run(tmp_path, ranks))
    (told,) = [note.message for note in analysis.data_quality if note.code == "Q126"]
    assert "1 collective has no time on the device and counts as none" in told
    assert not analysis.verdict.text.startswith("No verdict")


def test_a_rank_that_lost_all_is_left_out_where_another_is_whole(tmp_path):
    ranks = [ddp_rank(rank) for rank in range(2)]
    without_kernels(ranks[1], slice(None))
    analysis = analyze(write_run(tmp_path, ranks))
    assert [rank.rank for rank in analysis.ranks] == [0]
    assert analysis.breakdown_us.exposed_communication == pytest.approx(GATHER_US)
    (told,) = [note.message for note in analysis.data_quality if note.code == "Q307"]
    assert told.startswith("1 trace that ends early or lost events is left out of all figures")


def test_calls_that_launch_nothing_lose_nothing(tmp_path):
    """gloo's beside NCCL's, and those of a group whose last call launches for all."""
    ranks = [ddp_rank(rank) for rank in range(2)]
    for trace in ranks:
        comm = {
            "Collective name": "allreduce",
            "In msg nelems": 8,
            "Out msg nelems": 8,
            "Group size": 2,
            "dtype": "Int",
        }
        for number in range(5):
            external = {"External id": trace.next_id()}
            trace.row("cpu_op", "record_param_comms", number * STEP_US + 400, 6, 1, **external, **comm)
    analysis = analyze(write_run(tmp_path, ranks))
    assert len(analysis.step_time_us.values) == 5
    assert not {"Q108", "Q126"} & {note.code for note in analysis.data_quality}
