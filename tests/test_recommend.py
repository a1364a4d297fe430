"""From a run to a plan: the replay written out by hand, limits, decisions, the plan file."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace

import pytest
from helpers import write_run
from test_unrecorded_groups import hybrid_rank
from trace_builder import fsdp_rank

from paro_advise.advisor.cli import run
from paro_advise.advisor.prediction.advice.wanted import Wanted
from paro_advise.advisor.prediction.calibration import Calibration, Update
from paro_advise.advisor.prediction.candidates import Candidate, baseline_candidate, candidates
from paro_advise.advisor.prediction.prediction_bias import PredictionBias
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.sampler import Estimate
from paro_advise.advisor.prediction.scoring import Limits, baseline_bytes, least_bytes
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.advisor.rendering.page import Provenance
from paro_advise.advisor.rendering.plans.plan_page import render_plan
from paro_advise.advisor.rendering.texts.plan_text import plan_text
from paro_advise.core.documents import to_json
from paro_advise.core.framework import Framework
from paro_advise.errors import ForeignDataError, InputError, UsageError
from paro_advise.policies.plan import EstimateSource, plan_from_json, same_way
from paro_advise.policies.strategy import CollectiveBackend, Strategy
from paro_advise.policies.strategy_name import choice_name, short_choice_name

MB = 1e6
PROVENANCE = Provenance(version="0", created_utc="", command="recommend")


def estimate(value, sigma=0.03):
    return Estimate(value=value, sigma=sigma, source=EstimateSource.MEASURED)


def calibration(**changes):
    """4 nodes of 2 ranks on gloo: 4 units of 4 MB fp32, 2 micro-batches, 100 ms of arithmetic."""
    usual = {
        "world_size": 8,
        "ranks_per_node": 2,
        "micro_batches": 2,
        "unit_bytes": (4 * MB,) * 4,
        "element_bytes": 4,
        "compute_us": 100_000.0,
        "fixed_us": 5_000.0,
        "gaps_us": 5_000.0,
        "late_us": 0.0,
        "most_late_us": 0.0,
        "wait_us": 0.0,
        "host_us_per_byte": 0.0,
        "wait_group_size": 8,
        "transfer_us": None,
        "step_us": 0.0,
        "traced_error_pct": None,
        "is_gpu": False,
        "native_reduce_scatter_is_all_reduce": True,
        "baseline": Strategy.parse("GGG"),
        "baseline_group_size": 2,
        "gathers_once": False,
        "replicates_each_pass": False,
        "bucket_bytes": None,
        "published_us": None,
        "framework": Framework.FSDP2,
        "inter_alpha_us": estimate(100.0),
        "inter_gbps": estimate(0.05),
        "intra_alpha_us": estimate(50.0),
        "intra_gbps": estimate(1.0),
        "nodes_per_pod": None,
        "pod_alpha_us": estimate(100.0),
        "pod_gbps": estimate(0.05),
        "job_world_size": 8,
        "job_ranks_per_node": 2,
        "unmodelled": "",
        "trained_share": 1.0,
        "sum_ratio": estimate(1.0, 0.0),
        "rail_gain": estimate(1.0, 0.0),
        "update": Update(),
        "compute_slowing": estimate(1.0, 0.0),
        "overlapped_us": 0.0,
        "seen_share": 1.0,
        "num_steps": 10,
        "gather_width": 4,
        "reduce_width": 4,
        "scatters_by_all_reduce": False,
        "overlaps_gathers": True,
        "overlaps_reductions": True,
        "assumptions": (),
    }
    made = Calibration(**(usual | changes))
    return replace(made, step_us=made.step_us or float(step_us(made, baseline_candidate(made), measured_links(made))))


def test_fsdp2_on_a_cpu_waits_for_everything():
    """Seven rounds of a flat ring over 8 ranks, each 1/8 of a unit through a port of 50 MB/s that never rests."""
    made = calibration()
    first, ring = 100.0, 7 * 4 * MB / 8 / 50  # us until the first byte; MB/s are bytes per us
    # A micro-batch gathers 4 units in forward and all but the root in backward; gloo's
    # reduce-scatter is an all-reduce, the bytes of two rings.
    micro_batch = (4 + 3) * (first + ring) + 4 * (first + 2 * ring) + 50_000.0
    assert step_us(made, baseline_candidate(made), measured_links(made)) == pytest.approx(2 * micro_batch + 5_000.0)


def test_reductions_of_the_runtime_hide_behind_backward():
    """NIG: nothing is gathered; what two ranks of a node reduce-scatter takes their cores, the port is beside them."""
    made = calibration()
    inside = 50.0 + 2 * MB / 1000  # us at 1 GB/s
    port = 50 * 0.94  # what HO-Ring gets of the MB/ms that the backend does
    across = 100.0 + 3 / 4 * 2 * MB * 2 / port  # 3 rounds, slab of 2 MB, both ranks of a node by turns through the port
    forward, backward = 50_000.0 / 3, 2 * 50_000.0 / 3
    first = forward + backward + 4 * inside
    last = forward + backward / 4 + 4 * (inside + across)  # the port is the bottleneck from the first one on
    gather = 4 * (max(100.0 + 3 * 1 * MB / port, 3 * (50.0 + 0.5 * MB / 1000)) + 50.0 + 0.5 * MB / 1000)
    candidate = Candidate(strategy=Strategy.parse("NIG"), group_size=2, collectives=CollectiveBackend.HO_RING)
    assert step_us(made, candidate, measured_links(made)) == pytest.approx(first + last + gather + 5_000.0, rel=1e-6)


def test_a_gpu_hides_gathers_behind_compute():
    """Fast links: a step is its arithmetic, the first gather and the last reduction."""
    fast = {
        "inter_gbps": estimate(50.0),
        "intra_gbps": estimate(100.0),
        "is_gpu": True,
        "native_reduce_scatter_is_all_reduce": False,
    }
    made = calibration(**fast)
    ring = 7 * (100.0 + 4 * MB / 8 / 50_000)
    exposed = 2 * (ring + ring)  # per micro-batch the first gather and the root's reduction
    assert step_us(made, baseline_candidate(made), measured_links(made)) == pytest.approx(
        100_000.0 + exposed + 5_000.0, rel=0.02
    )


def test_a_slow_network_gets_a_change_with_its_price():
    plan = recommend(calibration(), Limits())
    assert plan.verdict == "change"
    assert plan.chosen.predicted.speedup.p10 > 2
    assert plan.confidence.replay_error_pct == pytest.approx(0.0, abs=1e-6)
    assert plan.confidence.probability_gain == 1.0
    assert plan.chosen.redundancy_bytes == pytest.approx(
        sum(v for k, v in plan.chosen.predicted.terms.items() if k != "transient") - 16 * MB / 4 * 16 / 8
    )
    assert plan.switch_on_today.collectives == "native"
    assert len({(c.triple, c.variant, c.group_size, c.collectives) for c in plan.candidates}) == len(plan.candidates)


def test_a_plan_for_a_strategy_of_the_users_own_says_what_it_would_choose_itself():
    best = recommend(calibration(), Limits())
    plan = recommend(calibration(), Limits(), wanted=Wanted.parse("IIG/2"))
    assert (plan.verdict, plan.asked_for) == ("change", "IIG/2")
    assert (plan.chosen.triple, plan.chosen.group_size) == ("IIG", 2)
    ways = [
        choice for choice in plan.candidates if (choice.triple, choice.group_size) == ("IIG", 2) and choice.eligible
    ]
    assert plan.chosen == min(ways, key=lambda choice: choice.predicted.step_time_us.p50)
    assert plan.text.startswith("As asked for, change GGG (full shard, ZeRO-3) to IIG in groups of 2")
    assert plan.text.endswith(f"Without --strategy: {best.text}")
    assert plan_from_json(to_json(plan), "plan.json") == plan
    assert "asked for: IIG/2" in render_plan(plan, PROVENANCE)

    assert plan.chosen.reason == "asked for"
    assert not any(
        "chosen one" in choice.reason for choice in (*plan.candidates, plan.chosen) if same_way(choice, plan.chosen)
    )

    slower = recommend(calibration(), Limits(), wanted=Wanted.parse("GGG"))
    assert slower.chosen.predicted.step_time_us.p50 > best.chosen.predicted.step_time_us.p50
    assert slower.confidence.expected_regret_pct > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("IIX", "three letters"),
        ("GNN", "must be one of"),
        ("GGG/2", "needs a strategy with level I"),
        ("IIG/", "must be a number of ranks"),
        ("IIG/0", "must be a number of ranks"),
        ("IIG/3", "must name a way to run this job"),
        ("NNN", "must name what fits"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused(text, says):
    with pytest.raises(UsageError, match=says):
        recommend(calibration(), Limits(device_memory_bytes=60 * MB), wanted=Wanted.parse(text))


def test_what_was_never_run_on_gpus_needs_consent_though_asked_for():
    made = calibration(is_gpu=True, native_reduce_scatter_is_all_reduce=False)
    with pytest.raises(UsageError, match="never timed on GPUs"):
        recommend(made, Limits(), wanted=Wanted.parse("IIG/2"))
    assert recommend(made, Limits(allow_untested=True), wanted=Wanted.parse("IIG/2")).chosen.triple == "IIG"


@pytest.mark.parametrize("triple", ["GNG", "ING", "GIG"])
def test_what_never_pays_is_refused_for_that_and_not_for_want_of_consent(triple):
    dominating = {"ING": "NIG", "GNG": "NGG", "GIG": "IGG"}[triple]
    with pytest.raises(UsageError, match="pay for this job") as refused:
        recommend(calibration(), Limits(allow_untested=True), wanted=Wanted.parse(triple))
    assert refused.value.hint.startswith(dominating)


def test_a_compute_bound_run_is_kept():
    fast = {
        "inter_gbps": estimate(50.0),
        "intra_gbps": estimate(100.0),
        "compute_us": 1e6,
        "inter_alpha_us": estimate(5.0),
    }
    plan = recommend(calibration(**fast, is_gpu=True, native_reduce_scatter_is_all_reduce=False), Limits())
    assert plan.verdict == "keep"
    assert plan.chosen == plan.baseline
    assert plan.confidence.probability_gain < 0.1


@pytest.mark.parametrize("compute_us", [-1e12, math.nan, math.inf])
def test_figures_that_give_no_step_time_give_no_plan(compute_us):
    with pytest.raises(InputError, match="must give step times"):
        recommend(calibration(compute_us=compute_us), Limits())


def test_a_replay_that_is_off_gives_no_advice():
    made = calibration()
    plan = recommend(replace(made, step_us=made.step_us * 1.5), Limits())
    assert plan.verdict == "measure first"
    assert plan.probes
    assert "Measure first" in plan.text


def test_no_plan_exceeds_the_memory():
    made = calibration()
    roomy = recommend(made, Limits())
    tight = 0.9 * roomy.chosen.predicted.memory_bytes
    plan = recommend(made, Limits(device_memory_bytes=tight / 0.8))
    assert plan.chosen.predicted.memory_bytes <= tight
    for choice in plan.candidates:
        assert choice.feasible == (choice.predicted.memory_bytes <= tight)
    feasible = [choice.feasible for choice in plan.candidates]
    assert feasible == sorted(feasible, reverse=True)
    nothing = recommend(made, Limits(device_memory_bytes=1.0))
    assert nothing.verdict == "keep"
    assert not any(choice.feasible for choice in nothing.candidates)


def test_what_a_plan_may_not_choose_stands_behind_what_it_may():
    """Beside GPUs HO-Ring was never run: its rows follow, with the reason; the plan's own choice is always shown."""
    made = calibration(
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, inter_gbps=estimate(0.5), intra_gbps=estimate(100.0)
    )
    plan = recommend(made, Limits())
    text = plan_text(plan)
    before, _, after = text.partition("Not for this plan to choose:")
    assert "HO-Ring" not in before.partition("strategy")[2]
    assert after.lstrip().startswith("experimental: HO-Ring has never been timed on GPUs")
    assert sum(line.startswith("*") for line in before.splitlines()) == (1 if plan.verdict == "change" else 0)
    assert not any(choice.eligible for choice in plan.candidates if choice.collectives == "ho_ring")


def test_the_page_of_a_plan_shows_speed_against_memory():
    """One square for the run, one diamond for the choice, a disc for each other candidate, a line at the limit."""
    made = calibration()
    limits = Limits(device_memory_bytes=10 * least_bytes(made))
    plan = recommend(made, limits)
    page = render_plan(plan, PROVENANCE)
    assert plan.verdict == "change"
    assert [page.count(f'class="mark {kind}"') for kind in ("now", "chosen")] == [1, 1]
    fitting = sum(choice.feasible and not same_way(choice, plan.baseline) for choice in plan.candidates)
    assert page.count('class="mark may"') + page.count('class="mark not"') == fitting
    assert page.count('class="limit"') == 1
    assert f"recommended: {short_choice_name(plan.chosen)}</text>" in page


def test_the_page_of_a_plan_that_says_to_measure_first_says_what():
    plan = recommend(calibration(step_us=2 * calibration().step_us), Limits())
    page = render_plan(plan, PROVENANCE)
    assert plan.verdict == "measure first"
    assert "Measure this first" in page
    assert all(probe.partition(":")[0] in page for probe in plan.probes)
    assert 'class="figure"' not in page
    assert 'role="img"' not in page


def test_the_redundancy_budget_is_kept():
    made = calibration()
    plan = recommend(made, Limits(redundancy_budget_bytes=10 * MB))
    assert plan.chosen.redundancy_bytes <= 10 * MB
    assert all(choice.redundancy_bytes <= 10 * MB for choice in plan.candidates if choice.feasible)
    assert baseline_bytes(made) > 16 * MB / 4 * 16 / 8


def test_groups_align_with_nodes():
    sizes = {c.group_size for c in candidates(calibration(world_size=48, ranks_per_node=8))}
    assert sizes == {2, 4, 8, 16, 24}


def test_a_plan_is_the_same_every_time_and_cannot_be_edited():
    first, second = recommend(calibration(), Limits()), recommend(calibration(), Limits())
    data = to_json(first)
    assert data == to_json(second)
    assert plan_from_json(data, "plan.json") == first
    with pytest.raises(ForeignDataError, match="as it was written"):
        plan_from_json(data.replace(b'"world_size": 8', b'"world_size": 9'), "plan.json")
    for wrong in (b"{}", b"[", re.sub(rb'"format_version": "1\.\d+"', b'"format_version": "2.0"', data)):
        with pytest.raises(ForeignDataError):
            plan_from_json(wrong, "plan.json")


def test_a_plan_of_an_older_format_is_read():
    """Fields that came later must not look like a change by hand."""
    body = json.loads(to_json(recommend(calibration(), Limits())))
    body |= {"format_version": "1.1", "plan_id": ""}
    for choice in (body["baseline"], body["chosen"], body["switch_on_today"], *body["candidates"]):
        del choice["variant"], choice["traffic"]
    plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["plan_id"] = hashlib.sha256(plain.encode()).hexdigest()[:16]
    assert plan_from_json(json.dumps(body).encode(), "old").chosen.triple == body["chosen"]["triple"]


def test_from_traces_and_from_their_analysis(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [fsdp_rank(rank) for rank in range(2)])
    data, first, second = tmp_path / "run.json", tmp_path / "a.json", tmp_path / "b.json"
    assert run(["analyze", str(folder), "--json", str(data), "-q"]) == 0
    assert run(["recommend", str(folder), "-o", str(first)]) == 0
    assert run(["recommend", str(data), "-o", str(second), "-q"]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert json.loads(first.read_text())["format"] == "paro-advise/plan"
    assert "speed-up" in capsys.readouterr().out
    assert run(["recommend", str(data), "-o", str(first)]) == 1  # never overwritten
    assert run(["recommend", str(data), "--measured-peak", "1KiB"]) == 2
    assert run(["schema", "plan"]) == 0


def test_a_measured_peak_need_not_reach_the_bound_on_transients():
    """ZeRO-3 on eight ranks: an eighth of 16 bytes each, and one unit's parameters and gradients whole."""
    made = calibration()
    assert least_bytes(made) == pytest.approx(16 * made.parameters / 8 + 2 * max(made.unit_bytes))
    assert least_bytes(made) < baseline_bytes(made)


def test_the_expected_peak_is_the_measured_one_with_other_states_and_buffers():
    """8 ranks in nodes of 2, fp32 with Adam: of a parameter IIG holds 4/2, 4/2 and 8/8 bytes, ZeRO-3 16/8.

    The run as it is peaks where it was measured; ours hold two units and three units' gradients, it one of each.
    """
    made = calibration()
    other = 3e9
    plan = recommend(made, Limits(other_bytes=other))
    assert plan.baseline.predicted.peak_bytes == pytest.approx(least_bytes(made) + other)
    found = next(c for c in plan.candidates if (c.triple, c.group_size, c.collectives) == ("IIG", 2, "native"))
    states = made.parameters * (4 / 2 + 4 / 2 + 8 / 8)
    assert found.predicted.peak_bytes == pytest.approx(states + (2 + 3) * max(made.unit_bytes) + other)
    assert found.predicted.peak_bytes < found.predicted.memory_bytes + other
    assert "peak" in plan_text(plan)
    assert recommend(made, Limits()).chosen.predicted.peak_bytes is None


def test_what_runs_on_a_device_today_may_be_planned_for_it():
    """A run that peaks at 70 of 80 GiB takes more than 80 %: it fits, as does what needs no more; what needs more does not."""
    made, gib = calibration(), 2**30
    other = 70 * gib - least_bytes(made)
    plan = recommend(made, Limits(other_bytes=other, device_memory_bytes=80 * gib))
    assert plan.baseline.feasible
    assert "Nothing fits" not in plan.text
    needed = plan.baseline.predicted.memory_bytes
    assert all(choice.feasible or choice.predicted.memory_bytes > needed for choice in plan.candidates)
    whole = next(choice for choice in plan.candidates if choice.triple == "NNN")
    assert "as the run as it is needs, may be planned" in whole.reason
    on_smaller = recommend(made, Limits(other_bytes=other, device_memory_bytes=64 * gib))
    assert not on_smaller.baseline.feasible
    assert "at most 80% may be planned" in on_smaller.baseline.reason
    tight = recommend(made, Limits(other_bytes=other, device_memory_bytes=70 * gib))
    assert tight.baseline.feasible
    assert all(choice.predicted.memory_bytes + other <= 70 * gib for choice in tight.candidates[1:] if choice.feasible)


def test_a_plan_is_exported_or_refused(tmp_path, capsys):
    # One of eight ranks, whose groups nothing tells: measure first, so nothing is written unless it is asked for all the same.
    folder = write_run(tmp_path / "run", [hybrid_rank(0, is_recorded=False, also=500_000)])
    data, config = tmp_path / "plan.json", tmp_path / "out.txt"
    assert run(["recommend", str(folder), "-o", str(data), "-q"]) == 0
    chosen = json.loads(data.read_text())["chosen"]["triple"]
    arguments = ["recommend", str(folder), "--export", f"fsdp2={config}", "-q"]
    assert (run(arguments), config.exists()) == (4, False)
    code = run([*arguments, "--force"])
    if chosen in ("NIG", "NGI", "ING", "IIG"):
        assert code == 2
    else:
        assert code == 0
        assert "def apply" in config.read_text()
        assert re.search(r"^fsdp2: torch 2\.\d+ or later", capsys.readouterr().err, re.MULTILINE)
    assert run(["recommend", str(folder), "--export", "fsdp2", "-q"]) == 2
    assert run(["recommend", str(folder), "--export", f"mxnet={tmp_path / 'x'}", "-q"]) == 2


def test_a_host_bound_run_is_kept():
    """A step that is idle nine tenths of the time gains nothing from another strategy."""
    made = calibration(
        is_gpu=True,
        native_reduce_scatter_is_all_reduce=False,
        fixed_us=2e6,
        compute_us=2e5,
        inter_gbps=estimate(25.0),
        intra_gbps=estimate(150.0),
        inter_alpha_us=estimate(14.0),
        intra_alpha_us=estimate(5.0),
    )
    plan = recommend(made, Limits())
    assert plan.verdict == "keep"
    assert plan.confidence.probability_gain < 0.1


def test_when_nothing_fits_the_optimizer_goes_to_the_host():
    """GGG in 8 ranks holds 2 bytes of 16 a parameter; a device of 1.6 transients of that must offload."""
    made = calibration()
    needed = baseline_bytes(made)
    plan = recommend(made, Limits(device_memory_bytes=0.98 * needed / 0.8))
    assert plan.chosen.offload == "optimizer"
    assert plan.chosen.predicted.terms["optimizer"] == 0.0
    assert plan.chosen.predicted.memory_bytes <= 0.98 * needed
    assert "optimizer on the host" in plan.text
    kept = recommend(made, Limits(device_memory_bytes=1.3 * needed / 0.8))
    assert not any(choice.offload for choice in kept.candidates)


def test_earlier_comparisons_correct_and_widen():
    """Twice 10 % better than predicted: two thirds of it are believed."""
    made = calibration()
    plain = recommend(made, Limits())
    better = recommend(made, Limits(), bias=PredictionBias(mean=2 * math.log(1.1) / 3, spread=0.0, count=2))
    ratio = better.chosen.predicted.speedup.p50 / plain.chosen.predicted.speedup.p50
    assert 1.0 < ratio < 1.1
    assert "2 earlier comparisons" in better.assumptions[-1]
    wide = recommend(made, Limits(), bias=PredictionBias(spread=0.3, count=2)).chosen.predicted.speedup
    assert wide.p90 / wide.p10 > plain.chosen.predicted.speedup.p90 / plain.chosen.predicted.speedup.p10


def test_a_plan_says_what_it_becomes_elsewhere():
    plan = recommend(calibration(), Limits())
    assert [item.world_size for item in plan.outlooks] == [16, 32, 64]
    assert "  2x (16 ranks): " in plan_text(plan)
    shared = replace(plan, origin=replace(plan.origin, model_parallel_ranks=4))
    assert "  2x (16 data-parallel ranks): " in plan_text(shared)
    widths = [item.speedup.p90 / item.speedup.p10 for item in plan.outlooks]
    assert widths == sorted(widths)
    # Four nodes of two: a flat ring takes 7 inter-node rounds, HO-Ring 3.
    assert (plan.ho_ring.rounds_before, plan.ho_ring.rounds_after) == (7, 3)
    assert plan.ho_ring.port_bytes_before == pytest.approx(7 / 8 * 4 * MB)
    assert plan.ho_ring.port_bytes_after == pytest.approx(3 / 4 * 4 * MB)
    steps = [item.step_time_us for item in plan.budget]
    held = [item.redundancy_bytes for item in plan.budget]
    assert steps == sorted(steps, reverse=True)
    assert held == sorted(held)
    assert {item.what.split(" (")[0] for item in plan.sensitivities} >= {
        "inter-node bandwidth",
        "arithmetic of a step",
    }
    faster = next(item for item in plan.sensitivities if item.what.startswith("inter-node bandwidth"))
    assert faster.speedup_if_half > faster.speedup_if_double


def test_a_run_that_breaks_the_limit_is_not_kept():
    made = calibration(baseline=Strategy.parse("NNN"), inter_gbps=estimate(50.0))
    plan = recommend(made, Limits(redundancy_budget_bytes=0.0))
    assert plan.verdict == "change"
    assert plan.chosen.feasible
    assert "beyond GGG, more than the budget" in plan.text


def test_when_nothing_fits_at_all_it_is_said():
    plan = recommend(calibration(), Limits(device_memory_bytes=1.0))
    assert plan.verdict == "keep"
    least = min((c for c in plan.candidates if c.reason.startswith("needs")), key=lambda c: c.predicted.memory_bytes)
    assert plan.text.startswith(f"Nothing fits, not even {choice_name(least)}: it needs")


def test_what_would_change_the_choice_is_judged_as_the_choice_was():
    """Among equals the one with less memory is taken, under the nominal assumptions and under others."""
    plan = recommend(calibration(), Limits())
    assert short_choice_name(plan.chosen) in {item.best_if_half for item in plan.sensitivities}


def test_a_run_in_buckets_is_replayed_in_buckets_and_others_block_by_block():
    """DDP sends 16 MB at once: 14 rounds of a flat ring over 8 ranks; eight units take as many of each."""
    changes = {"baseline": Strategy.parse("NNN"), "framework": Framework.DDP, "micro_batches": 1}
    made = calibration(**changes, unit_bytes=(2 * MB,) * 8, bucket_bytes=(16 * MB,))
    base = baseline_candidate(made)
    ring = 100.0 + 14 * 16 * MB / 8 / 50
    assert step_us(made, base, measured_links(made)) == pytest.approx(ring + 100_000 + 5_000)
    blocks = step_us(made, replace(base, unit_bytes=None), measured_links(made))
    hidden = 100_000 * 2 / 3 * 7 / 8  # all but the first unit's reduction begin while backward still runs
    assert blocks == pytest.approx(8 * (100.0 + 14 * 2 * MB / 8 / 50) + 105_000 - hidden)
