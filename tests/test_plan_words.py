"""What a plan says of itself: which favourites it names, what it offers, what it asks to measure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT
from helpers import analyze, write_run
from test_recommend import calibration, estimate
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.model import DeviceUpdate, StepTime
from paro_advise.advisor.cli import run
from paro_advise.advisor.prediction.advice.decision import _change, fastest
from paro_advise.advisor.prediction.candidates import baseline_candidate, candidates
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits, score
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.advisor.rendering.texts.plan_text import plan_text
from paro_advise.advisor.wording.quantities import bytes_text
from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Fidelity, Variant
from paro_advise.policies.plan import Verdict, plan_from_json, same_way
from paro_advise.policies.strategy_name import choice_name


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
    for share in (0.25, 0.5, 1.0, 2.0, 4.0, 24.0):  # with the most arithmetic rows differ by less than a percent
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


@pytest.mark.parametrize(("fidelity", "is_said"), [(Fidelity.EXACT, False), (Fidelity.APPROXIMATE, True)])
def test_a_plan_that_a_frameworks_settings_express_offers_no_other_ones(fidelity, is_said):
    plan = recommend(calibration(), Limits())
    assert plan.verdict == "change"
    chosen = replace(plan.chosen, exports={"fsdp2": fidelity})
    text = plan_text(replace(plan, chosen=chosen, switch_on_today=plan.candidates[-1]))
    assert ("With a framework's own settings" in text) is is_said


def test_where_all_ranks_were_seen_no_more_are_asked_for():
    def probes(seen_share):
        unclear = calibration(seen_share=seen_share, transfer_us=None, step_us=2 * calibration().step_us)
        return " ".join(recommend(unclear, Limits()).probes)

    assert "traces of more ranks" in probes(0.5)
    assert "traces of more ranks" not in probes(1.0)


def test_a_plan_speaks_of_one_memory():
    """What a rank holds at the most, its transients included: in the sentence, in the table and in the choice."""
    changes = 0
    for megabytes in (1, 4, 40):
        plan = recommend(calibration(unit_bytes=(megabytes * 1e6,) * 4), Limits())
        row = next(line for line in plan_text(plan).splitlines() if line.startswith("now"))
        assert row.endswith(bytes_text(plan.baseline.predicted.memory_bytes))
        if plan.verdict == "change":
            more = plan.chosen.predicted.memory_bytes - plan.baseline.predicted.memory_bytes
            assert f"{bytes_text(abs(more))} {'more' if more > 0 else 'less'} memory per rank" in plan.text
            changes += 1
    assert changes


def test_a_change_of_the_same_strategy_names_it_once():
    now = recommend(calibration(), Limits()).baseline
    kept = replace(now, variant=Variant.KEPT)
    assert _change(now, kept) == "Change GGG (full shard, ZeRO-3) to GGG, kept for backward"
    assert _change(replace(now, triple="NNN"), kept).endswith("to GGG (full shard, ZeRO-3), kept for backward")


def test_of_equally_fast_plans_the_one_with_the_least_memory_is_chosen():
    for megabytes in (1, 4, 40):
        plan = recommend(calibration(unit_bytes=(megabytes * 1e6,) * 4), Limits())
        eligible = [choice for choice in plan.candidates if choice.eligible and choice.feasible]
        best_us = min(choice.predicted.step_time_us.p50 for choice in eligible)
        near = [choice for choice in eligible if choice.predicted.step_time_us.p50 <= best_us * 1.0299]
        if plan.verdict == "change":
            assert plan.chosen.predicted.memory_bytes <= min(choice.predicted.memory_bytes for choice in near)


def test_what_gains_nothing_is_not_chosen_for_its_memory():
    """The run takes 103.5 ms: a way of 103 ms that holds little is within 3 % of the fastest, 100 ms, and no gain."""
    some = score(calibration(), baseline_candidate(calibration()), Limits(), np.full(3, 103.5e3))
    small, mid, quick = (
        replace(some, times=np.full(3, 1e3 * ms), transient=gib * 2.0**30)
        for ms, gib in ((103.0, 1), (101.0, 2), (100.0, 3))
    )
    assert fastest([small, mid, quick], some) is mid
    assert fastest([small, quick], some) is quick
    assert fastest([small], some) is small
    assert fastest([small, mid, quick], replace(some, times=np.full(3, 110e3))) is small
    assert fastest([small, mid, quick], replace(some, times=np.full(3, 102.9e3))) is small  # as equal as the run
    assert fastest([small, mid, quick], replace(some, reason="needs more memory than there is")) is small


def test_a_step_with_gaps_that_nothing_explains_is_measured_first(tmp_path):
    """What runs in them (CUDA graphs) is not idle time, and no strategy shortens it."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)]))
    parts = analysis.breakdown_us
    idle_us = 3 * parts.step_us
    for queued_us, is_doubtful in ((0.9 * idle_us, True), (0.1 * idle_us, False), (None, False)):
        gaps = replace(
            analysis,
            breakdown_us=replace(parts, idle=idle_us),
            idle_us=replace(analysis.idle_us, queued=queued_us),
        )
        assert ("no recorded kernel runs" in calibrate(gaps).unmodelled) is is_doubtful


@pytest.mark.parametrize(
    ("updating_share", "on_devices_share", "is_doubtful"), [(0.5, 0.0, True), (0.01, 0.0, False), (0.5, 0.2, False)]
)
def test_a_run_whose_optimizer_steps_on_the_host_is_measured_first(
    updating_share, on_devices_share, is_doubtful, tmp_path
):
    """With offloaded states each strategy has its own shards, and the host its own time for them."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)]))
    updating_us = updating_share * analysis.breakdown_us.step_us
    offloaded = replace(
        analysis,
        idle_us=replace(analysis.idle_us, updating=updating_us),
        update=DeviceUpdate(us=on_devices_share * updating_us, num_kernels=1),
    )
    assert ("the optimizer steps on the host" in calibrate(offloaded).unmodelled) is is_doubtful


def test_what_the_optimizer_takes_on_the_host_goes_with_the_states_that_a_rank_holds(tmp_path):
    """8 ms for a fourth of them are 32 for all; devices that wait for it are not said to wait for launches."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 4) for rank in range(4)]))
    parts, on_host_us = analysis.breakdown_us, 8000.0
    made = calibrate(
        replace(
            analysis,
            breakdown_us=replace(parts, idle=parts.idle + on_host_us),
            step_time_us=StepTime.of([value + on_host_us for value in analysis.step_time_us.values]),
            idle_us=replace(analysis.idle_us, updating=on_host_us),
            update=None,
        )
    )
    usual = calibrate(replace(analysis, update=None))
    assert made.host_update_us == pytest.approx(on_host_us)
    assert (made.compute_us, made.update) == (usual.compute_us, usual.update)
    assert (made.fixed_us, made.host_floor_us) == (pytest.approx(usual.fixed_us), usual.host_floor_us)
    for triple, share in (("GGG", 1), ("NNN", 4)):
        way = next(one for one in candidates(made) if str(one.strategy) == triple and not one.offload)
        without, found = (float(step_us(run, way, measured_links(run))) for run in (usual, made))
        assert found - without == pytest.approx(share * on_host_us, rel=0.01), triple


@pytest.mark.parametrize(("gbps", "compute_ms"), [(1, 800), (2, 400), (4, 200), (4, 800), (64, 800)])
def test_a_plan_that_keeps_the_run_names_what_its_table_shows_to_be_faster(gbps, compute_ms):
    """Ways that differ by less than 3 % count as equal, and the one with the least memory is taken."""
    rates = {"inter_gbps": estimate(gbps), "pod_gbps": estimate(gbps), "intra_gbps": estimate(4.0 * gbps)}
    made = calibration(is_gpu=True, compute_us=1e3 * compute_ms, **rates)
    replayed_us = float(step_us(made, baseline_candidate(made), measured_links(made)))
    plan = recommend(replace(made, step_us=replayed_us), Limits())
    assert plan.verdict == Verdict.KEEP
    fitting = [choice for choice in plan.candidates if choice.eligible and choice.feasible]
    others = [choice for choice in fitting if not same_way(plan.baseline, choice)]
    quickest = max(others, key=lambda choice: choice.predicted.speedup.p50)
    is_named = f"{choice_name(quickest)} is predicted" in plan.text
    assert is_named is (quickest.predicted.speedup.p50 > 1.02)
    assert "count as equal" in plan.text if is_named else "is predicted" not in plan.text


def test_sharded_parameters_whose_gradients_nothing_reduces_are_measured_first(tmp_path):
    """ZeRO++ sends them quantised by all-to-alls: what other strategies send of them would be missing."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)]))
    assert "no reduction of gradients" not in calibrate(analysis).unmodelled
    gradient = analysis.states["gradient"]
    lost = replace(
        analysis,
        collectives=tuple(entry for entry in analysis.collectives if entry.state != "gradient"),
        states=analysis.states | {"gradient": replace(gradient, count=0.0, bytes=0.0, total_us=0.0, exposed_us=0.0)},
    )
    assert "no reduction of gradients is seen" in calibrate(lost).unmodelled


def test_a_run_that_alone_may_be_planned_is_kept_and_says_what_is_untested(tmp_path):
    """A recording on one GPU, of 1 GiB: NNG with its optimizer on the host fits beside it, which `run` does untested."""
    path = tmp_path / "plan.json"
    command = ["recommend", str(ROOT / "tests/data/gpu_loops/fsdp2"), "--device-memory", "1GiB", "-q", "-o", str(path)]
    assert run(command) == 0
    plan = plan_from_json(path.read_bytes(), "plan")
    assert plan.verdict == "keep"
    assert plan.baseline.feasible
    assert plan.text.startswith("Keep GGG")
    assert "nothing else fits that has been timed on this kind of device; NNG" in plan.text
    assert "--allow-untested lets a plan choose it; or by the settings of deepspeed" in plan.text
    left = next(choice for choice in plan.candidates if choice.triple == "NNN" and not choice.feasible)
    assert left.reason.endswith("of 1 GiB, all of which may be planned")
    prefetch = next(lever for lever in plan.levers if "(prefetch)" in lever.what)
    assert prefetch.fits  # it takes no more memory than the run, which fits
    assert run([*command, "--force", "--allow-untested"]) == 0
    assert plan_from_json(path.read_bytes(), "plan").chosen.triple == "NNG"


def test_a_change_of_settings_alone_is_not_told_twice(tmp_path):
    """DDP that reduces in every micro-batch: the plan keeps its strategy and says what to set."""
    path = tmp_path / "plan.json"
    command = ["recommend", str(ROOT / "tests/data/gpu_loops/ddp"), "--device-memory", "80GiB", "-q", "-o", str(path)]
    assert run(command) == 0
    text = plan_from_json(path.read_bytes(), "plan").text
    assert text.startswith("Keep NNN (DDP); reduce gradients once a step")
    assert "can also stay" not in text
