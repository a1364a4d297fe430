"""What gains beside the strategy, as a plan says it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_recommend import calibration

from paro_advise.advisor.prediction.advice.levers import larger_units
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.framework import Framework
from paro_advise.policies.strategy import Strategy

OFF = 0.03  # of a gain, that the replay itself may be off by, as a standard deviation; 80 % lie within 1.2816 of them


def test_a_healed_rank_is_worth_its_lateness():
    """30 ms of a step are waiting for one rank, whatever the strategy."""
    made = calibration(fixed_us=35_000.0, late_us=30_000.0, most_late_us=30_000.0)
    made = replace(made, step_us=float(step_us(made, baseline_candidate(made), measured_links(made))))
    plan = recommend(made, Limits())
    lever = next(item for item in plan.levers if item.what == "no rank later than the others")
    assert lever.speedup_now.p50 == pytest.approx(made.step_us / (made.step_us - 30_000), rel=0.02)
    assert not lever.changes_numbers
    plan = recommend(replace(made, most_late_us=50_000.0), Limits())  # waiting may have hidden or slowed more
    (unsure,) = (item.speedup_now for item in plan.levers if item.what == lever.what)
    assert unsure.p10 == pytest.approx(lever.speedup_now.p10, rel=0.02)
    most = made.step_us / (made.step_us - 50_000)
    beyond = math.hypot(math.log(most / unsure.p50), 1.2816 * OFF)
    assert unsure.p90 == pytest.approx(unsure.p50 * math.exp(beyond), rel=0.005)


@pytest.mark.parametrize(
    ("framework", "said"),
    [(Framework.FSDP2, "units of 2 blocks"), (Framework.DDP, "gradient buckets 2 times as large (bucket_cap_mb)")],
)
def test_larger_messages_are_named_by_what_the_framework_sets(framework, said):
    made = replace(calibration(unit_bytes=(4e6,) * 8), framework=framework)
    twice, _ = larger_units(made)
    assert twice.what == f"{said}, 4 in place of 8"


@pytest.mark.parametrize(
    ("framework", "changes", "is_told"),
    [
        (Framework.MEGATRON, {}, True),
        (Framework.MEGATRON, {"publishes_ahead": True}, False),
        (Framework.DEEPSPEED, {}, False),  # it has no such setting
    ],
)
def test_megatrons_updated_parameters_may_come_back_beside_the_next_forward(framework, changes, is_told):
    """What is gained at most is the time of one gather of all parameters over all ranks."""
    made = calibration(framework=framework, baseline=Strategy.parse("NNG"), is_gpu=True, **changes)
    step = float(step_us(made, baseline_candidate(made), measured_links(made)))
    plan = recommend(replace(made, step_us=step), Limits())
    found = [item for item in plan.levers if "--overlap-param-gather" in item.what]
    assert bool(found) == is_told
    for lever in found:
        held = baseline_candidate(made)
        ahead = float(
            step_us(replace(made, publishes_ahead=True), replace(held, publishes_ahead=True), measured_links(made))
        )
        assert 1.0 < lever.speedup_now.p50 == pytest.approx(step / ahead, rel=0.02)


def test_no_gain_is_told_more_exactly_than_steps_are_replayed():
    made = calibration(fixed_us=35_000.0, late_us=30_000.0, most_late_us=30_000.0)
    for lever in recommend(made, Limits()).levers:
        for gain in (lever.speedup_now, lever.speedup_with_plan):
            assert gain.p10 <= gain.p50 * math.exp(-1.2816 * OFF) * 1.0001
            assert gain.p90 >= gain.p50 * math.exp(1.2816 * OFF) * 0.9999


@pytest.mark.parametrize(("unit_bytes", "is_said"), [(16e3, True), (16e6, False)])
def test_a_plan_says_that_a_setting_alone_does_as_much(unit_bytes, is_said):
    """128 buckets a step are latency, of which four in one save three quarters; of 16 MB each they are bandwidth."""
    quick = {"compute_us": 500.0, "fixed_us": 0.0, "gaps_us": 0.0, "micro_batches": 1, "is_gpu": True}
    made = calibration(
        framework=Framework.DDP,
        baseline=Strategy.parse("NNN"),
        unit_bytes=(unit_bytes,) * 128,
        native_reduce_scatter_is_all_reduce=False,
        **quick,
    )
    plan = recommend(made, Limits())
    assert plan.verdict == "change"
    assert ("The strategy can also stay" in plan.text) is is_said
    enough = plan.chosen.predicted.speedup.p50 / 1.03
    found = [item for item in plan.levers if item.speedup_now.p50 >= enough and not item.changes_numbers]
    assert bool(found) is is_said
    if is_said:
        assert found[0].what.startswith("gradient buckets 4 times as large")
        gain = f"with {found[0].what}, the predicted speed-up is {found[0].speedup_now.p50:.2f}x"
        assert gain in plan.text
