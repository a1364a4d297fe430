"""Predictions made of recordings on a GPU, against what ran there afterwards (tests/data/README.md, gpu_loops)."""

from __future__ import annotations

import gzip
import json
import statistics

import pytest
from conftest import ROOT

from paro_advise.advisor import api
from paro_advise.advisor.cli import run
from paro_advise.policies.strategy import CollectiveBackend

LOOPS = ROOT / "tests/data/gpu_loops"
WARM_UP = 3  # of the steps whose times are known


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PARO_ADVISE_CACHE", str(tmp_path / "cache"))


def steps_of(framework):
    """The step logs of both ranks, while they were recorded."""
    logs = [(LOOPS / framework / f"steps.rank{rank}.jsonl").read_text(encoding="utf-8") for rank in (0, 1)]
    return [json.loads(line) for log in logs for line in log.splitlines()[1:]]


def measured_us(framework, strategy):
    """The median step of both ranks, without the first ones."""
    truth = json.loads((LOOPS / framework / "truth.json").read_text(encoding="utf-8"))
    return statistics.median(time for rank in truth["step_us_of_ranks"][strategy] for time in rank[WARM_UP:])


@pytest.mark.parametrize(("framework", "strategy"), [("fsdp2", "NNG"), ("fsdp2", "NGG"), ("ddp", "NNG")])
def test_what_run_did_on_a_gpu_lies_in_the_predicted_range(framework, strategy):
    plan = api.recommend(LOOPS / framework, strategy=strategy, allow_untested=True).plan
    assert (plan.chosen.triple, plan.chosen.collectives) == (strategy, CollectiveBackend.NATIVE)
    step = plan.chosen.predicted.step_time_us
    assert step.p10 <= measured_us(framework, strategy) <= step.p90


def test_what_fsdp2_itself_takes_is_predicted_from_a_recording_of_ddp():
    """The same model, by FSDP2 as it is: its own recording says how long that takes."""
    plan = api.recommend(LOOPS / "ddp", strategy="GGG", allow_untested=True).plan
    rows = [row for row in steps_of("fsdp2") if row["step"] > WARM_UP and not row["profiled"]]
    by_fsdp2_us = statistics.median(row["step_us"] for row in rows)
    step = plan.chosen.predicted.step_time_us
    assert step.p10 <= by_fsdp2_us <= step.p90


def test_a_plan_says_that_only_our_runtime_does_it_and_what_comes_next(tmp_path, capsys):
    words = [
        "recommend",
        str(LOOPS / "fsdp2"),
        "--strategy",
        "NNG",
        "--allow-untested",
        "-o",
        str(tmp_path / "plan.json"),
    ]
    assert run(words) == 0
    told = capsys.readouterr()
    assert "only `paro-advise run` does it, which was never timed on more than one GPU" in told.out
    assert f"next: paro-advise run --plan {tmp_path / 'plan.json'}" in told.err


def test_without_leave_a_plan_chooses_what_the_framework_itself_runs():
    plan = api.recommend(LOOPS / "fsdp2").plan
    assert plan.chosen.exact_frameworks
    ours = [
        choice
        for choice in plan.candidates
        if choice.triple == "NNG" and choice.collectives == CollectiveBackend.NATIVE
    ]
    assert [choice.eligible for choice in ours] == [False]
    assert "--allow-untested lets a plan choose it" in ours[0].reason


def test_replicating_by_ddp_needs_its_buckets_beside_the_gradients():
    """Whole parameters, gradients and two moments of Adam, in fp32; and the buckets that gradients are copied into.

    More than that DDP took on the same GPU: its buckets are made anew after the first backward pass.
    """
    plan = api.recommend(LOOPS / "fsdp2").plan
    copies = 5 * 4 * plan.preconditions.parameter_count
    whole = [
        choice
        for choice in plan.candidates
        if (choice.triple, choice.collectives, choice.variant) == ("NNN", "native", "")
    ]
    assert [choice.predicted.memory_bytes >= copies for choice in whole] == [True]
    assert copies < whole[0].predicted.peak_bytes < max(row["peak_memory_bytes"] for row in steps_of("ddp"))


@pytest.mark.parametrize(("strategy", "copies"), [("NNG", 3), ("GGG", 2)])
def test_the_buckets_of_ddp_are_no_activations(strategy, copies):
    """The measured peak has five fp32 copies: parameters, gradients, two moments of Adam, and buckets.

    Of two ranks each holds half of what is sharded; FSDP-like plans gather and reduce the largest unit beside that.
    """
    plan = api.recommend(LOOPS / "ddp", strategy=strategy, allow_untested=True).plan
    copy = 4 * plan.preconditions.parameter_count
    beside = max(row["peak_memory_bytes"] for row in steps_of("ddp")) - 5 * copy
    largest = 4 * 8.5e6  # a block's elements, and fewer
    most = copies * copy + beside + (5 * largest if strategy == "GGG" else 0)
    assert copies * copy + beside <= plan.chosen.predicted.peak_bytes <= most


@pytest.mark.parametrize(
    ("framework", "strategy"), [("fsdp2", "NNG"), ("fsdp2", "NGG"), ("ddp", "NNG"), ("ddp", "GGG")]
)
def test_a_predicted_peak_is_never_below_what_was_needed(framework, strategy):
    truth = json.loads((LOOPS / framework / "truth.json").read_text(encoding="utf-8"))
    plan = api.recommend(LOOPS / framework, strategy=strategy, allow_untested=True).plan
    assert plan.chosen.predicted.peak_bytes >= truth["peak_memory_bytes"][strategy]


@pytest.mark.parametrize("framework", ["fsdp2", "ddp"])
def test_ranks_under_one_kernel_share_its_clock(framework):
    """They take turns on the GPU, so that their kernels of a collective end up to 2 ms apart, which is no clock's."""
    found = api.analyze(LOOPS / framework).analysis
    assert set(found.clock_offsets_us.values()) == {0.0}


def test_without_their_step_logs_nothing_tells_that_ranks_share_a_clock(tmp_path):
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json.gz").symlink_to(LOOPS / f"ddp/rank{rank}.json.gz")
    (tmp_path / "run.json").symlink_to(LOOPS / "ddp/run.json")
    assert set(api.analyze(tmp_path).analysis.clock_offsets_us.values()) != {0.0}


def test_how_long_ranks_wait_is_told_by_the_clock_that_they_share():
    """In an all-reduce, by its kernels: from a rank's start to the last one's, over both ranks.

    Some kernels run after the last step, so that means are compared.
    """
    starts = []
    for rank in (0, 1):
        with gzip.open(LOOPS / f"ddp/rank{rank}.json.gz") as file:
            events = json.load(file)["traceEvents"]
        starts.append(sorted(row["ts"] for row in events if row.get("cat") == "kernel" and "AllReduce" in row["name"]))
    waits = [abs(one - other) / 2 for one, other in zip(*starts, strict=True)]
    found = [api.analyze(LOOPS / "ddp").analysis.states[name] for name in ("gradient", "other")]
    mean_us = sum(state.wait_us for state in found) / sum(state.count for state in found)
    assert mean_us == pytest.approx(statistics.fmean(waits), rel=0.05)
