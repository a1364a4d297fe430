"""What a plan compares: framework settings as what they really are, fallbacks to the host, quantised traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_recommend import MB, calibration

from paro_advise.advisor.prediction.candidates import (
    Candidate,
    baseline_candidate,
    candidates,
    is_at_hand,
    is_proposable,
    offloaded,
)
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits, traffic
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.documents import to_json
from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Fidelity, Offload, Variant
from paro_advise.policies.frameworks.registry import approximation_of, exports_of, frameworks_of
from paro_advise.policies.plan import as_framework_runs, plan_from_json, same_way
from paro_advise.policies.strategy import KEPT, CollectiveBackend, Strategy

WIRE = 0.05e3  # bytes a microsecond


def found(made, triple, variant="", collectives="native", size=2):
    return next(
        item
        for item in candidates(made)
        if (str(item.strategy), item.variant, item.collectives, item.group_size) == (triple, variant, collectives, size)
    )


def us(made, candidate):
    return float(step_us(made, candidate, measured_links(made)))


def test_parameters_that_are_kept_are_gathered_once_a_micro_batch():
    made = calibration()
    gather = 100.0 + 7 * 4 * MB / 8 / WIRE  # the port never rests: of all latencies one is waited for
    plain, kept = us(made, found(made, "GGG")), us(made, found(made, "GGG", "kept_for_backward"))
    assert plain - kept == pytest.approx(2 * 3 * gather)  # two micro-batches, all units but the root


def test_a_second_copy_gathers_inside_the_group_in_backward():
    made = calibration()
    world, inside = 100.0 + 7 * 4 * MB / 8 / WIRE, 50.0 + 2 * MB / 1e3
    plain, copied = us(made, found(made, "GGG")), us(made, found(made, "GGG", "second_copy"))
    assert plain - copied == pytest.approx(2 * 3 * (world - inside))
    # DeepSpeed's copy serves the forward of the second micro-batch as well, its root included.
    assert copied - us(made, found(made, "GGG", "hpz")) == pytest.approx(4 * (world - inside))


def test_quantised_traffic_is_a_quarter_and_never_proposed():
    made = replace(
        calibration(),
        is_gpu=True,
        native_reduce_scatter_is_all_reduce=False,
        element_bytes=2,
        gather_width=2,
        reduce_width=2,
    )
    quantised = found(made, "GGG", "quantised")
    assert (quantised.gather_share, quantised.reduce_share) == (0.5, 0.25)
    assert us(made, quantised) < us(made, found(made, "GGG", "hpz"))
    plan = recommend(made, Limits())
    rows = [choice for choice in plan.candidates if choice.variant == "quantised"]
    assert rows
    assert not any(choice.feasible for choice in rows)
    assert all("changes the numbers" in choice.reason for choice in rows)
    assert not any(item.variant == "quantised" for item in candidates(calibration()))  # its kernels need a GPU


def test_what_is_kept_or_copied_is_counted():
    made = calibration()
    plan = recommend(made, Limits())
    rows = {(choice.triple, choice.variant, choice.collectives): choice for choice in plan.candidates}
    whole = made.parameters * 4.0
    plain = rows["GGG", Variant.PLAIN, CollectiveBackend.NATIVE].predicted.terms
    kept = rows["GGG", Variant.KEPT, CollectiveBackend.NATIVE].predicted.terms
    assert kept["transient"] - plain["transient"] == pytest.approx(whole)
    copied = next(c for c in plan.candidates if c.variant == "second_copy" and c.group_size == 2).predicted.terms
    assert copied["parameter"] - plain["parameter"] == pytest.approx(whole / 2)


def test_only_what_the_runtime_trains_with_is_proposed():
    made = calibration()
    plan = recommend(made, Limits())
    assert plan.chosen.variant == ""
    refused = {
        (str(item.strategy), item.variant) for item in candidates(made) if not is_proposable(item, made.framework)
    }
    assert refused == {
        ("NNI", ""), ("NNG", ""), ("NGG", ""), ("IIG", ""),  # Megatron's and DeepSpeed's own
        ("GGG", "kept_for_backward"), ("III", "kept_for_backward"), ("GNG", "kept_for_backward"),
        ("INI", "kept_for_backward"), ("GGG", "second_copy"), ("GGG", "hpz"),
    }  # fmt: skip


def test_what_may_not_be_proposed_is_in_no_comparison_of_what_may():
    plan = recommend(calibration(), Limits())
    others = {("NNG", "native"), ("NGG", "native"), ("NNI", "native"), ("IIG", "native")}
    assert all((step.triple, step.collectives) not in others for step in plan.budget)
    assert sum(choice.probability_best for choice in plan.candidates) == pytest.approx(1.0)
    closed = [choice for choice in plan.candidates if (choice.triple, choice.collectives) in others]
    assert closed
    assert all(choice.probability_best == 0 and "own settings" in choice.reason for choice in closed)


def test_beside_a_gpu_what_may_not_be_proposed_is_in_no_comparison_either():
    """With a network that favours the backend's own rings, which are the fastest."""
    made = replace(
        calibration(), is_gpu=True, native_reduce_scatter_is_all_reduce=False, transfer_us=1.0, wait_us=1.0,
        framework=Framework.FSDP2,
    )  # fmt: skip
    plan = recommend(made, Limits(allow_untested=True))
    assert plan.candidates[0].collectives == "native"
    assert all(step.variant != Variant.HPZ for step in plan.budget)
    assert sum(choice.probability_best for choice in plan.candidates) == pytest.approx(1.0)
    closed = [choice for choice in plan.candidates if choice.variant == Variant.HPZ]  # DeepSpeed's own
    assert closed
    assert all(choice.probability_best == 0 and "own settings" in choice.reason for choice in closed)


def test_a_run_of_our_runtime_beside_a_gpu_goes_on_with_the_backends_own_collectives():
    made = replace(
        calibration(baseline=Strategy.parse("NGG")), is_gpu=True, native_reduce_scatter_is_all_reduce=False,
        framework=Framework.RUNTIME,
    )  # fmt: skip
    assert baseline_candidate(made).collectives == "native"
    native = [item for item in candidates(made) if item.collectives == "native" and not item.variant]
    assert native
    assert all(item.by_runtime and not item.holds_back for item in native)
    plan = recommend(made, Limits())
    assert all(choice.eligible == (choice.collectives == "native") for choice in plan.candidates if not choice.variant)
    assert plan.chosen.collectives == "native"


def test_beside_a_gpu_our_runtime_runs_every_strategy_with_the_backends_own_collectives():
    """Only where no setting of the framework that ran does; and a plan chooses it by leave."""
    made = replace(
        calibration(), is_gpu=True, native_reduce_scatter_is_all_reduce=False, framework=Framework.FSDP2,
        overlaps_gathers=True,
    )  # fmt: skip
    native = [item for item in candidates(made) if item.collectives == "native" and not item.variant]
    assert {str(item.strategy) for item in native if item.by_runtime} == {
        "NNI", "NNG", "NGG", "NII", "NIG", "IGG", "IIG", "INI",
    }  # fmt: skip
    assert {str(item.strategy) for item in native if not item.by_runtime} == {"NNN", "III", "GGG"}
    for leave in (False, True):
        plan = recommend(made, Limits(allow_untested=leave))
        ours = [c for c in plan.candidates if (c.triple, c.collectives, c.variant) == ("NNG", "native", "")]
        assert [choice.eligible for choice in ours] == [leave]
        assert all(choice.exports["paro_advise"] == "exact" for choice in ours)


@pytest.mark.parametrize("framework", [Framework.FSDP2, Framework.DEEPSPEED, Framework.MEGATRON, Framework.DDP])
def test_beside_a_gpu_a_plan_chooses_what_the_framework_itself_runs(framework):
    made = replace(
        calibration(),
        is_gpu=True,
        native_reduce_scatter_is_all_reduce=False,
        framework=framework,
        overlaps_gathers=True,
    )
    plan = recommend(made, Limits())
    ours = [choice for choice in plan.candidates if choice.collectives == "ho_ring"]
    assert plan.chosen.collectives == "native"
    assert ours
    assert all(choice.probability_best == 0 for choice in ours)
    assert all("--allow-untested" in choice.reason for choice in ours if choice.feasible)
    allowed = recommend(made, Limits(allow_untested=True))
    assert any(choice.probability_best > 0 for choice in allowed.candidates if choice.collectives == "ho_ring")

    def eligible(of):
        return {(c.triple, c.group_size, c.collectives, c.variant) for c in of.candidates if c.eligible}

    assert eligible(plan) < eligible(allowed)


@pytest.mark.parametrize("triple", [str(strategy) for strategy in KEPT])
def test_every_approximation_is_known_as_what_it_really_is(triple):
    fidelities = exports_of(Strategy.parse(triple), CollectiveBackend.NATIVE)
    approximating = {name for name, fidelity in fidelities.items() if fidelity == Fidelity.APPROXIMATE}
    for framework in approximating:
        assert framework in frameworks_of(*approximation_of(triple, framework))


def test_a_plan_says_what_a_framework_makes_of_it():
    made = calibration(micro_batches=4)
    plan = recommend(made, Limits())
    for triple, framework, real in (("NGG", "fsdp2", ("GGG", "kept_for_backward")), ("III", "fsdp1", ("III", ""))):
        chosen = next(c for c in plan.candidates if (c.triple, c.collectives) == (triple, "ho_ring"))
        runs = as_framework_runs(replace(plan, chosen=chosen), framework)
        assert ((runs.triple, runs.variant), runs.collectives) == (real, "native")
        assert runs.predicted.step_time_us.p50 > chosen.predicted.step_time_us.p50
    again = plan_from_json(to_json(plan), "again")
    assert again == plan


def test_what_can_be_switched_on_today_is_of_the_frameworks_own_family():
    kept = found(calibration(), "GGG", "kept_for_backward")
    megatron = found(calibration(), "NNG")
    assert is_at_hand(kept, Framework.FSDP2)
    assert not is_at_hand(kept, Framework.DEEPSPEED)
    assert not is_at_hand(replace(found(calibration(), "GGG"), offload=Offload.OPTIMIZER), Framework.FSDP2)
    assert is_at_hand(replace(found(calibration(), "GGG"), offload=Offload.OPTIMIZER), Framework.DEEPSPEED)
    assert not is_at_hand(megatron, Framework.FSDP2)
    assert is_at_hand(megatron, Framework.MEGATRON)
    assert is_at_hand(megatron, Framework.UNKNOWN)


@pytest.mark.parametrize(
    ("framework", "baseline", "strategy", "overlaps"),
    [
        (Framework.FSDP2, "GGG", "III", False),
        (Framework.FSDP2, "GGG", "NNN", False),
        (Framework.DDP, "NNN", "NNG", True),  # our runtime: torch has no setting for it
        (Framework.DDP, "NNN", "GGG", True),  # another framework's reducer
        (Framework.DEEPSPEED, "NGG", "NNG", False),  # `overlap_comm` is off
        (Framework.DEEPSPEED, "NGG", "GGG", True),  # stage 3 is exported with it
        (Framework.DEEPSPEED, "NGG", "NNN", False),
    ],
)
def test_reductions_that_block_in_the_run_block_under_other_strategies_of_its_framework(
    framework, baseline, strategy, overlaps
):
    changes = {"framework": framework, "baseline": Strategy.parse(baseline), "is_gpu": True}
    made = calibration(**changes, overlaps_reductions=False)
    native = [item for item in candidates(made) if item.collectives == CollectiveBackend.NATIVE]
    assert {item.overlaps_reductions for item in native if str(item.strategy) == strategy} == {overlaps}


@pytest.mark.parametrize("seen", [False, True])
def test_stage_0_of_deepspeed_sums_gradients_after_backward_unless_it_was_seen_beside_it(seen):
    made = calibration(framework=Framework.DEEPSPEED, is_gpu=True, overlaps_reductions=seen)
    for baseline, expected in (("GGG", False), ("NNG", False), ("NNN", seen)):
        run = replace(made, baseline=Strategy.parse(baseline))
        native = [item for item in candidates(run) if item.collectives == CollectiveBackend.NATIVE]
        assert {item.overlaps_reductions for item in native if str(item.strategy) == "NNN"} == {expected}


@pytest.mark.parametrize(
    ("baseline", "seen", "expected"), [("GGG", False, True), ("NGG", False, False), ("NNG", True, True)]
)
def test_deepspeeds_first_two_stages_reduce_alike(baseline, seen, expected):
    """By all-reduce, unless the run shows that `use_multi_rank_bucket_allreduce` is off; stage 3 scatters."""
    made = calibration(framework=Framework.DEEPSPEED, baseline=Strategy.parse(baseline), is_gpu=True)
    made = replace(made, scatters_by_all_reduce=seen)
    native = {
        str(c.strategy): c for c in candidates(made) if c.collectives == CollectiveBackend.NATIVE and not c.variant
    }
    assert {native[triple].scatters_by_all_reduce for triple in ("NNG", "NGG")} == {expected}
    assert not native["GGG"].scatters_by_all_reduce


def test_a_second_copy_is_gathered_beside_reductions():
    """In a group of its own: FSDP2's post-forward mesh, hpZ's secondary group."""
    made = calibration(is_gpu=True, framework=Framework.FSDP2)
    assert found(made, "GGG", "second_copy").separate_queues
    assert not found(made, "GGG", "kept_for_backward").separate_queues
    runs_one = replace(made, copy_group_size=2)
    assert baseline_candidate(runs_one).separate_queues
    assert not baseline_candidate(made).separate_queues


@pytest.mark.parametrize(("framework", "micro", "each"), [("FSDP1", 4, True), ("FSDP1", 1, False), ("FSDP2", 4, False)])
def test_fsdp1_sums_gradients_between_groups_in_every_micro_batch(framework, micro, each):
    made = calibration(is_gpu=True, framework=Framework(framework), micro_batches=micro)
    for variant in ("", "kept_for_backward"):
        assert found(made, "III", variant).replicates_each_pass is each
    assert not found(made, "GGG", "").replicates_each_pass


def test_when_not_even_that_fits_the_parameters_go_to_the_host_too():
    """ZeRO-Infinity: only gathered units stay on the device."""
    made = calibration(micro_batches=2)
    plain = recommend(made, Limits())
    needs = min(choice.predicted.memory_bytes for choice in plain.candidates)
    states = 16.0 * made.parameters / 8  # of GGG, fp32 with Adam
    optimizer = states / 2
    limit = (needs - optimizer - 0.5 * states / 4) / 0.8  # parameters are a quarter of the states
    limits = Limits(device_memory_bytes=limit)
    plan = recommend(replace(made, framework=Framework.DEEPSPEED), limits)
    assert (plan.chosen.triple, plan.chosen.offload) == ("GGG", "optimizer+parameter")
    exact = [name for name, fidelity in plan.chosen.exports.items() if fidelity == "exact"]
    assert exact == ["deepspeed"]
    other = recommend(made, limits)  # nobody else can
    assert (other.verdict, other.chosen, other.switch_on_today) == ("keep", other.baseline, None)
    assert "by the settings of deepspeed" in other.text


def test_what_the_host_adds_is_bytes_over_its_bandwidth_and_its_arithmetic():
    made = calibration(micro_batches=2)
    shard = made.parameters / 8
    once = shard * (4 + 4)  # gradients down, parameters up
    updated = 2 * shard / 1e9 * 1e6  # two ranks a node, 1e9 parameters a second
    plain = found(made, "GGG")
    assert offloaded(made, plain, 1.0, parameters=False).host_us == pytest.approx(once / 1e3 + updated)
    fetched = 2 * 2 * shard * 4  # two micro-batches, forward and backward
    assert offloaded(made, plain, 1.0, parameters=True).host_us == pytest.approx((once + fetched) / 1e3 + updated)


def test_what_deepspeed_does_on_the_host_goes_with_it():
    made = calibration(framework=Framework.DEEPSPEED, fixed_us=250_000.0, gaps_us=200_000.0, baseline_group_size=8)
    ours, theirs = found(made, "GGG", collectives="ho_ring"), found(made, "GGG")
    assert (ours.host_share, theirs.host_share) == (0.25, 1.0)
    assert us(made, replace(ours, host_share=1.0)) - us(made, ours) == pytest.approx(0.75 * 200_000.0)
    assert found(replace(made, is_gpu=True), "GGG", collectives="ho_ring").host_share == 1.0


@pytest.mark.parametrize("world", [2, 3])
def test_groups_of_all_ranks_are_not_offered_beside_sharding_globally(world):
    """Two ranks: NNI in groups of two would be NNG under another name."""
    made = calibration(world_size=world, ranks_per_node=1, baseline_group_size=world)
    levels = {str(item.strategy) for item in candidates(made)}
    assert levels == {"NNN", "NNG", "NGG", "GNG", "GGG"}
    assert not any(item.variant.keeps_copy for item in candidates(made))


def test_whole_gradients_of_kept_parameters_are_no_way_of_their_own_with_one_micro_batch():
    """One reduction a step either way: FSDP2 runs the same program as with sharded gradients."""
    for micro, differs in ((4, True), (1, False)):
        made = calibration(is_gpu=True, framework=Framework.FSDP2, micro_batches=micro)
        kept = {str(item.strategy) for item in candidates(made) if item.variant == Variant.KEPT}
        assert {"GGG", "III"} <= kept
        assert (not kept.isdisjoint({"GNG", "INI"})) is differs


def test_traffic_is_counted_in_the_types_that_are_sent():
    """bf16 parameters and fp32 gradients of 4 MB units in bf16: 8 M elements."""
    made = calibration(is_gpu=True, element_bytes=2, gather_width=2, reduce_width=4, micro_batches=1)
    sent = {
        triple: traffic(
            made, Candidate(strategy=Strategy.parse(triple), group_size=2, collectives=CollectiveBackend.NATIVE)
        )
        for triple in ("NNN", "GGG")
    }
    elements = made.parameters
    # An all-reduce is two rings over all ranks, of fp32; GGG gathers bf16 twice and scatters fp32 once.
    moved = {name: found.intra_bytes + found.inter_bytes for name, found in sent.items()}
    assert moved["NNN"] / moved["GGG"] == pytest.approx(2 * 4 * elements / ((2 * 2 + 4) * elements))


def test_the_run_as_it_is_has_one_step_time_wherever_a_plan_names_it():
    """Its gathers do not overlap: the usual way of the same strategy is predicted faster, and is no row."""
    made = calibration(is_gpu=True, framework=Framework.DEEPSPEED, overlaps_gathers=False, overlaps_reductions=False)
    plan = recommend(made, Limits())
    of_the_run = [choice for choice in plan.candidates if same_way(choice, plan.baseline)]
    assert of_the_run
    assert min(choice.predicted.step_time_us.p50 for choice in of_the_run) < plan.baseline.predicted.step_time_us.p50
    shown = [
        item.step_time_us
        for item in plan.budget
        if (item.triple, item.collectives) == ("GGG", "native") and not item.variant
    ]
    assert shown == [plan.baseline.predicted.step_time_us.p50]
