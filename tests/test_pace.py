"""A traced run without its profiler: what is taken off where, by the formulas written out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_recommend import calibration

from paro_advise.advisor.facts.capture_log import captured_of
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.fitting.profiler_correction import unprofiled
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.framework import Framework
from paro_advise.policies.strategy import Strategy
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_log

MB = 1e6
# 2 micro-batches of 4 units of 4 MB over 8 ranks: 7 gathers and 4 reductions each, these as all-reduces.
SENT = 2 * (7 * 3.5 * MB + 4 * 7 * MB)
WIRE_US = SENT / (0.05e3)  # 0.05 GB/s
COLLECTIVES = 2 * (7 + 4)  # of each one message is waited for, while ports rest


def log(tmp_path, rows, rank=0, **header):
    facts = {"format": "paro-advise/steps", "rank": rank, "world_size": 1, "steps": [6, 8]} | header
    usual = {"overhead_us": 0, "micro_batches": 2, "loss": 1, "gradient_norm_squared": 1, "peak_memory_bytes": 1}
    lines = [json.dumps(facts), *(json.dumps(usual | row) for row in rows)]
    path = tmp_path / f"steps.rank{rank}.jsonl"
    path.write_text("\n".join(lines))
    return read_step_log(SourceRef(path=path))


def captured(tmp_path, step_us_, cpu_us, traced_cpu_us):
    rows = [
        {"step": number, "step_us": step_us_, "cpu_us": cpu_us, "profiled": False} for number in (0, 3, 4, 5, 9, 10)
    ]
    rows += [{"step": 6, "step_us": 9e6, "cpu_us": traced_cpu_us, "profiled": True}]
    rows += [{"step": 7, "step_us": 9e6, "cpu_us": traced_cpu_us, "profiled": True}]
    rows += [{"step": 8, "step_us": 5e6, "cpu_us": 7e6, "profiled": True}]  # other ranks still wrote
    return captured_of([log(tmp_path, sorted(rows, key=lambda row: row["step"]))])


def test_a_capture_tells_what_the_profiler_cost_the_cores(tmp_path):
    found = captured(tmp_path, 4e6, 2e5, 5e5)
    assert found.traced_cpu_us == 5e5
    assert found.profiler_cpu_slowdown == 2.5


def test_what_others_wait_for_is_slowed_like_their_own_work(tmp_path):
    """A rank that computes longer is late with work of its cores: 40 ms of the 45 that no strategy changes."""
    traced = calibration(step_us=4_000_000.0, fixed_us=45_000.0, gaps_us=5_000.0, late_us=40_000.0)
    found = unprofiled(traced, captured(tmp_path, 3.9e6, 2e5, 5e5))
    assert found.late_us == pytest.approx(40_000.0 / 2.5)
    assert found.fixed_us == pytest.approx(45_000.0 / 2.5)


def test_ranks_of_one_machine_share_its_cores(tmp_path):
    """Two ranks on eight cores, four on two: the latter have half a core each, whatever their hosts are called."""
    places = [("a", 8)] * 2 + [("b", 2)] * 4
    logs = [
        log(tmp_path, [], rank, machine=machine, cores=cores, host=f"h{rank}", local_world_size=1)
        for rank, (machine, cores) in enumerate(places)
    ]
    assert captured_of(logs).cores_per_rank == 0.5
    # One log of a node of four ranks: the others are there, too.
    assert captured_of([log(tmp_path, [], machine="a", cores=8, local_world_size=4)]).cores_per_rank == 2.0
    assert captured_of([*logs, log(tmp_path, [], 6)]).cores_per_rank is None


def test_the_profiler_slows_cores_and_not_the_wire(tmp_path):
    traced = calibration(step_us=4_000_000.0)
    seen = captured(tmp_path, 3_000_000.0, 2e5, 4e5)
    found = unprofiled(traced, seen)
    assert found.step_us == pytest.approx(3_000_000.0)
    assert (found.compute_us, found.fixed_us) == pytest.approx((50_000.0, 2_500.0))
    assert found.inter_gbps == traced.inter_gbps
    latency = 100.0 * COLLECTIVES
    rest = 3_000_000.0 - 52_500.0 - WIRE_US - latency
    assert found.host_us_per_byte == pytest.approx(rest / SENT)
    assert float(step_us(found, baseline_candidate(found), measured_links(found))) == pytest.approx(3_000_000.0)


def test_what_the_wire_cannot_have_taken_was_a_faster_wire(tmp_path):
    """Latency goes first; bandwidth is corrected only if the bytes alone would take longer than the step."""
    seen = captured(tmp_path, 2_000_000.0, 2e5, 4e5)
    found = unprofiled(calibration(step_us=4_000_000.0), seen)
    assert found.host_us_per_byte == 0.0
    assert found.inter_alpha_us.value == 0.0
    assert found.inter_gbps.value == pytest.approx(0.05 * WIRE_US / (2_000_000.0 - 52_500.0))
    assert float(step_us(found, baseline_candidate(found), measured_links(found))) == pytest.approx(2_000_000.0)


@pytest.mark.parametrize(("real_us", "cpu_us"), [(1_500_000.0, 2e5), (700_000.0, 3.6e5), (90_000.0, 3.6e5)])
def test_a_run_that_hides_its_reductions_gets_no_impossible_network(tmp_path, real_us, cpu_us):
    """DDP: most of what its reductions take is hidden, so what is exposed says little about the links."""
    traced = calibration(
        framework=Framework.DDP, baseline=Strategy.parse("NNN"), replicates_each_pass=True, step_us=1_600_000.0
    )
    found = unprofiled(traced, captured(tmp_path, real_us, cpu_us, 4e5))
    assert 0.05 <= found.inter_gbps.value <= 0.05 / 0.7 + 1e-9
    assert 0 <= found.inter_alpha_us.value <= 100.0
    again = float(step_us(found, baseline_candidate(found), measured_links(found)))
    if real_us == 1_500_000.0:
        assert again == pytest.approx(real_us, rel=1e-3)
    assert min(found.compute_us, found.fixed_us, found.host_us_per_byte) >= 0


def test_what_the_host_sleeps_is_not_sped_up(tmp_path):
    """A loader that lets the step wait takes as long without the profiler."""
    traced = calibration(step_us=4_000_000.0, fixed_us=500_000.0, gaps_us=100_000.0)
    found = unprofiled(traced, captured(tmp_path, 3_500_000.0, 2e5, 4e5))
    assert found.fixed_us == pytest.approx(400_000.0 + 50_000.0)


def test_without_a_capture_nothing_is_taken_off():
    traced = calibration(step_us=4_000_000.0)
    found = unprofiled(traced, None)
    assert (found.step_us, found.compute_us) == (traced.step_us, traced.compute_us)
    assert "overhead assumed zero" in found.assumptions[-1]


def test_beside_a_gpu_the_gaps_shrink_first(tmp_path):
    traced = replace(calibration(), is_gpu=True, step_us=4_000_000.0, fixed_us=1_500_000.0, compute_us=1_000_000.0)
    found = unprofiled(traced, captured(tmp_path, 3_000_000.0, 2e5, 4e5))
    assert (found.step_us, found.fixed_us, found.compute_us) == pytest.approx((3_000_000.0, 500_000.0, 1_000_000.0))
    found = unprofiled(traced, captured(tmp_path, 2_000_000.0, 2e5, 4e5))
    assert (found.step_us, found.fixed_us, found.compute_us) == pytest.approx((2_000_000.0, 0.0, 800_000.0))


def test_profiled_steps_are_those_in_the_trace(tmp_path):
    """Not the one before, in which the profiler starts, nor the one behind, in which it writes."""
    times = {5: 9_000.0, 6: 1_300.0, 7: 1_100.0, 8: 7_000.0}
    rows = [
        {"step": number, "step_us": times.get(number, 1_000.0), "cpu_us": 1, "profiled": number in times}
        for number in range(20)
    ]
    assert captured_of([log(tmp_path, rows)]).profiler_slowdown == pytest.approx(1.2)
    postponed = captured_of([log(tmp_path, rows, steps=[1, 3])])  # asked for, and recorded from step 6 on
    assert postponed.profiler_slowdown == pytest.approx((9.0 + 1.3 + 1.1 + 7.0) / 4)
