"""Stated links: between nodes a node's port and each rank's way inside its node both bound what a group moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_descriptions import described, described_text

from paro_advise.advisor.description.calibrate import calibrate_described
from paro_advise.advisor.prediction.candidates import baseline_candidate
from paro_advise.advisor.prediction.cluster_links import StepCollectives
from paro_advise.advisor.prediction.step_replay import measured_links, step_us
from paro_advise.core.collective import Op
from paro_advise.policies.collective_cost import RingAlgorithm
from paro_advise.policies.procedure import Hop, Scope

PCIE = """
[model]
parameters = 7e9
layers = 32
sequence_length = 4096
[cluster]
nodes = 4
gpus_per_node = 8
device = "H100"
inter_gbps = 100
intra_gbps = 10
[run]
framework = "fsdp2"
strategy = "GGG"
micro_batch_size = 2
compute_mfu_pct = [40, 40.001]
"""


def test_links_inside_nodes_bound_what_goes_between_them():
    """Two gathers and a scatter of 14e9 bytes; each rank passes 31 of 32 parts on at 10 GB/s."""
    run = calibrate_described(described(PCIE))
    assert run.step_us >= 3 * 14e9 * 31 / 32 / 10e9 * 1e6
    one_node = calibrate_described(described(described_text(PCIE, **{"nodes = 4": "nodes = 1"})))
    assert run.step_us > one_node.step_us


def test_slower_links_inside_nodes_never_make_a_step_quicker():
    run = calibrate_described(described(described_text(PCIE, **{"intra_gbps = 10": "intra_gbps = 400"})))
    links, now = measured_links(run), baseline_candidate(run)
    steps = [float(step_us(run, now, replace(links, intra_gbps=rate))) for rate in (400.0, 100.0, 50.0, 10.0)]
    assert steps == sorted(steps)
    assert steps[-1] > 2 * steps[0]


@pytest.mark.parametrize("algorithm", list(RingAlgorithm))
@pytest.mark.parametrize("group_size", [2, 8])
def test_groups_that_meet_between_nodes_share_the_port_by_any_algorithm(algorithm, group_size):
    """32 ranks sum 8e9 bytes of gradients: 2 * 7/8 of a rank's 1e9 and so on, of 8 ranks a node, through 100 GB/s.

    In groups of 8, 8 rings of one rank a node move 2 * 3/4 of 1e9 bytes each; in groups of 2, two rings of four.
    """
    run = calibrate_described(described(described_text(PCIE, **{"intra_gbps = 10": "intra_gbps = 100000"})))
    links = replace(measured_links(run), inter_alpha_us=0.0, intra_alpha_us=0.0)
    collectives = StepCollectives(
        world_size=32, ranks_per_node=8, nodes_per_pod=None, group_size=group_size, algorithm=algorithm,
        reduce_is_all_reduce=False, is_streamed=True,
    )  # fmt: skip
    size = 32 // group_size
    bytes_of_a_ring = 8e9 / group_size
    by_hand_us = {
        RingAlgorithm.RING: 2 * (size - 1) / size * bytes_of_a_ring * group_size / 100e9 * 1e6,
        RingAlgorithm.HO_RING: 2 * 3 / 4 * bytes_of_a_ring * group_size / 100e9 * 1e6,
    }[algorithm]
    found = links.us(collectives.parts((Hop(Op.ALL_REDUCE, Scope.ACROSS),), 8e9))
    assert float(found) == pytest.approx(by_hand_us, rel=0.05)


LISTED = described_text(PCIE, **{"intra_gbps = 10": "intra_gbps = 346\nlinks = { all_gather = { 16 = 55 } }"})


def test_links_inside_nodes_say_nothing_of_those_between():
    """Of one listed number of nodes its rate holds for all: 55 GB/s on 4 nodes, not a mean with the 346 inside them."""
    slow, quick = (calibrate_described(described(LISTED.replace("346", rate))).shaped.rates for rate in ("346", "3460"))
    assert [rates.busbw_gbps(Op.ALL_GATHER, 4, 8) for rates in (slow, quick)] == [55.0, 55.0]


@pytest.mark.parametrize("message", ["64MB", "8GB"])
def test_the_message_of_a_benchmark_says_nothing_of_what_is_stated(message):
    """Cards of 100 GB/s move no more since links inside nodes were measured with some message."""
    links = f'intra_gbps = 10\nlinks = {{ message = "{message}", all_gather = {{ 1 = 346 }} }}'
    rates = calibrate_described(described(described_text(PCIE, **{"intra_gbps = 10": links}))).shaped.rates
    assert rates.wire_gbps(Op.ALL_GATHER, 4, 8, 14.0) == 100.0
    assert rates.wire_gbps(Op.ALL_GATHER, 1, 8, 5.0) > 346.0  # a benchmark's time holds latency
