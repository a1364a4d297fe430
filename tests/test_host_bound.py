"""A host that sets the pace: devices that communicate less wait for the next launch instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_recommend import calibration, estimate

from paro_advise.advisor.analysis.model import Breakdown, IdleParts
from paro_advise.advisor.prediction.candidates import candidates
from paro_advise.advisor.prediction.fitting.step_parts import arithmetic_note, step_parts
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.policies.strategy import Strategy

LINKS = {"inter_gbps": estimate(1.0), "intra_gbps": estimate(100.0)}


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
    from helpers import analyze, write_run
    from trace_builder import fsdp_rank

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
