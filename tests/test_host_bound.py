"""A host that sets the pace: devices that communicate less wait for the next launch instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers import analyze, write_run
from test_recommend import calibration, estimate
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.model import Breakdown, IdleParts
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.fitting.step_parts import arithmetic_note, step_parts
from paro_advise.advisor.prediction.recommend import step_range
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.policies.strategy import Strategy

LINKS = {
    "inter_gbps": estimate(0.75), "intra_gbps": estimate(100.0),
    "inter_alpha_us": estimate(14.0), "intra_alpha_us": estimate(5.0),
}  # fmt: skip


def run_on(baseline, *, idle_us, synchronised_us=0.0):
    """A run that idles so long for launches, and whose host waits for the device so long at the end of a step."""
    busy = calibration(
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, baseline=Strategy.parse(baseline), gaps_us=0.0, **LINKS
    )
    step = busy.step_us + idle_us
    works = step - synchronised_us
    return replace(
        busy, step_us=step, fixed_us=busy.fixed_us + idle_us, host_floor_us=works, host_idle_us=idle_us,
        host_rest_us=step - max(works, busy.step_us),
    )  # fmt: skip


def native(run, triple):
    return next(
        item for item in candidates(run) if str(item.strategy) == triple and item.collectives == "native" and not item.variant
    )  # fmt: skip


def time_of(run, triple):
    return float(step_us(run, native(run, triple), measured_links(run)))


@pytest.mark.parametrize("synchronised_us", [0.0, 5_000.0])
def test_less_communication_makes_devices_wait_for_longer(synchronised_us):
    """Of what hybrid sharding saves only the host's own waiting is saved."""
    run = run_on("GGG", idle_us=60_000.0, synchronised_us=synchronised_us)
    assert time_of(run, "GGG") == pytest.approx(run.step_us)
    busy = replace(run, host_floor_us=0.0)
    assert time_of(busy, "III") < run.step_us - 10_000.0
    assert time_of(run, "III") == pytest.approx(run.step_us)


def test_more_communication_goes_into_the_time_that_devices_wait():
    run = run_on("III", idle_us=1e9)
    busy = replace(run, host_floor_us=0.0)
    assert time_of(busy, "GGG") > time_of(busy, "III") + 10_000.0
    assert time_of(run, "GGG") == pytest.approx(run.step_us)


def test_half_as_many_launches_let_devices_set_the_pace():
    run = run_on("GGG", idle_us=60_000.0)
    halved = replace(run, micro_batches=1, host_floor_us=run.host_floor_us / 2)
    device_us = run.step_us - run.host_idle_us
    assert run.step_us / 2 < time_of(halved, "GGG") <= device_us


@pytest.fixture
def analysis(tmp_path):
    return analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))


@pytest.mark.parametrize(
    ("queued_us", "expected"),
    [(10.0, (960.0, 290.0, 40.0)), (250.0, (0.0, 0.0, 0.0)), (None, (0.0, 0.0, 0.0))],
    ids=["waits for launches", "waits for other streams", "launches not read"],
)
def test_the_host_sets_the_pace_where_devices_wait_for_launches(analysis, queued_us, expected):
    """300 us of idle time in a step of 1,000, for 40 of which the host waits: it works 960, of which no step is shorter."""
    idle = IdleParts(
        queued=queued_us, data_loading=0.0, loading=0.0, updating=0.0, synchronisation=40.0, queue_length=1.0
    )
    parts = Breakdown(compute=500.0, exposed_communication=200.0, other=0.0, idle=300.0)
    run = replace(analysis, idle_us=idle, breakdown_us=parts, stragglers=(), late_once_us=0.0)
    found = step_parts(run, 0.0, is_gpu=True, own_way=False)
    assert (found.host_floor_us, found.host_idle_us, found.host_rest_us) == pytest.approx(expected)
    assert any("the host sets the pace" in note for note in arithmetic_note(found, run)) is (expected[0] > 0)


def busy_rank(rank, waits=("cudaStreamSynchronize",), num_queued=0):
    """Two steps of 1,000 us that a device fills; the host waits 60 us in the middle and 160 at the end of each."""
    trace = fsdp_rank(rank, 2)
    for base in (0.0, 1000.0):
        trace.compute(base + 850, 150)
        trace.row("cuda_runtime", "cudaLaunchKernel", base + 850, 5)
        trace.row("cuda_runtime", "cudaStreamWaitEvent", base + 860, 100)
        for place in range(num_queued):
            trace.compute(base + 410 + place * 0.05, 0.05, stream=8)
        for wait in waits:
            trace.row("cuda_runtime", wait, base + 320, 60)
            trace.row("cuda_runtime", wait, base + 830, 160)
    return trace


def host_work_of(folder, builders, layout="torch213"):
    folder.mkdir()
    for builder in builders:
        builder.write(folder / f"rank{builder.rank}.json", layout)
    return analyze(folder).idle_us.host_work


@pytest.mark.parametrize("layout", ["torch213", "torch2020", "indented", "sorted_keys"])
@pytest.mark.parametrize(
    "wait",
    ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "hipMemcpyWithStream",
     "hipStreamSynchronize", "hipDeviceSynchronize", "hipEventSynchronize"],
)  # fmt: skip
def test_a_host_works_while_it_does_not_wait_for_its_device(tmp_path, wait, layout):
    found = host_work_of(tmp_path / "run", [busy_rank(rank, (wait,)) for rank in range(2)], layout)
    assert found == pytest.approx(1000 - 60 - 160, abs=0.01)


def test_what_a_host_works_is_not_known_where_its_calls_were_not_recorded(tmp_path):
    quiet = [busy_rank(rank, ()) for rank in range(2)]
    for trace in quiet:
        trace.events = [row for row in trace.events if row["cat"] != "cuda_runtime"]
    assert host_work_of(tmp_path / "run", quiet) is None


def test_a_full_queue_may_hold_up_the_host_in_a_launch(tmp_path):
    """1,000 launches wait when the reduction is issued: whether the host works or waits for room, nothing tells."""
    assert host_work_of(tmp_path / "full", [busy_rank(rank, num_queued=1_000) for rank in range(2)]) is None
    assert host_work_of(tmp_path / "half", [busy_rank(rank, num_queued=500) for rank in range(2)]) is not None


@pytest.fixture
def held_up():
    """A run under global sharding that hybrid sharding would make quicker."""
    return calibration(
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, baseline=Strategy.parse("GGG"), gaps_us=0.0,
        compute_us=20_000.0, **LINKS | {"inter_gbps": estimate(1.0)},
    )  # fmt: skip


def test_no_way_is_quicker_than_the_host_that_works_beneath_communication(held_up):
    free = time_of(held_up, "III")
    works = (free + held_up.step_us) / 2
    assert free < works
    assert time_of(replace(held_up, host_work_us=works), "III") == pytest.approx(works)
    assert time_of(replace(held_up, host_work_us=free / 2), "III") == pytest.approx(free)
    assert time_of(replace(held_up, host_work_us=works), "GGG") == pytest.approx(time_of(held_up, "GGG"))


def test_what_a_profiler_adds_to_the_hosts_work_widens_the_range(held_up):
    """The host works 70 to 100 % of what it does beneath a profiler: its lower end, its middle and its upper end."""
    hidden = replace(held_up, host_work_us=held_up.step_us)
    found = step_range(hidden, native(hidden, "III"))
    shares = [us / hidden.step_us for us in (found.p10, found.p50, found.p90)]
    assert shares == pytest.approx([0.73, 0.85, 0.97], abs=0.02)
