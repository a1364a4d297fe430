"""Comparisons: verdicts with their ranges, unlike runs, criteria, the page, the notebook."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import analyze, write_run
from test_recommend import calibration
from test_report import Page
from trace_builder import fsdp_rank

from paro_advise.advisor.analysis.model import Analysis, StepTime, analysis_from_json
from paro_advise.advisor.cli import run
from paro_advise.advisor.comparison.acceptance import Thresholds
from paro_advise.advisor.comparison.bootstrap import change_between
from paro_advise.advisor.comparison.compare import Terms, compare
from paro_advise.advisor.comparison.model import comparison_from_json
from paro_advise.advisor.facts.capture_log import Captured, CapturedStep, captured_of
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.rendering.comparisons.comparison_page import Timelines, render_comparison
from paro_advise.advisor.rendering.comparisons.notebook import notebook_bytes
from paro_advise.advisor.rendering.page import Provenance
from paro_advise.advisor.rendering.texts.comparison_text import comparison_markdown
from paro_advise.core.documents import to_json
from paro_advise.errors import StalePlanError, UnlikeRunsError
from paro_advise.policies.plan import Verdict
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.logs.step_log import read_step_log

PROVENANCE = Provenance(version="0", created_utc="now", command="paro-advise compare a b")


def captured(times_us, **changes):
    steps = tuple(
        CapturedStep(
            step=number + 3, step_us=float(time), timed=True, micro_batches=2, loss=5.0 - number / 10, gradient_norm=1.0
        )
        for number, time in enumerate(times_us)
    )
    usual: dict[str, Any] = {
        "steps": steps,
        "median_step_us": float(np.median(times_us)),
        "profiler_slowdown": 1.2,
        "overhead_share": 0.01,
        "peak_memory_bytes": 1 << 30,
        "inputs": ("4x128 torch.int64",),
        "autocast": None,
        "world_size": 2,
        "local_world_size": 2,
        "num_ranks": 2,
        "device_memory_bytes": None,
        "torch_version": "2.13.0",
    }
    return Captured(**(usual | changes))


@pytest.fixture
def analysis(tmp_path):
    return analyze(write_run(tmp_path / "run", [fsdp_rank(rank, 2) for rank in range(2)]))


def pair(analysis, before, after, **changes) -> tuple[Analysis, Analysis]:
    return (
        replace(analysis, captured=captured(before)),
        replace(analysis, captured=captured(after, **changes)),
    )


def noisy(generator, count, factor=1.0, spread=0.03):
    return 100_000 * factor * np.exp(generator.normal(0, spread, count))


def test_equal_runs_are_the_same_and_five_percent_are_found(analysis):
    """100 pairs each of 20 steps with 3 % noise: 5 false alarms at most, and 90 of 100 changes of 5 % found."""
    generator = np.random.default_rng(7)
    same = found = 0
    for _ in range(100):
        before = noisy(generator, 20)
        same += compare(*pair(analysis, before, noisy(generator, 20)), None).verdict == "same"
        found += compare(*pair(analysis, before, noisy(generator, 20, 1.05)), None).verdict == "worse"
    assert same >= 95
    assert found >= 90


def test_bursts_of_slow_steps_are_no_change():
    """Neighbours vary together, as on shared machines: a burst on one side is no difference between runs."""
    generator = np.random.default_rng(11)
    wrong = 0
    for _ in range(200):
        noise = generator.normal(0, 0.03, 160)
        for place in range(1, len(noise)):
            noise[place] += 0.6 * noise[place - 1]
        steps = 100_000 * np.exp(noise)
        change = change_between(list(steps[:80]), list(steps[80:]))
        wrong += change.low > 0 or change.high < 0
    assert wrong <= 16  # 2 % are meant; drawing single steps gives 53


@pytest.mark.parametrize("counts", [(100, 4), (100, 5), (100, 6), (6, 100), (400, 38), (4, 4)])
def test_runs_of_unlike_length_are_compared(counts):
    """One side may drift for long while the other has a handful of steps."""
    generator = np.random.default_rng(5)
    sides = [list(100_000 * np.exp(np.cumsum(generator.normal(0, 0.01, count)))) for count in counts]
    change = change_between(*sides)
    assert change.low <= change.value <= change.high


def test_few_or_wild_steps_are_unclear(analysis):
    generator = np.random.default_rng(1)
    assert compare(*pair(analysis, [1e5, 1e5], [2e5, 2e5]), None).verdict == "unclear"
    wild = compare(*pair(analysis, noisy(generator, 6, 1, 0.5), noisy(generator, 6, 1.2, 0.5)), None)
    assert wild.verdict == "unclear"
    assert wild.text.startswith("Cannot tell")


def test_steps_that_vary_together_are_paired():
    """Sequences of other lengths make steps differ twofold; in each step 2 % are lost."""
    generator = np.random.default_rng(3)
    work = 100_000 * generator.uniform(1, 2, 12)
    change = change_between(list(work), list(work * 1.02 * np.exp(generator.normal(0, 0.002, 12))), paired=True)
    assert change.low > 0
    assert change.value == pytest.approx(0.02, abs=0.003)
    assert change_between(list(work), list(work * 1.02)).low < 0


def test_every_change_is_that_of_the_numbers_beside_it(analysis):
    """One slow step of eight, as on shared machines: the mean of the middle half, before and after."""
    generator = np.random.default_rng(5)
    before = [*noisy(generator, 7), 300_000.0]
    found = compare(*pair(analysis, before, noisy(generator, 8, 0.8)), None, Terms(price_per_gpu_hour=2.0))
    assert found.step.before == pytest.approx(sum(sorted(before)[2:6]) / 4)
    changed = [metric for metric in found.metrics if metric.change_pct is not None]
    assert {"step_time", "throughput", "cost", "compute"} <= {metric.name for metric in changed}
    for metric in changed:
        assert metric.change_pct == pytest.approx(100 * (metric.after / metric.before - 1)), metric.name
    assert f"speed-up {found.step.before / found.step.after:.2f}x" in found.text


def test_steps_that_only_one_run_has_are_left_out(analysis):
    """The run before went on for two slow steps."""
    before = [*[100_000.0] * 8, 400_000.0, 400_000.0]
    found = compare(*pair(analysis, before, [80_000.0] * 8), None)
    assert (found.before.num_steps, found.after.num_steps) == (8, 8)
    assert found.step.before == 100_000.0


def test_throughput_cost_and_energy_follow_from_the_step(analysis):
    """4 x 128 tokens, 2 micro-batches, 2 ranks: 2,048 tokens in 0.1 s, then in 0.08 s."""
    terms = Terms(price_per_gpu_hour=2.0, watts_per_gpu=500.0)
    found = compare(*pair(analysis, [100_000.0] * 6, [80_000.0] * 6), None, terms)
    metrics = {metric.name: metric for metric in found.metrics}
    assert found.verdict == "better"
    assert metrics["throughput"].before == pytest.approx(2048 / 0.1)
    assert metrics["throughput"].change_pct == pytest.approx(25.0)
    hours = 2 * (1e6 / (2048 / 0.1)) / 3600  # of both devices, for a million tokens
    assert metrics["device_hours"].before == pytest.approx(hours)
    assert metrics["cost"].before == pytest.approx(2 * hours)
    assert metrics["energy"].before == pytest.approx(0.5 * hours)
    assert metrics["cost"].change_pct == pytest.approx(-20.0)


def test_pauses_cost_what_they_take_though_usual_steps_are_the_same(analysis):
    """Every tenth step of the run after pauses for 900 us: it does 101/191 of the work in a second."""
    usual = [100.0 + (number % 3) for number in range(60)]
    pausing = [time + 900.0 * (number % 10 == 5) for number, time in enumerate(usual)]
    found = compare(*pair(analysis, usual, pausing), None, Terms(price_per_gpu_hour=2.0))
    metrics = {item.name: item for item in found.metrics}
    assert metrics["step_time"].change_pct == pytest.approx(0.0, abs=0.5)
    assert metrics["step_time_mean"].after == pytest.approx(np.mean(pausing))
    for name, factor in (("throughput", 101 / 191), ("cost", 191 / 101), ("device_hours", 191 / 101)):
        assert metrics[name].after / metrics[name].before == pytest.approx(factor, rel=0.001)
    assert found.verdict == metrics["throughput"].verdict == "worse"
    assert "6 of 60 steps after took over 1.5 times the usual and make the mean 191 us, not 101 us" in found.text
    same = compare(*pair(analysis, pausing, pausing), None, Terms())
    assert same.verdict == "same"
    # Usual steps are a tenth faster, and the run does half of the work: that is no gain.
    faster = [0.9 * time + 900.0 * (number % 10 == 5) for number, time in enumerate(usual)]
    assert compare(*pair(analysis, usual, faster), None, Terms()).verdict == "worse"


def test_steps_of_two_lengths_are_no_stalls_and_count_all(analysis):
    """Every third batch is twice as long: none of them stalled, and the mean is what costs."""
    usual = [100.0 + (number % 2) for number in range(60)]
    mixed = [time * (2 if number % 3 == 0 else 1) for number, time in enumerate(usual)]
    assert StepTime.of(mixed).stalled == (0, 0.0)
    found = compare(*pair(analysis, usual, mixed), None, Terms())
    throughput = next(item for item in found.metrics if item.name == "throughput")
    assert throughput.after / throughput.before == pytest.approx(np.mean(usual) / np.mean(mixed), rel=0.001)


@pytest.mark.parametrize(
    ("changes", "fact"),
    [({"inputs": ("8x128 torch.int64",)}, "batch"), ({"autocast": "torch.bfloat16"}, "precision")],
)
def test_unlike_runs_are_refused_unless_allowed(analysis, changes, fact):
    sides = pair(analysis, [1e5] * 6, [1e5] * 6, **changes)
    with pytest.raises(UnlikeRunsError, match=fact):
        compare(*sides, None)
    assert compare(*sides, None, Terms(allow_unlike=(fact,))).unlike[0].startswith(fact)


def test_another_number_of_ranks_is_refused(analysis):
    other = replace(analysis, run=replace(analysis.run, world_size=4))
    with pytest.raises(UnlikeRunsError, match="world_size 2 before and 4 after"):
        compare(analysis, other, None)


def test_criteria_pass_fail_or_are_not_judged(analysis):
    sides = pair(analysis, [100_000.0] * 6, [90_000.0] * 6)
    thresholds = Thresholds(min_throughput_gain_pct=20.0, max_recovery_s=60.0, recovery_s=30.0)
    found = compare(*sides, None, Terms(thresholds=thresholds, device_memory_bytes=1.05 * (1 << 30)))
    passed = {item.criterion: item.passed for item in found.acceptance}
    assert passed == {
        "throughput gain, %": False,
        "loss difference, %": True,
        "memory headroom, %": False,
        "recovery, s": True,
        "checkpoint interval, s": None,
    }


@pytest.mark.parametrize(
    ("limit", "after_us", "passed"),
    [
        (0.0, [80_000.0, 130_000.0, 90_000.0, 115_000.0, 100_000.0, 102_000.0], None),  # noise around no change
        (0.0, [90_000.0] * 6, True),
        (0.0, [110_000.0] * 6, False),
        (0.0, [100_500.0] * 6, None),  # sure, but less than repeats of a job differ by
        (-15.0, [110_000.0] * 6, True),
        (-5.0, [110_000.0] * 6, False),
        (5.0, [80_000.0, 130_000.0, 90_000.0, 115_000.0, 100_000.0, 102_000.0], False),  # a gain must be proved
    ],
)
def test_what_noise_cannot_tell_fails_only_where_a_gain_is_asked_for(analysis, limit, after_us, passed):
    sides = pair(analysis, [100_000.0] * 6, after_us)
    found = compare(*sides, None, Terms(thresholds=Thresholds(min_throughput_gain_pct=limit)))
    assert found.acceptance[0].passed is passed
    assert found.passed is (passed is not False)


def test_a_loss_that_turns_into_no_number_fails_even_after_json(analysis, tmp_path):
    before, after = pair(analysis, [1e5] * 6, [1e5] * 6)
    steps = [replace(step, loss=None, diverged=True) if step.step == 5 else step for step in after.captured.steps]
    after = replace(after, captured=replace(after.captured, steps=tuple(steps)))
    found = compare(analysis_from_json(to_json(before), "a"), analysis_from_json(to_json(after), "b"), None)
    assert (found.parity.num_diverged_before, found.parity.num_diverged_after, found.parity.num_steps) == (0, 1, 5)
    assert next(item.passed for item in found.acceptance if item.criterion.startswith("loss")) is False
    assert comparison_from_json(to_json(found), "c") == found


def test_unlike_work_is_not_taken_for_speed(analysis):
    """Twice the batch in equal steps, allowed by the user: twice the tokens a second, half the device hours."""
    sides = pair(analysis, [1e5] * 6, [1e5] * 6, inputs=("8x128 torch.int64",))
    found = compare(*sides, None, Terms(allow_unlike=("batch",)))
    metrics = {metric.name: metric for metric in found.metrics}
    assert metrics["throughput"].change_pct == pytest.approx(100.0)
    assert metrics["device_hours"].change_pct == pytest.approx(-50.0)
    assert "device hours less" not in render_comparison(found, Timelines(), PROVENANCE)


def test_a_plan_for_other_runs_is_refused_and_one_that_did_not_run_not_tested(analysis):
    made = recommend(calibration(), Limits())
    sides = pair(analysis, [1e5] * 6, [8e4] * 6)
    with pytest.raises(StalePlanError, match="world_size 8, they have 2"):
        compare(*sides, made)
    facts = replace(made.preconditions, world_size=2, micro_batches=analysis.run.micro_batches)
    found = compare(*sides, replace(made, preconditions=facts))
    assert found.predicted_vs_measured == ()
    assert "but GGG ran: its prediction was not tested" in found.text
    whole = replace(made.chosen, triple="III", group_size=2)  # of both ranks: the same as GGG
    found = compare(*sides, replace(made, preconditions=facts, chosen=whole))
    assert [item.name for item in found.predicted_vs_measured] == ["step_time_us", "speedup"]
    # Nothing was predicted, or nothing can be told: no word on how good a prediction was.
    ran = replace(made, preconditions=facts, chosen=whole)
    noisy = pair(analysis, [1e5, 2e5, 5e4, 3e5], [8e4, 3e5, 4e4, 2e5])
    for runs, plan, words in (
        (sides, replace(ran, verdict=Verdict.KEEP), "there is no prediction to test"),
        (sides, replace(ran, verdict=Verdict.MEASURE_FIRST), "it has no prediction to test"),
        (noisy, ran, "Too little is known"),
    ):
        found = compare(*runs, plan)
        assert found.predicted_vs_measured == ()
        assert words in found.text
        assert "than predicted" not in found.text


REST = '"overhead_us":0,"profiled":false,"micro_batches":1,"peak_memory_bytes":1'
LINES = [
    '{"step":3,"step_us":-5,"loss":1,"gradient_norm_squared":1,' + REST + "}",
    '{"step":4,"step_us":1e300,"loss":1,"gradient_norm_squared":1,' + REST + "}",
    '{"step":5,"step_us":"x"}',
    "[" * 5000,
    "\x00",
    '{"step":6,"step_us":5.0,"loss":"nan","gradient_norm_squared":1e300,' + REST + "}",
]


def test_impossible_steps_are_counted_and_left_out(tmp_path):
    path = tmp_path / "steps.rank0.jsonl"
    path.write_text('{"format":"paro-advise/steps","rank":0,"world_size":1}\n' + "\n".join(LINES) + "\n")
    log = read_step_log(SourceRef(path=path))
    assert log.num_broken == 5
    assert [row.step for row in log.rows] == [6]
    found = captured_of([log])
    assert found.steps[0].diverged
    assert found.steps[0].loss is None


def test_the_exit_code_tells_a_regression(analysis, tmp_path, capsys):
    for name, times in (("a", [100_000.0] * 6), ("b", [120_000.0] * 6)):
        (tmp_path / f"{name}.json").write_bytes(to_json(replace(analysis, captured=captured(times))))
    assert run(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "-q"]) == 5
    assert run(["compare", str(tmp_path / "b.json"), str(tmp_path / "a.json"), "-q"]) == 0
    assert "Faster" in capsys.readouterr().out
    code = ["compare", str(tmp_path / "b.json"), str(tmp_path / "a.json"), "-q", "--min-gain", "50"]
    assert run(code) == 5


def page_of(analysis):
    found = compare(*pair(analysis, [100_000.0] * 6, [80_000.0] * 6), None)
    return found, Page(render_comparison(found, Timelines(), PROVENANCE))


def test_nothing_leaves_the_page_and_every_chart_is_described(analysis):
    found, page = page_of(analysis)
    for tag, name, value in page.attributes:
        assert name != "src", (tag, value)
        if name == "href":
            assert value.startswith(("#", "data:,"))
    assert len(page.ids) == len(set(page.ids))
    for _, values in ((tag, values) for tag, values in page.tags if tag == "svg" and values.get("role") == "img"):
        assert set(values["aria-labelledby"].split()) <= set(page.ids)
    assert found.text in "".join(page.texts)


def test_numbers_in_tables_stand_in_the_data_block(analysis):
    _, page = page_of(analysis)
    block = json.dumps(json.loads(page.scripts["paro-data"]))
    known = {round(float(number), 6) for number in re.findall(r"-?\d+\.?\d*(?:[eE][+-]?\d+)?", block)}
    values = [
        round(float(values["data-sort"]), 6) for tag, values in page.tags if tag == "td" and "data-sort" in values
    ]
    assert len(values) > 30
    assert set(values) <= known


def test_a_report_is_read_back(analysis, tmp_path, capsys):
    found = compare(*pair(analysis, [100_000.0] * 6, [80_000.0] * 6), None)
    path = tmp_path / "r.html"
    path.write_text(render_comparison(found, Timelines(), PROVENANCE))
    assert run(["show", str(path), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(to_json(found))


def test_the_notebook_recomputes_the_figures(analysis, capsys):
    found = compare(*pair(analysis, [100_000.0] * 6, [80_000.0] * 6), None)
    book = json.loads(notebook_bytes(found))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    space: dict = {}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    assert "speed-up: 1.250" in capsys.readouterr().out


def test_markdown_cannot_be_broken_by_names(analysis):
    run_ = replace(analysis.run, framework="a|b<script>")
    before, after = (replace(side, run=run_) for side in pair(analysis, [1e5] * 6, [9e4] * 6))
    text = comparison_markdown(compare(before, after, None))
    assert "<script>" not in text
    assert "a\\|b" in text


def test_an_index_lists_all_comparisons(analysis, tmp_path, capsys):
    for name, after in (("one", 80_000.0), ("two", 110_000.0)):
        found = compare(*pair(analysis, [100_000.0] * 6, [after] * 6), None)
        (tmp_path / f"{name}.json").write_bytes(to_json(found))
    (tmp_path / "one.html").write_text(
        render_comparison(compare(*pair(analysis, [100_000.0] * 6, [80_000.0] * 6), None), Timelines(), PROVENANCE)
    )
    (tmp_path / "other.json").write_text("{}")
    assert run(["index", str(tmp_path)]) == 0
    page = Page((tmp_path / "index.html").read_text())
    text = "".join(page.texts)
    assert "1 of 2 runs became faster." in text
    assert "one.html" in text
    assert "two.json" in text
    assert run(["index", str(tmp_path)]) == 1  # never over a file of the user's


@pytest.mark.parametrize(("stretch", "failures"), [(1.0, 0), (1.3, 1)], ids=["alike", "slower"])
def test_ci_systems_read_the_judgement(tmp_path, stretch, failures):
    """The second run takes 1.3 times as long: the step time fails, and the exit code says so."""
    import xml.etree.ElementTree as ET

    from trace_builder import fsdp_rank

    for name, factor in (("before", 1.0), ("after", stretch)):
        builders = [fsdp_rank(rank, steps=12) for rank in range(2)]
        for builder in builders:
            for event in builder.events:
                event["ts"] = builder.offset + (event["ts"] - builder.offset) * factor
                event["dur"] *= factor
        write_run(tmp_path / name, builders)
    target = tmp_path / "result.xml"
    code = run(["compare", str(tmp_path / "before"), str(tmp_path / "after"), "--junit", str(target), "-q"])
    assert code == (5 if failures else 0)
    suite = ET.parse(target).getroot()
    cases = suite.findall("testcase")
    assert (suite.tag, int(suite.get("tests"))) == ("testsuite", len(cases))
    failed = [case.get("name") for case in cases if case.find("failure") is not None]
    assert int(suite.get("failures")) == len(failed)
    assert ("step time" in failed) == bool(failures)


def test_the_action_runs_its_script(tmp_path):
    """The script of the GitHub action, with a stand-in for what the runner gives it."""
    import os
    import subprocess
    import sys

    from conftest import ROOT
    from trace_builder import fsdp_rank

    text = (ROOT / ".github" / "actions" / "compare" / "action.yml").read_text()
    script = text.rpartition("run: |\n")[2].replace("\n        ", "\n").lstrip()
    for name in ("before", "after"):
        write_run(tmp_path / name, [fsdp_rank(rank, steps=12) for rank in range(2)])
    summary = tmp_path / "summary.md"
    given = {
        "BEFORE": "before",
        "AFTER": "after",
        "MIN_GAIN": "0",
        "ACCEPTANCE": "",
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **given, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "step" in summary.read_text()
    assert (tmp_path / "comparison.xml").exists()


@pytest.mark.parametrize(("factor", "is_said"), [(0.5, True), (1.05, False)])
def test_traces_that_compute_another_time_may_do_other_work(analysis, factor, is_said):
    """Half a batch computes half as long, and nothing but that tells it in traces."""
    parts = analysis.breakdown_us
    after = replace(analysis, breakdown_us=replace(parts, compute=factor * parts.compute))
    assert ("whether both runs do the same work is not known" in compare(analysis, after, None).text) == is_said
    captured_pair = pair(analysis, [1e5, 1e5], [1e5, 1e5])
    assert "the same work is not known" not in compare(*captured_pair, None).text


def test_traces_of_other_devices_and_other_types_are_not_compared(analysis):
    other_device = replace(analysis, run=replace(analysis.run, device_name="NVIDIA A100"))
    with pytest.raises(UnlikeRunsError, match="device NVIDIA H100 before and NVIDIA A100 after"):
        compare(analysis, other_device, None)
    in_fp32 = tuple(replace(entry, dtype="Float") for entry in analysis.collectives)
    with pytest.raises(UnlikeRunsError, match="precision bfloat16 before and float after"):
        compare(analysis, replace(analysis, collectives=in_fp32), None)
    assert compare(analysis, other_device, None, Terms(allow_unlike=("device",))).unlike
    # Sums in fewer bits are quicker and other numbers, in whatever type parameters are gathered.
    reduced = tuple(
        replace(entry, dtype="Float") if entry.state == "gradient" else entry for entry in analysis.collectives
    )
    with pytest.raises(
        UnlikeRunsError, match="gradients reduced in bfloat16 before and gradients reduced in float after"
    ):
        compare(analysis, replace(analysis, collectives=reduced), None)
    # FSDP2 gathers parameters of several types as bytes, which says nothing of them.
    as_bytes = tuple(replace(entry, dtype="Byte") for entry in analysis.collectives)
    assert compare(analysis, replace(analysis, collectives=as_bytes), None).unlike == ()


def test_a_change_that_is_too_small_to_count_is_not_called_noise(analysis):
    """Steps of 100 ms and of 99, each steady to a few microseconds: the range leaves out zero."""
    before, after = ([start + 1e0 * step for step in range(20)] for start in (100e3, 99e3))
    assert compare(*pair(analysis, before, after), None).text.startswith("The same but for less than the 2.5 %")
    assert compare(*pair(analysis, before, before), None).text.startswith("The same within noise")
