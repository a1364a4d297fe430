"""What a run's links say about nodes and pods, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_recommend import MB, calibration, estimate

from paro_advise.advisor.prediction.advice.what_if import Basis, sensitivities
from paro_advise.advisor.prediction.candidates import Candidate, aligned_sizes, baseline_candidate
from paro_advise.advisor.prediction.network_tiers import LinkContext, fit_tiers
from paro_advise.advisor.prediction.recommend import recommend
from paro_advise.advisor.prediction.scoring import Limits
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.advisor.ranks.links.link import Link
from paro_advise.advisor.wording.quantities import bytes_text, gbps_text, time_text
from paro_advise.errors import UsageError
from paro_advise.policies.plan import EstimateSource
from paro_advise.policies.strategy import CollectiveBackend, Strategy

# 8 nodes of 4 ranks.
CLUSTER = LinkContext(world_size=32, ranks_per_node=4, is_gloo=False)


def link(span, size, busbw, spread=1.05, alpha=None):
    return Link(
        op="all_gather",
        span=span,
        group_size=size,
        num_samples=20,
        alpha_us=alpha,
        busbw_gbps=busbw,
        busbw_low_gbps=busbw and busbw / spread,
        busbw_high_gbps=busbw and busbw * spread,
        source="fit",
    )


def test_a_ring_over_nodes_shows_the_least_that_ranks_move_inside_them():
    """No data sheet that was assumed (32 GB/s of PCIe) stands against 60 GB/s that each rank has sent."""
    boxes = replace(CLUSTER, device_name="NVIDIA L40S")
    assert fit_tiers([link("mixed", 32, 60.0)], boxes, None).intra_gbps.value == pytest.approx(60.0)
    low = fit_tiers([link("mixed", 32, 60.0)], boxes, None).intra_gbps
    # Never far below: as uncertain as the ring was, whose range of 5 % either way holds 80 % (1.2816 deviations).
    assert low.sigma == pytest.approx(np.log(1.05) / 1.2816, rel=1e-3)
    assert low.sigma_above == pytest.approx(np.log(1.5))  # PRIOR_BANDWIDTH_FACTOR
    assert fit_tiers([link("mixed", 32, 10.0)], boxes, None).intra_gbps.value < 40.0
    assert fit_tiers([link("mixed", 32, 60.0), link("intra", 4, 20.0)], boxes, None).intra_gbps.value == pytest.approx(
        20
    )


def test_the_latency_of_a_ring_over_nodes_is_that_of_its_hops():
    """Eight nodes of 4: 7 hops between nodes and 24 inside, of which rings inside nodes show 3 us each."""
    links = [link("mixed", 32, 10.0, alpha=7 * 20.0 + 24 * 3.0), link("intra", 4, 150.0, alpha=3 * 3.0)]
    found = fit_tiers(links, CLUSTER, None)
    assert found.inter_alpha_us.value == pytest.approx(20.0)
    assert found.intra_alpha_us.value == pytest.approx(3.0)
    alone = fit_tiers(links[:1], CLUSTER, None)
    assert alone.intra_alpha_us.value == pytest.approx(5 / 14 * alone.inter_alpha_us.value)
    assert not any("latency inside nodes" in note for note in alone.notes)  # it is not assumed


def test_groups_of_two_nodes_that_are_quicker_show_pods():
    links = [
        link("intra", 4, 150.0),
        link("mixed", 8, 40.0, alpha=70.0),
        link("inter", 4, 2.5),
        link("mixed", 32, 10.0),
    ]
    found = fit_tiers(links, CLUSTER, None)
    assert found.nodes_per_pod == 2
    assert found.pod_gbps.value == pytest.approx(40.0)
    # A ring of eight ranks on two nodes has one hop between them and six inside, which take 5 us for 14 (NCCL_PRIOR).
    assert found.pod_alpha_us.value == pytest.approx(70.0 / (1 + 6 * 5 / 14))
    assert found.intra_alpha_us.value == pytest.approx(5 / 14 * found.inter_alpha_us.value)
    # Four ranks a node share the port, each on a ring of its own.
    assert found.inter_gbps.value == pytest.approx(10.0)
    assert found.intra_gbps.value == pytest.approx(150.0)
    assert any(note.startswith("pods of 2 nodes: groups of that size moved 40 GB/s") for note in found.notes)


@pytest.mark.parametrize(
    ("near", "spread"),
    [
        (12.0, 1.05),  # a fifth quicker: any network is, with fewer rounds
        (14.0, 1.8),  # quicker, but the collectives vary by more
    ],
)
def test_groups_that_are_hardly_quicker_show_none(near, spread):
    found = fit_tiers([link("mixed", 8, near, spread), link("mixed", 32, 10.0, spread)], CLUSTER, None)
    assert found.nodes_per_pod is None
    assert found.inter_gbps.value == pytest.approx((near * 10.0) ** 0.5)
    assert found.pod_gbps == found.inter_gbps


@pytest.mark.parametrize(("spread", "source"), [(1.05, "measured"), (2.0, "prior")])
def test_all_reduces_are_held_against_gathers_where_both_are_known_well(spread, source):
    sums = replace(link("intra", 4, 300.0, spread), op="all_reduce")
    found = fit_tiers([link("intra", 4, 200.0), sums, link("mixed", 32, 10.0)], CLUSTER, None)
    assert found.sum_ratio.source == source
    assert found.sum_ratio.value == pytest.approx(1.5 if source == "measured" else 1.0)


def test_gathers_may_be_slower_than_the_all_reduces_that_alone_were_measured():
    """Trees and switches reach up to 1.96 times what rings do (docs/descriptions.md), at the 90th percentile."""
    sums = replace(link("mixed", 32, 10.0), op="all_reduce")
    found = fit_tiers([sums], CLUSTER, None)
    assert found.inter_gbps.source == "sums"
    assert found.sum_ratio.value == 1.0
    assert np.exp(1.2816 * found.sum_ratio.sigma_above) == pytest.approx(1.96, rel=1e-3)
    assert np.exp(1.2816 * found.sum_ratio.sigma) == pytest.approx(1.35, rel=1e-3)
    assert any(note.startswith("gathers between nodes: as fast a byte as all-reduces") for note in found.notes)
    # Of one rank a node nothing is summed up inside nodes first.
    for links in ([link("mixed", 32, 10.0), sums], [replace(link("inter", 8, 3.0), op="all_reduce")]):
        assert fit_tiers(links, CLUSTER, None).inter_gbps.source == "measured"

    def spread(source):
        made = calibration(
            is_gpu=True,
            baseline=Strategy.parse("NNN"),
            inter_gbps=replace(estimate(1.0), source=source),
            sum_ratio=replace(found.sum_ratio, source=EstimateSource.PRIOR),
        )
        step = next(c for c in recommend(made, Limits()).candidates if c.triple == "GGG" and not c.variant).predicted
        return step.step_time_us.p90 / step.step_time_us.p10

    assert spread("sums") - 1 > 3 * (spread("measured") - 1)


def test_gathers_are_as_fast_as_the_ports_through_which_trees_moved_fewer_bytes():
    """On two nodes a tree's bytes pass each port once, those of a ring twice but for a part: 2 (N - 1) / N times."""
    two = replace(CLUSTER, world_size=16, ranks_per_node=8)
    sums = replace(
        link("mixed", 16, 37.5, alpha=98.0), op="all_reduce", num_nodes=2, algorithm="tree", typical_bytes=1e8
    )
    found = fit_tiers([sums], two, None)
    assert found.sums_by_trees
    assert found.inter_gbps.value == pytest.approx(37.5 / (2 * 15 / 16))
    # Seven hops inside a node and one between two, up and down; one of a ring's between takes 14 / 5 of one inside and
    # one of a tree 8.5 / 4 of that (NCCL).
    assert found.inter_alpha_us.value == pytest.approx(98.0 / 2 / (8.5 / 4 + 7 * 5 / 14))
    assert "trees" in " ".join(found.notes)
    wide = fit_tiers([replace(sums, group_size=32, num_nodes=4)], replace(two, world_size=32), None)
    assert wide.inter_gbps.value == pytest.approx(37.5)
    rings = fit_tiers([replace(sums, algorithm="ring")], two, None)
    assert not rings.sums_by_trees
    assert rings.inter_gbps.value == pytest.approx(37.5)
    # Three ranks of two nodes with two each: a port's other ranks have the rest of it.
    odd = fit_tiers([replace(sums, group_size=3)], replace(two, world_size=4, ranks_per_node=2), None)
    assert odd.inter_gbps.value == pytest.approx(37.5 / (2 * 2 / 3) * 2 / 1.5)


def test_small_all_reduces_by_trees_tell_of_two_nodes_only():
    """NCCL takes trees for quicker than rings on two nodes at any size; on more nodes large ones run as rings."""
    small = replace(link("mixed", 16, None, alpha=30.0), op="all_reduce", num_nodes=2, algorithm="tree")
    gathers, two = link("mixed", 16, 20.0), replace(CLUSTER, world_size=16, ranks_per_node=8)
    found = fit_tiers([gathers, small], two, None)
    assert found.sums_by_trees
    assert found.inter_gbps.value == pytest.approx(20.0)
    four = replace(two, world_size=32)
    wide = replace(small, group_size=32, num_nodes=4)
    assert not fit_tiers([replace(gathers, group_size=32), wide], four, None).sums_by_trees
    large = replace(link("mixed", 32, 20.0), op="all_reduce", num_nodes=4, algorithm="ring", typical_bytes=1e8)
    found = fit_tiers([large, replace(wide, span="inter", group_size=4)], four, None)
    assert not found.sums_by_trees
    assert not any("ran as trees" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "gbps"),
    [
        ("NVIDIA L40S", 32.0),
        ("NVIDIA H100 PCIe", 32.0),
        ("Tesla T4", 32.0),
        ("NVIDIA GeForce RTX 4090", 32.0),
        ("NVIDIA RTX A1000", 32.0),
        ("NVIDIA H100 80GB HBM3", 450.0),
    ],
)
def test_devices_without_links_of_their_own_send_by_pcie(name, gbps):
    """Ring collectives reach 0.77 of a data sheet's rate; of a device that nobody knows 150 GB/s are assumed."""
    cluster = replace(CLUSTER, device_name=name)
    assert fit_tiers([link("mixed", 32, 10.0)], cluster, None).intra_gbps.value == pytest.approx(0.77 * gbps)
    unknown = fit_tiers([link("mixed", 32, 10.0)], replace(CLUSTER, device_name="Accelerator 9000"), None)
    assert unknown.intra_gbps.value == pytest.approx(150.0)


def test_rings_with_some_of_a_nodes_ranks_share_its_port():
    """Replicas of groups of two: rings of 16 ranks, two on each of eight nodes, two rings through each port."""
    found = fit_tiers([replace(link("mixed", 16, 5.0), num_nodes=8)], CLUSTER, None)
    assert found.inter_gbps.value == pytest.approx(2 * 5.0)
    assert found.nodes_per_pod is None


def test_what_runs_at_once_shares_the_links_of_its_own_tier_only():
    """Gathers inside nodes beside the reductions of replicas make neither slower."""
    links = [link("intra", 4, 100.0), link("inter", 8, 2.5)]
    found = fit_tiers(links, replace(CLUSTER, concurrent_intra=1.5), None)
    assert found.intra_gbps.value == pytest.approx(1.5 * 100.0)
    assert found.inter_gbps == fit_tiers(links, CLUSTER, None).inter_gbps


def test_rails_of_one_rank_a_node_against_a_ring_of_many():
    """Measured where a run has both; else a ring of many ranks reaches 0.87 of what torch's Inductor assumes."""
    ring, rail = link("mixed", 32, 10.0), link("inter", 8, 3.0)
    both = fit_tiers([ring, rail], CLUSTER, None)
    assert (both.rail_gain.value, both.rail_gain.source) == (pytest.approx(4 * 3.0 / 10.0), "measured")
    assert both.inter_gbps.value == pytest.approx(10.0)
    alone = fit_tiers([ring], CLUSTER, None)
    assert (alone.rail_gain.value, alone.rail_gain.source) == (pytest.approx(1 / 0.87), "prior")
    rails = fit_tiers([rail], CLUSTER, None)
    assert rails.inter_gbps.value == pytest.approx(4 * 3.0 * 0.87)
    assert fit_tiers([ring, rail], replace(CLUSTER, is_gloo=True), None).rail_gain.value == 1.0


def test_groups_across_nodes_use_the_whole_port():
    """III on 8 nodes of 4: the all-reduce of one rank a node moves what the port does, rings of many ranks less."""
    made = calibration(
        world_size=32, ranks_per_node=4, unit_bytes=(400 * MB,), element_bytes=2, gather_width=2, reduce_width=2,
        is_gpu=True, native_reduce_scatter_is_all_reduce=False, micro_batches=1, compute_us=1.0, fixed_us=0.0,
        inter_alpha_us=estimate(0.0), intra_alpha_us=estimate(0.0), inter_gbps=estimate(10.0),
        intra_gbps=estimate(100.0), rail_gain=estimate(1.25), baseline_group_size=4,
    )  # fmt: skip
    hybrid = Candidate(strategy=Strategy.parse("III"), group_size=4, collectives=CollectiveBackend.NATIVE)
    inside = 3 / 4 * 400 * MB / 100e3  # us: a gather or a scatter of the unit among 4 ranks
    across = 2 * 7 / 8 * 400 * MB / 12.5e3  # an all-reduce of each quarter, all four through the port of 12.5 GB/s
    assert step_us(made, hybrid, measured_links(made)) == pytest.approx(2 * inside + across, rel=1e-3)
    whole = Candidate(strategy=Strategy.parse("GGG"), group_size=4, collectives=CollectiveBackend.NATIVE)
    ring = 31 / 32 * 400 * MB / 10e3
    assert step_us(made, whole, measured_links(made)) == pytest.approx(2 * ring, rel=1e-3)


def test_stated_pods_without_a_measurement_are_as_quick_as_the_rest():
    found = fit_tiers([link("mixed", 32, 10.0)], CLUSTER, 4)
    assert found.nodes_per_pod == 4
    assert found.pod_gbps == found.inter_gbps
    assert found.inter_gbps.value == pytest.approx(10.0)
    assert any(note.startswith("links inside pods: as quick as between them") for note in found.notes)
    with pytest.raises(UsageError, match="must divide the 8 nodes"):
        fit_tiers([], CLUSTER, 3)
    assert fit_tiers([], CLUSTER, 8).nodes_per_pod is None


def of_pods(**changes):
    """8 nodes of 2 ranks in pods of 4 nodes, ten times as quick inside a pod."""
    return calibration(world_size=16, nodes_per_pod=4, pod_gbps=estimate(0.5), wait_group_size=16, **changes)


def test_group_sizes_align_with_nodes_and_pods():
    assert aligned_sizes(of_pods()) == [2, 4, 8]
    # 24 nodes in pods of 4: groups of 3 nodes would lie across pods.
    wide = calibration(world_size=48, nodes_per_pod=4)
    assert aligned_sizes(wide) == [2, 4, 8, 16, 24]
    assert 6 in aligned_sizes(replace(wide, nodes_per_pod=None))


def test_a_group_inside_a_pod_uses_the_pods_network():
    """Hybrid sharding over a pod: gathers inside it at 500 MB/s, replicas across at 50 MB/s."""
    made = of_pods(baseline=Strategy.parse("III"), baseline_group_size=8)
    first, ring = 100.0, 7 * 4 * MB / 8 / 500  # us until the first byte; MB/s are bytes per us
    # Two pods' eight rings share ports two by two, each for an eighth of a unit; gloo sums by all-reduce.
    across = first + 2 * 2 * 4 * MB / 8 / 2 / 50
    micro_batch = (4 + 3) * (first + ring) + 4 * (first + 2 * ring) + 50_000.0
    expected = 2 * micro_batch + 4 * across + 5_000.0
    assert step_us(made, baseline_candidate(made), measured_links(made)) == pytest.approx(expected)


def test_a_plan_shards_inside_pods_and_says_what_it_rests_on():
    plan = recommend(of_pods(compute_us=1_000.0), Limits())
    assert plan.chosen.group_size in (2, 4, 8)
    slow = {c.group_size: c.predicted.step_time_us.p50 for c in plan.candidates if c.triple == "III"}
    assert slow[8] < step_us_without_pods(8)
    named = {item.what for item in plan.sensitivities}
    assert {"bandwidth between pods (GB/s)", "inter-node bandwidth within a pod (GB/s)"} <= named


def step_us_without_pods(size):
    plan = recommend(replace(of_pods(compute_us=1_000.0), nodes_per_pod=None), Limits())
    return next(c.predicted.step_time_us.p50 for c in plan.candidates if (c.triple, c.group_size) == ("III", size))


def test_more_nodes_are_more_pods_of_the_same_size():
    made = of_pods()
    links, base = measured_links(made), baseline_candidate(made)
    now = Basis(
        calibration=made,
        links=links,
        anchor=np.array([1.0]),
        arithmetic=np.array([1.0]),
        base=base,
        chosen=base,
        bias=0.0,
    )
    assert len(sensitivities(now, [(base, 1.0)])) == 7
    assert replace(made, world_size=32).has_pods
    assert not replace(made, world_size=8).has_pods


def test_inside_a_node_gloo_is_taken_to_be_as_quick_as_its_cores():
    gloo = replace(CLUSTER, is_gloo=True)

    def assumed(cores):
        return fit_tiers([], replace(gloo, cores_per_rank=cores), None).intra_gbps

    assert assumed(0.5).value == pytest.approx(1.3 * 0.5 * 3 / 4)
    assert assumed(8.0).value == assumed(1.0).value  # a rank's transfers are one thread's
    assert assumed(None).value == assumed(0.25).value
    assert assumed(None).sigma > assumed(0.25).sigma


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.775), (4, 0.775 * 2 * 4 / 6), (8, 0.775 * 2 * 8 / 14)])
def test_ho_ring_inside_a_node_gains_with_up_to_four_ranks(ranks, share):
    def taken(gbps, source):
        made = calibration(ranks_per_node=ranks, world_size=16, intra_gbps=replace(estimate(gbps), source=source))
        ours = Candidate(strategy=Strategy.parse("III"), group_size=ranks, collectives=CollectiveBackend.HO_RING)
        return float(step_us(made, ours, measured_links(made)))

    assert taken(1.0, "prior") == pytest.approx(taken(share, "measured"))
    assert (taken(1.0, "prior") > taken(1.0, "measured")) == (share < 1)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (None, "unknown"), (0.0, "0 us"), (2.33e-10, "0 us"), (0.05, "0.05 us"), (999.4, "999 us"), (999.6, "1 ms"),
        (14_300.0, "14.3 ms"), (14.3e6, "14.3 s"), (9.9e9, "9,900 s"), (-2500.0, "-2.5 ms"),
    ],
)  # fmt: skip
def test_times_are_told_in_the_unit_that_people_use(time_us, text):
    """Three digits; what float64 leaves of a difference is no time."""
    assert time_text(time_us) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (gbps_text(0.0599), "0.0599 GB/s"),
        (gbps_text(167.4), "167 GB/s"),
        (gbps_text(999.6), "1,000 GB/s"),
        (gbps_text(2013.0), "2,013 GB/s"),
        (bytes_text(2.0 * 2**50), "2 PiB"),
        (bytes_text(500 * 2**40), "500 TiB"),
    ],
)
def test_large_quantities_are_written_out(text, wanted):
    assert text == wanted
