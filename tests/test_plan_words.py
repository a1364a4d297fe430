"""What a plan says of itself: which favourites it names, what it offers, what it asks to measure."""

from __future__ import annotations

from dataclasses import replace

from test_recommend import calibration

from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.rendering.texts.plan_text import plan_text
from paro_advise.core.framework import Framework


def test_a_run_that_the_model_does_not_describe_gets_no_favourite():
    """A replay that misses by more than the step itself names none; one that misses by less names what beats the run."""
    usual = calibration().step_us
    assert "none of the predicted times can be relied on" in recommend(calibration(step_us=0.45 * usual), Limits()).text
    text = recommend(calibration(step_us=1.3 * usual), Limits()).text
    assert "so numbers would mislead" in text
    assert "looks best" in text
    # Next to nothing but arithmetic, measured so fast that every candidate is predicted slower than the run.
    busy_us = 10_000_000.0
    fast = recommend(calibration(step_us=0.6 * calibration(compute_us=busy_us).step_us, compute_us=busy_us), Limits())
    assert all(choice.predicted.speedup.p50 <= 1 for choice in fast.candidates if choice.eligible)
    assert "looks best" not in fast.text


def test_a_plan_says_why_it_is_not_the_fastest_row():
    """Step times this close are equal, so that less memory wins; a reader sees another row above."""
    said = []
    for share in (0.25, 0.5, 1.0, 2.0, 4.0):
        usual = calibration()
        plan = recommend(replace(usual, compute_us=share * usual.compute_us, step_us=share * usual.step_us), Limits())
        if plan.verdict == "keep" or abs(plan.confidence.replay_error_pct) > 100:
            continue
        quickest = max(choice.predicted.speedup.p50 for choice in plan.candidates if choice.eligible)
        is_said = (
            f"is predicted {quickest:.2f}x, which is no difference beyond noise, and takes more memory" in plan.text
        )
        assert is_said is (quickest >= 1.01 * plan.chosen.predicted.speedup.p50), plan.text
        said.append(is_said)
    assert set(said) == {True, False}


def test_a_run_without_a_framework_is_told_that_run_needs_one():
    needs = "`paro-advise run` needs FSDP, DDP or DeepSpeed around the model"
    assert needs not in recommend(calibration(), Limits()).text
    unnamed = recommend(calibration(framework=Framework.UNKNOWN), Limits())
    assert unnamed.verdict == "change"
    assert needs in unnamed.text


def test_settings_that_are_slower_than_the_run_are_no_offer():
    plan = recommend(calibration(), Limits())
    slow = replace(
        plan.candidates[-1],
        predicted=replace(plan.baseline.predicted, speedup=replace(plan.baseline.predicted.speedup, p50=0.4)),
    )
    assert "nothing beats the present run; the closest is: " in plan_text(replace(plan, switch_on_today=slow))


def test_where_all_ranks_were_seen_no_more_are_asked_for():
    def probes(seen_share):
        unclear = calibration(seen_share=seen_share, transfer_us=None, step_us=2 * calibration().step_us)
        return " ".join(recommend(unclear, Limits()).probes)

    assert "traces of more ranks" in probes(0.5)
    assert "traces of more ranks" not in probes(1.0)
