"""Steps that take far longer than the others, as where one rank saves a checkpoint while the others wait."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from helpers import analyze, gathered, write_run
from trace_builder import TraceBuilder, fsdp_rank

from paro_advise.advisor.analysis.build import build_analysis
from paro_advise.advisor.analysis.model import Options, StepTime
from paro_advise.advisor.cli import run
from paro_advise.advisor.comparison.compare import compare
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.timelines.of_run import timeline_of

STALL_US, WORLD, STEPS = 6000.0, 4, 6


def stalled(trace, at_us, by_us):
    """Let what runs at a time end later, and all that begins behind it begin later."""
    at_us += trace.offset
    for event in trace.events:
        if event["ts"] >= at_us:
            event["ts"] += by_us
        elif event["ts"] + event.get("dur", 0.0) > at_us:
            event["dur"] += by_us
    return trace


def run_with_a_stall(folder, late_ranks):
    """Ranks in ``late_ranks`` stall before the block's gather of the fourth step, in which the others wait for them."""
    traces = [
        stalled(fsdp_rank(rank, WORLD, steps=STEPS), 3 * 1000.0 + (70 if rank in late_ranks else 100), STALL_US)
        for rank in range(WORLD)
    ]
    return analyze(write_run(folder, traces))


def test_stalls_are_counted_beyond_the_median():
    assert StepTime.of([100.0, 101.0, 99.0, 400.0]).stalled == (1, pytest.approx((400 - 100.5) / 4))
    assert StepTime.of([100.0, 101.0, 149.0]).stalled == (0, 0.0)
    assert StepTime.of([100.0, 400.0, 101.0]).stalled == (1, pytest.approx((400 - 101) / 3))
    assert StepTime.of([50.0, 100.0, 400.0]).stalled == (0, 0.0)  # two that do not agree tell of no third
    assert StepTime.of([]).stalled == (0, 0.0)


def test_a_step_that_has_more_to_compute_does_not_stall():
    """Sequences of unlike length: 80 us of the last step's 90 beyond the median are computing."""
    assert StepTime.of([100.0, 101.0, 99.0, 190.0], [90.0, 91.0, 89.0, 171.0]).stalled == (0, 0.0)
    assert StepTime.of([100.0, 101.0, 99.0, 190.0], [90.0, 91.0, 89.0, 91.0]).stalled == (1, pytest.approx(89.5 / 4))


@pytest.mark.parametrize(
    ("late_ranks", "while_what"),
    [({2}, "rank 2 did not communicate, but others did"), (set(range(WORLD)), "devices idled")],
    ids=["one rank", "all ranks"],
)
def test_a_step_that_stalled_is_left_out_of_all_figures(late_ranks, while_what, tmp_path):
    """What is told and predicted is what five steps without it tell."""
    five = analyze(write_run(tmp_path / "usual", [fsdp_rank(rank, WORLD, steps=STEPS - 1) for rank in range(WORLD)]))
    found = run_with_a_stall(tmp_path / "stall", late_ranks)
    assert found.run.num_steps == STEPS - 1
    assert found.step_time_us.values == pytest.approx(five.step_time_us.values)
    assert vars_of(found.breakdown_us) == pytest.approx(vars_of(five.breakdown_us))
    assert found.stragglers == five.stragglers == ()
    assert found.verdict.regime == five.verdict.regime
    stalled = f"1 of 6 steps stalled for 6 ms while {while_what}, and is left out: all figures are of the others"
    assert found.verdict.text == f"{five.verdict.text} {stalled}."
    assert [item.message for item in found.data_quality if item.code == "Q310"] == [stalled]
    made, usual = calibrate(found), calibrate(five)
    assert (made.step_us, made.fixed_us, made.late_us) == pytest.approx((usual.step_us, usual.fixed_us, usual.late_us))


def test_a_stall_is_one_though_the_step_sends_more(tmp_path):
    """A checkpoint: states are gathered in 20 us, then rank 2 writes them while the others wait for it."""
    late = {2}
    traces = [
        stalled(fsdp_rank(rank, WORLD, steps=STEPS), 3 * 1000.0 + (70 if rank in late else 100), STALL_US)
        for rank in range(WORLD)
    ]
    for trace in traces:
        base = 3000.0 + STALL_US
        trace.collective("AllGather", base + 900, 20, nelems=16_000_000, issue=base + 890, seq=900, owners=("states",))
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert analysis.run.num_steps == STEPS - 1
    (said,) = [item.message for item in analysis.data_quality if item.code == "Q310"]
    assert "stalled for 5.98 ms" in said  # less the gathering itself


def test_a_step_that_sends_more_does_not_stall(tmp_path):
    """Local SGD: in one of six steps 32 MB of parameters are averaged, which takes 3 ms and is all exposed."""
    traces = [stalled(fsdp_rank(rank, WORLD, steps=STEPS), 3 * 1000.0 + 900, 3000.0) for rank in range(WORLD)]
    for trace in traces:
        trace.collective(
            "AllReduce", 3910, 2980, nelems=16_000_000, issue=3905, seq=900, owners=("average_parameters",)
        )
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert analysis.run.num_steps == STEPS
    assert "Q310" not in {item.code for item in analysis.data_quality}
    assert "stall" not in analysis.verdict.text


def vars_of(parts):
    return [parts.compute, parts.exposed_communication, parts.other, parts.idle]


def test_waiting_for_a_rank_without_a_trace_that_stalled_once_is_what_no_strategy_changes(tmp_path):
    """Nothing tells it from a link that others used; a replay would else let it shrink with the groups."""
    ranks = [rank for rank in range(WORLD) if rank != 2]
    usual = calibrate(analyze(write_run(tmp_path / "usual", [fsdp_rank(rank, WORLD, steps=STEPS) for rank in ranks])))
    traces = [stalled(fsdp_rank(rank, WORLD, steps=STEPS), 3 * 1000.0 + 100, STALL_US) for rank in ranks]
    analysis = analyze(write_run(tmp_path / "stall", traces))
    assert analysis.run.num_steps == STEPS
    assert calibrate(analysis).step_us == pytest.approx(usual.step_us + STALL_US / STEPS)
    (said,) = [item.message for item in analysis.data_quality if item.code == "Q310"]
    assert said == "1 of 6 steps took 7 ms at the most, half of all steps up to 1 ms: the means hold 1 ms of stalls"
    assert analysis.verdict.text.endswith(
        "These are means: 1 of 6 steps stalled and holds 1 ms of them, half of all steps take 1 ms at the most."
    )


def test_a_rank_whose_host_is_slow_delays_every_strategy(tmp_path):
    """Others wait for it whatever is sent: 300 us in each step, between the root's gather and the block's."""
    traces = [fsdp_rank(rank, WORLD, steps=STEPS) for rank in range(WORLD)]
    for rank, trace in enumerate(traces):
        for step in reversed(range(STEPS)):
            stalled(trace, 1000.0 * step + (70 if rank == 2 else 100), 300.0)
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert [(item.rank, item.cause) for item in analysis.stragglers] == [(2, "host")]
    assert calibrate(analysis).late_us == pytest.approx(300 * 3 / 4, rel=0.05)


def test_waiting_for_another_late_rank_in_each_step_is_what_no_strategy_changes(tmp_path):
    """In each step another rank pauses before the block's gather; no step is longer than the others."""
    usual = calibrate(
        analyze(write_run(tmp_path / "usual", [fsdp_rank(rank, WORLD, steps=STEPS) for rank in range(WORLD)]))
    )
    traces = [fsdp_rank(rank, WORLD, steps=STEPS) for rank in range(WORLD)]
    pause_us = 0.5 * 1000.0
    for step in range(STEPS):
        for rank, trace in enumerate(traces):
            stalled(trace, step * (1000.0 + pause_us) + (70 if rank == step % WORLD else 100), pause_us)
    analysis = analyze(write_run(tmp_path / "pauses", traces))
    assert analysis.stragglers == ()
    assert "Q310" not in {item.code for item in analysis.data_quality}
    made = calibrate(analysis)
    assert made.late_us == pytest.approx(0.75 * pause_us, rel=0.02)
    assert made.wait_us == pytest.approx(usual.wait_us, abs=0.02 * pause_us)


def test_a_step_that_stalled_is_not_drawn_and_can_be_cut_out(tmp_path):
    """The longest step of all is what a slice shows."""
    analysis = run_with_a_stall(tmp_path / "stall", {2})
    assert analysis.run.steps_left_out == ("ProfilerStep#8",)
    drawn = timeline_of(analysis, gathered(tmp_path / "stall").facts)
    usual = [f"ProfilerStep#{number}" for number in (5, 6, 7, 9, 10)]
    assert set(drawn.steps) <= set(usual)
    assert {step.step for step in drawn.shown} <= set(usual)
    assert run(["slice", str(tmp_path / "stall"), "-o", str(tmp_path / "longest.json")]) == 0
    events = json.loads((tmp_path / "longest.json").read_bytes())["traceEvents"]
    assert "ProfilerStep#8" in {event["name"] for event in events}


def test_steps_that_stall_again_and_again_stay(tmp_path):
    """What comes back costs the run as much as it takes: two of eight steps."""
    traces = []
    for rank in range(WORLD):
        trace = fsdp_rank(rank, WORLD, steps=8)
        for step in (6, 2):
            stalled(trace, 1000.0 * step + 100, STALL_US)
        traces.append(trace)
    analysis = analyze(write_run(tmp_path / "run", traces))
    assert (analysis.run.num_steps, analysis.run.steps_left_out) == (8, ())
    assert analysis.breakdown_us.step_us == pytest.approx(1000.0 + 2 * STALL_US / 8, rel=0.01)
    assert "2 of 8 steps stalled and hold" in analysis.verdict.text


def test_a_step_stays_that_is_the_only_one_of_a_rank(tmp_path):
    """Left out of the others' figures alone it would be all of that rank's, and of the means."""
    folder = tmp_path / "stall"
    run_with_a_stall(folder, set(range(WORLD)))
    path = folder / "rank3.json"
    data = json.loads(path.read_bytes())
    marks = [event for event in data["traceEvents"] if str(event.get("name")).startswith("ProfilerStep")]
    low, high = (marks[3]["ts"], marks[3]["ts"] + marks[3]["dur"])
    data["traceEvents"] = [event for event in data["traceEvents"] if "dur" not in event or low <= event["ts"] < high]
    path.write_text(json.dumps(data))
    analysis = analyze(folder)
    assert analysis.run.steps_left_out == ()
    assert max(analysis.step_time_us.values) == pytest.approx(1000.0 + STALL_US, rel=0.01)


def test_the_one_step_of_many_that_updates_did_not_stall(tmp_path):
    """Where steps as marked are micro-batches the optimizer's step is in one of them."""
    folder = tmp_path / "run"
    run_with_a_stall(folder, set(range(WORLD)))
    found = gathered(folder)
    kept = build_analysis([replace(item, num_updates=0) for item in found.facts], found.notices, Options())
    assert kept.run.steps_left_out == ()
    assert build_analysis(found.facts, found.notices, Options()).run.steps_left_out == ("ProfilerStep#8",)


def test_a_comparison_counts_what_a_stall_took(tmp_path):
    """Six steps of 1 ms each against five, and one of 7 ms: half of the work in the same time."""
    usual = analyze(write_run(tmp_path / "usual", [fsdp_rank(rank, WORLD, steps=STEPS) for rank in range(WORLD)]))
    found = compare(usual, run_with_a_stall(tmp_path / "stall", set(range(WORLD))), None)
    (throughput,) = [item for item in found.metrics if item.name == "throughput"]
    assert throughput.after / throughput.before == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(("slow", "number"), [((0,), 1), ((0, 1), 2), ((3,), 0), ((0, 3), 0), ((0, 1, 2, 3), 0)])
def test_first_steps_that_compute_far_longer_are_told(slow, number, tmp_path):
    """Kernels are tuned in the first of seven steps; a longer batch in the middle is no start, nor are most steps."""
    builders = [TraceBuilder(rank, 2) for rank in range(2)]
    for builder in builders:
        begin = 0.0
        for step in range(7):
            compute_us = 4000.0 if step in slow else 1000.0
            builder.step(step, begin, compute_us + 300)
            builder.compute(begin + 50, compute_us)
            builder.collective("AllReduce", begin + compute_us + 60, 200, nelems=50_000, issue=begin + 40, seq=step)
            begin += compute_us + 300
    found = analyze(write_run(tmp_path, builders))
    told = [item for item in found.data_quality if item.code == "Q343"]
    assert len(told) == (number > 0)
    for item in told:
        assert item.message.startswith(
            "the first step computes 4.0" if number == 1 else "the first 2 steps compute 4.0"
        )
        assert f"--skip-steps {number}" in item.help
