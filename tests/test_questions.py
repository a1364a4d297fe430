"""What people ask of a plan, what gains beside the strategy, and what every prediction must keep."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import analyze
from test_descriptions import GPUS, PLAIN, described, described_text

from paro_advise.advisor.cli import run
from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.prediction.advice.questions import Question
from paro_advise.advisor.prediction.advice.wanted import Wanted
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.fitting.calibrate import calibrate
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]


# ---- questions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("efficiency=80", 0.8), ("communication=0.5%", 0.005), ("efficiency=1%", 0.01)]
)
def test_targets_are_in_percent(text, share):
    assert Question.parse(text).share == pytest.approx(share)


@pytest.mark.parametrize(("strategy", "is_said"), [("NNN", True), ("GGG", False)])
def test_a_run_of_one_micro_batch_does_not_show_which_of_several_are_reduced(strategy, is_said):
    """FSDP2 adds gradients up across groups in each of them by itself, DDP as well; predicted is once a step."""
    text = PLAIN.replace('strategy = "NNN"', f'strategy = "{strategy}"')
    asked = [Question.parse("micro-batches=4")]
    (found,) = recommend(calibrate_described(described(text)), Limits(), questions=asked).answers
    assert ("in the last micro-batch alone" in found.text) is is_said


@pytest.mark.parametrize("text", ["efficiency=0.8", "communication=0.1", "efficiency=1"])
def test_a_target_that_may_be_a_share_is_asked_back(text):
    with pytest.raises(UsageError, match="must be in percent") as raised:
        Question.parse(text)
    assert f"{text.partition('=')[0]}=" in raised.value.hint


@pytest.mark.parametrize("text", ["", "nodes", "nodes=0", "nodes=1.5", "nodes=x", "cost=3", "efficiency=80%,nodes=4", "nodes=2,nodes=4", "communication=120%", "inter-gbps=inf"])  # fmt: skip
def test_what_is_no_question_is_refused(text):
    with pytest.raises(UsageError, match="--what-if"):
        Question.parse(text)


def answers(*texts, source=GPUS):
    plan = recommend(
        calibrate_described(described(source)), Limits(), questions=[Question.parse(text) for text in texts]
    )
    return plan, plan.answers


def test_the_same_cluster_gives_the_same_step():
    plan, (same,) = answers("nodes=16,inter-gbps=200")
    assert same.baseline_step_us.p50 == pytest.approx(plan.baseline.predicted.step_time_us.p50, rel=0.03)


def test_a_stated_bandwidth_is_that_of_a_whole_node_beside_tensor_parallelism():
    """Four groups of two data-parallel ranks share the cards of each node: 200 GB/s is what the run has."""
    cut = GPUS.replace("[run]", "[parallel]\ntensor = 4\n[run]").replace("mfu_pct = 27", "mfu_pct = 12")
    plan, (same, quick, bound) = answers("inter-gbps=200", "inter-gbps=400", "communication=10%", source=cut)
    today = plan.baseline.predicted.step_time_us.p50
    assert same.baseline_step_us.p50 == pytest.approx(today, rel=0.03)
    assert quick.baseline_step_us.p50 < 0.95 * today
    assert "at today's 200 GB/s" in bound.text


def test_groups_that_do_not_fit_fewer_nodes_are_no_error():
    plan, (fewer,) = answers("nodes=1", source=GPUS.replace('"GGG"', '"III/16"'))
    assert plan.text
    assert fewer.text.startswith("8 data-parallel ranks on 1 node")


def test_quicker_links_and_more_nodes_change_the_step_as_they_must():
    _, (slow, quick, wide, small) = answers("inter-gbps=50", "inter-gbps=800", "nodes=64", "micro-batches=1")
    assert quick.baseline_step_us.p50 < slow.baseline_step_us.p50
    assert wide.text == "512 data-parallel ranks on 64 nodes"
    assert wide.best_step_us.p50 <= wide.baseline_step_us.p50 * 1.001
    assert small.baseline_step_us.p50 < wide.baseline_step_us.p50 / 1.5


@pytest.mark.parametrize("name", ["ds-zero3", "fsdp2-inter-bw", "ddp-big"])
def test_todays_communication_is_what_the_analysis_says(name):
    """Arithmetic that collectives slow on its device is arithmetic in both."""
    analysis = analyze(ROOT / "tests/data/nccl_like" / name / "traces")
    parts = analysis.breakdown_us
    plan = recommend(calibrate(analysis), Limits(), questions=[Question.parse("communication=10%")])
    today = int(re.search(r"(\d+)% (?:at today's|remain)", plan.answers[0].text)[1])
    assert today == pytest.approx(100 * parts.exposed_communication / parts.step_us, abs=5)


def test_changes_hold_at_once_in_whatever_order_they_are_written():
    """Listed rates fall with the nodes: 100 GB/s on 64 of them is twice what those have, not half of what 16 have."""
    source = described_text(GPUS, **{"inter_gbps = 200": "links = { all_gather = { 1 = 250, 16 = 200, 64 = 50 } }"})
    _, (first, second, as_listed) = answers(
        "nodes=64,inter-gbps=100", "inter-gbps=100,nodes=64", "nodes=64", source=source
    )
    assert first.best_step_us == second.best_step_us
    assert second.baseline_step_us == first.baseline_step_us
    assert first.baseline_step_us.p50 < as_listed.baseline_step_us.p50


def test_the_bandwidth_that_is_named_for_a_target_meets_it():
    """Asked for 18 %: with the bandwidth that is named, exposed communication is 18 % of the step."""
    plan, (target, less) = answers("communication=18%", "communication=10%")
    needed = float(target.text.split("from ")[1].split(" GB/s")[0])
    calibration = replace(calibrate_described(described(GPUS)), compute_us=plan.origin.compute_us)
    links = measured_links(calibration)
    factor = needed / calibration.inter_gbps.value
    quick = replace(links, inter_gbps=links.inter_gbps * factor, pod_gbps=links.pod_gbps * factor)
    step = float(step_us(calibration, baseline_candidate(calibration), quick))
    assert (step - calibration.compute_us) / step == pytest.approx(0.18, abs=0.002)
    assert less.text.startswith("GGG native: not by inter-node bandwidth alone, ")  # links inside nodes bound it, too


def test_efficiency_names_the_largest_cluster_that_keeps_it():
    _, (easy, hard) = answers("efficiency=1%", "efficiency=99%")
    assert "beyond 1024 nodes" in easy.text
    assert "up to 16 nodes" in hard.text


def test_answers_stand_in_text_page_and_json(tmp_path, capsys):
    gpus_toml = tmp_path / "run.toml"
    gpus_toml.write_text(GPUS, encoding="utf-8")
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    words = ["--what-if", "nodes=64", "--what-if", "efficiency=80%", "-o", str(plan), "--html", str(page)]
    assert run(["recommend", str(gpus_toml), *words]) == 0
    assert "What if nodes=64: 512 data-parallel ranks on 64 nodes" in capsys.readouterr().out
    assert [item["asked"] for item in json.loads(plan.read_text())["answers"]] == ["nodes=64", "efficiency=80%"]
    assert "What you asked" in page.read_text(encoding="utf-8")


def test_a_question_that_changes_nothing_agrees_with_the_table():
    """Where the optimizer's states are whole today, the plan that shards them does not pay for whole ones."""
    text = described_text(
        GPUS,
        **{
            '"GGG"': '"NNN"',
            "mfu_pct = 27": "mfu_pct = 35",
            "= 200": "= 400",
            "micro_batches = 2": "micro_batches = 1",
        },
    )
    plan = recommend(
        calibrate_described(described(text)), Limits(device_memory_bytes=200e9), questions=[Question.parse("nodes=16")]
    )
    (same,) = plan.answers
    assert same.baseline_step_us.p50 == pytest.approx(plan.baseline.predicted.step_time_us.p50, rel=0.02)
    assert same.chosen_step_us.p50 == pytest.approx(plan.chosen.predicted.step_time_us.p50, rel=0.02)
    assert same.best_step_us.p50 <= same.chosen_step_us.p50


def test_what_nobody_measured_widens_answers_too():
    plan, (same,) = answers("nodes=16", source=GPUS.replace("mfu_pct = 27", "compute_mfu_pct = [20, 60]"))
    assert same.baseline_step_us.p90 / same.baseline_step_us.p10 > 2
    assert plan.baseline.predicted.step_time_us.p50 == pytest.approx(same.baseline_step_us.p50, rel=0.02)


@pytest.mark.parametrize(("parallel", "ranks"), [("pipeline = 2", 64), ("tensor = 16", 8)])
def test_nodes_of_a_question_are_those_of_the_job(parallel, ranks):
    text = GPUS.replace("[run]", f"[parallel]\n{parallel}\n[run]").replace("mfu_pct = 27", "mfu_pct = 5")
    _, (same, double) = answers("nodes=16", "nodes=32", source=text)
    assert same.text == ""
    assert double.text == f"{2 * ranks} data-parallel ranks on 32 nodes"


def test_groups_that_do_not_fit_a_changed_cluster_are_said():
    plan = recommend(
        calibrate_described(described(GPUS)),
        Limits(),
        wanted=Wanted.parse("III/32"),
        questions=[Question.parse("nodes=1"), Question.parse("nodes=3")],
    )
    small, odd = plan.answers
    assert small.text == "8 data-parallel ranks on 1 node; groups of 32 do not fit them"
    assert small.chosen_step_us is None
    assert small.best_step_us is not None
    assert "24 data-parallel ranks" in odd.text


def test_the_stated_bandwidth_changes_nothing_from_one_node_to_four():
    text = GPUS.replace("nodes = 16", "nodes = 1")
    _, (four, stated) = answers("nodes=4", "nodes=4,inter-gbps=200", source=text)
    assert four.baseline_step_us == stated.baseline_step_us


def test_what_was_looked_at_only_so_far_is_said():
    _, (easy,) = answers("communication=99%")
    assert "as far as was looked" in easy.text


# ---- beside the strategy --------------------------------------------------------------------------------------


def levers_of(text, **limits):
    plan = recommend(calibrate_described(described(text)), Limits(**limits), wanted=Wanted.parse("NNN"))
    return plan, {lever.what.split(",")[0].split(" in ")[0]: lever for lever in plan.levers}


def test_16_bit_reductions_halve_the_bytes_and_change_the_numbers():
    """Of 1,000 ms 48.4 are bytes of the all-reduce in fp32, and latency stays."""
    plan, found = levers_of(PLAIN.replace("step_time_ms = 1000", "step_time_ms = 400"))
    lever = found["gradients reduced"]
    all_reduce_ms = 2 * 4e9 * 31 / 32 / 160e9 * 1e3
    assert lever.speedup_now.p50 == pytest.approx(400 / (400 - all_reduce_ms / 2), rel=0.01)
    assert lever.changes_numbers
    assert plan.chosen.triple == "NNN"  # and the plan itself has none of it


def test_larger_micro_batches_gather_less_often():
    """GGG of 4 micro-batches, nothing beside compute: with 2 of them half of the gathers and scatters are left."""
    text = PLAIN.replace('strategy = "NNN"', 'strategy = "GGG"\nmicro_batches = 4').replace("= 1000", "= 4000")
    calibration = replace(calibrate_described(described(text)), overlaps_gathers=False)
    step_ms = float(step_us(calibration, baseline_candidate(calibration), measured_links(calibration))) / 1e3
    basis_plan = recommend(calibration, Limits(other_bytes=10e9, device_memory_bytes=20e9))
    lever = next(item for item in basis_plan.levers if item.what.startswith("micro-batches twice"))
    once_ms = ((2e9 + 2e9 * 9 / 10) / 100e9 + 4e9 / 80e9) * 31 / 32 * 1e3 + (10 + 9 + 10) * 31 * (14 + 35) / 8 / 1e3
    assert lever.speedup_now.p50 == pytest.approx(step_ms / (step_ms - 2 * once_ms), rel=0.02)
    assert lever.more_bytes == pytest.approx(10e9)
    assert not lever.fits  # twice the activations, of 16 GB that may be planned


def test_levers_stand_in_text_and_page(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(PLAIN.replace("= 1000", "= 400"), encoding="utf-8")
    assert run(["recommend", str(path), "--strategy", "NNN", "--html", str(tmp_path / "plan.html")]) == 0
    out = capsys.readouterr().out
    assert "Beside the strategy, nothing of it in the plan:" in out
    # 2 bytes less for each of 1e9 whole gradients, and in the buckets that DDP copies all of them into.
    less_gib = (2 * 1e9 + 2 * 1e9) / 2**30
    assert f"gradients reduced in 16 bits in place of fp32: {less_gib:.2f} GiB less memory; changes the numbers" in out
    assert "Beside the strategy" in (tmp_path / "plan.html").read_text(encoding="utf-8")


# ---- what every prediction must keep --------------------------------------------------------------------------


def test_predictions_of_random_runs_keep_what_they_must():
    """60 seeds as `make bench-invariants` checks 16,000 others."""
    words = [str(ROOT / "benchmarks/bench_invariants.py"), "--runs", "60", "--seed", "500000", "--candidates", "4"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "; 0 broke something" in done.stdout
