"""When a change of two runs is real, the same, or cannot be told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from helpers import analyze, write_run
from test_compare import captured, pair
from test_recommend import calibration
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.advisor.comparison.acceptance import Thresholds, judge
from paro_advise.advisor.comparison.bootstrap import Change, _widening
from paro_advise.advisor.comparison.compare import Terms, compare
from paro_advise.advisor.comparison.metrics import verdict_of
from paro_advise.advisor.comparison.model import ChangeVerdict, Metric
from paro_advise.advisor.facts.capture_log import captured_of
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.rendering.texts.comparison_junit import comparison_junit
from paro_advise.advisor.rendering.texts.comparison_text import comparison_markdown, comparison_text
from paro_advise.advisor.wording.quantities import signed_text
from paro_advise.core.documents import to_json
from paro_advise.policies.plan import with_id
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_log


@pytest.fixture
def analysis(tmp_path):
    return analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ((0.064, -0.003, 0.094), "unclear"),  # 9 % longer is not the same
        ((0.01, -0.04, 0.049), "same"),
        ((0.025, 0.001, 0.04), "worse"),
        ((-0.03, -0.04, -0.01), "better"),
        ((0.02, 0.01, 0.03), "same"),
    ],
)
def test_the_same_is_what_lies_within_five_percent_either_way(change, verdict):
    value, low, high = change
    assert verdict_of(Change(value=value, low=low, high=high)) == verdict


def test_a_small_change_is_told_with_what_repeats_differ_by(tmp_path):
    """Two recordings do not hold how a job varies from run to run."""
    analysis = analyze(write_run(tmp_path, [fsdp_rank(rank, 2) for rank in range(2)]))
    usual = [1e5 + at for at in range(9)]
    for factor, is_doubted in ((1.03, True), (1.2, False)):
        found = compare(*pair(analysis, usual, [factor * time for time in usual]), None)
        assert found.verdict == "worse"
        assert ("repeats of a job may differ by 3.5 %" in found.text) == is_doubted


def test_ranges_are_as_wide_as_few_samples_make_them():
    """Never narrower than Student's t over the normal distribution at 99 %: quantiles as tables print them."""
    for freedom, quantile in {3: 4.541, 9: 2.821, 11: 2.718, 14: 2.624, 21: 2.518, 40: 2.423}.items():
        count = freedom + 1
        assert _widening(count, 1) >= 0.995 * quantile / 2.326 * math.sqrt(count / freedom)


@pytest.mark.parametrize("norms", [("1e300", "1"), ("1", "1e300")])
def test_a_gradient_norm_that_diverged_is_unknown_on_whatever_rank(norms, tmp_path):
    logs = []
    for rank, norm in enumerate(norms):
        path = tmp_path / f"steps.rank{rank}.jsonl"
        row = f'"step":3,"step_us":5.0,"loss":1,"gradient_norm_squared":{norm},"overhead_us":0,"profiled":false'
        path.write_text(
            f'{{"format":"paro-advise/steps","rank":{rank},"world_size":2}}\n'
            f'{{{row},"micro_batches":1,"peak_memory_bytes":1}}\n'
        )
        logs.append(read_step_log(SourceRef(path=path)))
    (step,) = captured_of(logs).steps
    assert step.diverged
    assert step.gradient_norm is None


def test_criteria_that_nobody_asked_for_are_not_printed(tmp_path):
    analysis = analyze(write_run(tmp_path, [fsdp_rank(rank, 2) for rank in range(2)]))
    sides = pair(analysis, [1e5 + at for at in range(9)], [9e4 + at for at in range(9)])
    for thresholds, is_there in ((Thresholds(), False), (Thresholds(max_recovery_s=60.0), True)):
        found = compare(*sides, None, Terms(thresholds=thresholds))
        assert [item.criterion for item in found.acceptance].count("recovery, s") == 1  # the JSON holds all
        for text in (comparison_text(found), comparison_markdown(found)):
            assert ("recovery, s" in text) == is_there
            assert "checkpoint interval" not in text


def test_what_rounds_to_nothing_has_no_minus(tmp_path):
    assert [signed_text(value) for value in (-0.04, 0.0, 0.04, -0.06)] == ["+0.0", "+0.0", "+0.0", "-0.1"]
    analysis = analyze(write_run(tmp_path, [fsdp_rank(rank, 2) for rank in range(2)]))
    found = compare(*pair(analysis, [1e6] * 9, [1e6 - 1] * 9), None)
    assert "-0.0" not in replace(found).text


def test_where_no_ho_ring_runs_the_prediction_of_the_backends_own_collectives_is_tested(tmp_path):
    """`run` uses them on GPUs whatever a plan names; what HO-Ring would take says nothing of them."""
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))
    made = recommend(calibration(), Limits())
    times = made.chosen.predicted.step_time_us
    ring = replace(made.chosen, triple="GGG", group_size=None, collectives=CollectiveBackend.HO_RING)
    slower = replace(times, p10=2 * times.p10, p50=2 * times.p50, p90=2 * times.p90)
    native = replace(ring, collectives=CollectiveBackend.NATIVE, predicted=replace(ring.predicted, step_time_us=slower))
    facts = replace(made.preconditions, world_size=2, micro_batches=analysis.run.micro_batches)
    plan = replace(made, preconditions=facts, chosen=ring, candidates=(ring, native))
    before, after = pair(analysis, [1e5] * 6, [8e4] * 6)
    for backend, tested in (("nccl", native), ("gloo", ring), (None, ring)):
        sides = before, replace(after, run=replace(after.run, backend=backend))
        found = compare(*sides, plan)
        step = found.predicted_vs_measured[0]
        assert (step.name, step.predicted) == ("step_time_us", tested.predicted.step_time_us.p50)
        is_told = "for the backend's own collectives, which ran in place of HO-Ring" in found.text
        assert is_told == (tested is native)
    untold = compare(before, replace(after, run=replace(after.run, backend="nccl")), replace(plan, candidates=(ring,)))
    assert untold.predicted_vs_measured == ()
    assert "the backend's own collectives ran: its prediction was not tested" in untold.text


@pytest.mark.parametrize(
    ("range_pct", "words"),
    [
        ((-1.6, -2.3, -1.1), "a loss of less than the 2.5 % by which repeats of one job differ"),
        ((-1.6, -2.3, 1.1), "which is no sure loss beyond the limit"),
        ((-4.0, -5.0, -3.0), ""),
    ],
)
def test_a_sure_loss_that_is_too_small_to_count_is_not_called_unsure(range_pct, words):
    change, low, high = range_pct
    throughput = Metric(
        name="throughput", unit="samples/s", before=1.0, after=1.0, change_pct=change, low_pct=low, high_pct=high,
        verdict=ChangeVerdict.SAME, samples="steps",
    )  # fmt: skip
    found = judge(Thresholds(), throughput, None, None, None)[0]
    assert found.passed is (None if words else False)
    assert found.text.endswith(words)


def test_analyses_are_compared_under_a_plan_that_knows_the_nodes(tmp_path, capsys):
    analysis = analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))
    made = recommend(calibration(), Limits())
    facts = replace(made.preconditions, world_size=2, micro_batches=analysis.run.micro_batches, gpus_per_node=2)
    (tmp_path / "plan.json").write_bytes(to_json(with_id(replace(made, preconditions=facts))))
    for name, times in (("a", [1e5] * 6), ("b", [8e4] * 6)):
        (tmp_path / f"{name}.json").write_bytes(to_json(replace(analysis, captured=captured(times))))
    words = ["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-q"]
    assert run([*words, "--plan", str(tmp_path / "plan.json")]) == 0
    assert run([*words, "--gpus-per-node", "2"]) == 2  # by the user's own word they would be made anew
    assert "an analysis was made without them" in capsys.readouterr().err


def test_steps_of_other_work_are_judged_by_what_they_do_in_a_second(analysis):
    """Twice the batch in steps 1.5 times as long: a third more tokens a second, and the reverse a quarter fewer."""
    sides = pair(analysis, [1e5] * 6, [1.5e5] * 6, inputs=("8x128 torch.int64",))
    terms = Terms(allow_unlike=("batch",))
    found, back = compare(*sides, None, terms), compare(sides[1], sides[0], None, terms)
    assert (found.verdict, back.verdict) == (ChangeVerdict.BETTER, ChangeVerdict.WORSE)
    assert found.text.startswith("Faster: throughput ")
    assert "(+33.3 %" in found.text
    assert back.text.startswith("Slower: throughput ")
    assert "(-25.0 %" in back.text
    assert found.passed
    assert not back.passed
    told = f"the runs differ: {found.unlike[0]}"
    for text in (comparison_text(found), comparison_markdown(found), comparison_junit(found).decode()):
        assert told in text.replace("The runs", "the runs")


@pytest.mark.parametrize("longer_pct", [2.4, 2.52, 2.6])
def test_a_change_counts_there_as_much_as_back(longer_pct, analysis):
    """A step 2.52 % longer is 2.46 % fewer steps a second: both are the same change."""
    sides = pair(analysis, [1e5] * 6, [1e5 * (1 + longer_pct / 100)] * 6)
    counts = longer_pct >= 2.5
    for order, verdict in ((sides, ChangeVerdict.WORSE), (sides[::-1], ChangeVerdict.BETTER)):
        found = compare(*order, None)
        wanted = verdict if counts else ChangeVerdict.SAME
        assert {m.verdict for m in found.metrics if m.name in {"step_time", "throughput", "device_hours"}} == {wanted}
        assert found.verdict == wanted
