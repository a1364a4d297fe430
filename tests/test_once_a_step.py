"""Runs that reduce in every micro-batch, and runs that already do what looks best."""

from __future__ import annotations

import re

import pytest
from helpers import analyze, write_run
from test_recommend import PROVENANCE, calibration, estimate
from trace_builder import TraceBuilder

from paro_advise.advisor.prediction.advice.questions import Question
from paro_advise.advisor.prediction.advice.wanted import Wanted
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.rendering.plans.plan_page import render_plan
from paro_advise.advisor.rendering.texts.plan_text import plan_text
from paro_advise.core.documents import to_json
from paro_advise.core.framework import Framework
from paro_advise.errors import UsageError
from paro_advise.policies.plan import EstimateSource, plan_from_json
from paro_advise.policies.strategy import Strategy

REDUCED_EACH_TIME = {
    "framework": Framework.DDP,
    "baseline": Strategy.parse("NNN"),
    "micro_batches": 4,
    "replicates_each_pass": True,
    "native_reduce_scatter_is_all_reduce": False,
}


@pytest.mark.parametrize(("framework", "name"), [(Framework.FSDP2, "second copy"), (Framework.DEEPSPEED, "hpZ")])
def test_a_run_with_a_second_copy_is_compared_as_what_it_is(framework, name):
    """FSDP2's reshard_after_forward=2, or DeepSpeed's hpZ: that way once more is no change, and plain sharding is one."""
    run = {"framework": framework, "baseline": Strategy.parse("GGG"), "micro_batches": 2, "is_gpu": True}
    plain = recommend(calibration(**run), Limits())
    plan = recommend(calibration(**run, copy_group_size=2), Limits())
    assert (plan.baseline.triple, plan.baseline.group_size, plan.baseline.variant.label) == ("GGG", 2, name)
    assert plan.baseline.predicted.memory_bytes > plain.baseline.predicted.memory_bytes
    of_plan = {(choice.triple, choice.group_size, choice.variant): choice for choice in plan.candidates}
    again = of_plan["GGG", 2, plan.baseline.variant].predicted.speedup
    assert again.p10 <= 1.0 <= again.p90
    assert again.p50 == pytest.approx(1.0, abs=0.02)
    unsharing = next(choice for choice in plan.candidates if choice.triple == "GGG" and choice.exports["fsdp2"] == "exact"
                     and not choice.variant and choice.collectives == "native")  # fmt: skip
    assert unsharing.predicted.speedup.p50 < 1.0


def test_reducing_once_a_step_is_a_change_though_the_strategy_stays():
    """DDP without no_sync sends everything in each of four micro-batches; a quarter of it is enough."""
    plan = recommend(calibration(**REDUCED_EACH_TIME), Limits(), wanted=Wanted.parse("NNN"))
    assert (plan.verdict, plan.chosen.triple) == ("change", "NNN")
    assert plan.chosen.predicted.speedup.p50 > 1.5
    assert plan.baseline.reduces_each_micro_batch
    assert not plan.chosen.reduces_each_micro_batch
    assert "reduce gradients once a step in place of every micro-batch" in plan.text
    assert "no_sync" in plan.text
    assert "NNN native each micro-batch" in plan_text(plan)
    assert plan_from_json(to_json(plan), "plan.json") == plan


def test_what_summing_once_a_step_gains_alone_is_a_lever():
    """What looks best may be another strategy: that it is not needed for the gain is said beside it."""
    plan = recommend(calibration(**REDUCED_EACH_TIME), Limits(), wanted=Wanted.parse("III/2"))
    alone = recommend(calibration(**REDUCED_EACH_TIME), Limits(), wanted=Wanted.parse("NNN"))
    assert "which sums gradients between groups once a step" in plan.text
    (lever,) = [lever for lever in plan.levers if lever.what.startswith("gradients summed once a step")]
    # `run` gains a little more: it replaces what DDP does on the host as well.
    assert 0.9 < lever.speedup_now.p50 / alone.chosen.predicted.speedup.p50 <= 1.0
    assert lever.speedup_with_plan.p50 == pytest.approx(1.0)
    assert "no_sync()" in lever.note
    assert f"now {lever.speedup_now.p50:.2f}x" in plan_text(plan)


def ddp_rank(rank, passes, is_summed):
    """Passes of 1 ms whose backward sums two buckets of 32,000 elements, where told to."""
    trace = TraceBuilder(rank, 2)
    for step in range(2):
        base = step * 4000.0
        trace.step(step + 3, base, 4000.0)
        for place in range(passes):
            at = base + place * 900.0
            trace.annotation("DistributedDataParallel.forward", at + 5, 100)
            trace.compute(at + 10, 300)
            trace.backward(at + 320, 500, sequence=1000 * step + 100 * place)
            trace.compute(at + 330, 300)
            for bucket in range(2 if is_summed(place) else 0):
                trace.collective(
                    "AllReduce", at + 640 + 60 * bucket, 60, nelems=32000, issue=at + 600 + 20 * bucket, seq=bucket, tid=2,
                    owners=("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",),
                )  # fmt: skip
        trace.annotation("Optimizer.step#AdamW.step", base + 3700, 50)
        trace.compute(base + 3750, 200)
    return trace


@pytest.mark.parametrize(
    ("is_summed", "expected"),
    [(lambda _: True, "applies"), (lambda place: place == 3, "does not apply")],
    ids=["each micro-batch", "under no_sync"],
)
def test_gradients_that_ddp_sums_in_every_micro_batch_are_found(tmp_path, is_summed, expected):
    """Two buckets of 60 us, all exposed, four times a step: three of four could be left out, 360 of 480 us."""
    found = analyze(write_run(tmp_path / "run", [ddp_rank(rank, 4, is_summed) for rank in range(2)]))
    assert (found.run.micro_batches, found.run.parameter_count) == (4, 64_000)
    (finding,) = [finding for finding in found.findings if finding.code == "PARO020"]
    assert finding.status == expected
    if expected == "applies":
        assert finding.saving_us == pytest.approx(360.0)
        assert "no_sync()" in finding.text


def test_a_way_with_a_long_name_has_its_row():
    """FSDP2 with reshard_after_forward=False on a mesh of (replicas, shards) that reduces each time: 40 characters."""
    hybrid = {"framework": Framework.FSDP2, "baseline": Strategy.parse("III"), "gathers_once": True}
    text = plan_text(recommend(calibration(**REDUCED_EACH_TIME | hybrid), Limits()))
    assert re.search(r"III/2 kept for backward each micro-batch \d+ ", text)


def test_a_run_that_is_kept_stands_once_among_its_alternatives():
    """Whatever the replay makes of the run's own way, it is no row beside the run as measured."""
    quick = {"inter_gbps": estimate(50.0), "pod_gbps": estimate(50.0), "intra_gbps": estimate(50.0)}
    plan = recommend(calibration(framework=Framework.DDP, baseline=Strategy.parse("NNN"), **quick), Limits())
    assert plan.verdict == "keep"
    assert plan_text(plan).count("NNN native ") == 1
    page = render_plan(plan, PROVENANCE)
    assert [page.count(f'class="mark {kind}"') for kind in ("now", "chosen")] == [1, 0]


def test_what_a_strategy_without_groups_sends_is_counted_between_nodes():
    """Two nodes of one rank: DDP's all-reduce of 16 MB sends 2 * (2 - 1) / 2 of them through each port."""
    made = calibration(world_size=2, ranks_per_node=1, job_world_size=2, job_ranks_per_node=1, wait_group_size=2)
    plan = recommend(made, Limits(), wanted=Wanted.parse("NNN"))
    assert plan.chosen.traffic.inter_bytes == 16e6
    assert plan.chosen.traffic.intra_bytes == 0


def test_one_node_tells_nothing_of_several():
    """An assumed network is no answer: more nodes would be predicted to be quicker than one."""
    prior = {"inter_gbps": Estimate(value=1.0, sigma=1.0, source=EstimateSource.PRIOR)}
    made = calibration(world_size=4, ranks_per_node=4, job_world_size=4, job_ranks_per_node=4, **prior)
    for text in ("nodes=4", "efficiency=80%"):
        with pytest.raises(UsageError, match="tells nothing of the inter-node network"):
            recommend(made, Limits(), questions=[Question.parse(text)])
    plan = recommend(made, Limits(), wanted=Wanted.parse("NNN"), questions=[Question.parse("nodes=4,inter-gbps=0.05")])
    assert plan.answers[0].baseline_step_us.p50 > plan.baseline.predicted.step_time_us.p50
    assert plan.outlooks == ()
