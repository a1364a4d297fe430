"""Costs of collectives against ratios and bounds written out here, and simple cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paro_advise.advisor.ranks.constants import GLOO_HALVES
from paro_advise.core.collective import Op
from paro_advise.errors import UsageError
from paro_advise.policies.collective_cost import RingAlgorithm, effort_of


def cost(algorithm, operation, num_bytes, nodes, local, *, ratio=10.0, inter_alpha=0.0, intra_alpha=0.0, inter=1.0):
    effort = effort_of(algorithm, operation, num_bytes, nodes, local)
    return effort.us(inter_alpha, inter, intra_alpha, ratio * inter)


def bound(num_bytes, nodes, local, ratio=10.0, inter=1.0):
    """Each node must receive what it lacks through its port, each rank through all of its inlets."""
    port = num_bytes * (nodes - 1) / nodes / (inter * 1e3)
    inlets = ratio * inter + inter / local
    rank = num_bytes * (nodes * local - 1) / (nodes * local) / (inlets * 1e3)
    return max(port, rank)


# T_flat/T_HO and T_flat/LB without latency; by B_a/B_e, then n, then m = 2, 4, 8.
RATIOS = {
    3: {
        2: ((1.29, 1.50), (1.40, 1.75), (1.45, 1.88)),
        4: ((1.11, 1.17), (1.15, 1.25), (1.18, 1.29)),
        8: ((1.05, 1.07), (1.07, 1.11), (1.08, 1.12)),
        16: ((1.02, 1.03), (1.03, 1.05), (1.04, 1.06)),
    },
    30: {
        2: ((1.48, 1.50), (1.71, 1.75), (1.82, 1.88)),
        4: ((1.16, 1.17), (1.24, 1.25), (1.28, 1.29)),
        8: ((1.07, 1.07), (1.10, 1.11), (1.12, 1.12)),
        16: ((1.03, 1.03), (1.05, 1.05), (1.06, 1.06)),
    },
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_ratios_of_ho_ring_to_a_flat_ring(ratio, nodes):
    for local, (overlapped, best) in zip((2, 4, 8), RATIOS[ratio][nodes], strict=True):
        flat = cost(RingAlgorithm.RING, Op.ALL_GATHER, 1e9, nodes, local, ratio=ratio)
        ho_ring = cost(RingAlgorithm.HO_RING, Op.REDUCE_SCATTER, 1e9, nodes, local, ratio=ratio)
        # Two decimals are printed there, and one of them is rounded up from 1.015.
        assert flat / ho_ring == pytest.approx(overlapped, abs=0.0101)
        assert flat / bound(1e9, nodes, local, ratio) == pytest.approx(best, abs=0.0101)


@pytest.mark.parametrize(
    ("num_bytes", "wanted"),
    [
        (16e6, (2.11, 1.93, 2.27, 2.99)),
        (128e6, (1.75, 1.34, 1.28, 1.37)),
        (1e9, (1.70, 1.26, 1.13, 1.09)),
    ],
)
def test_latency_makes_ho_ring_win_more_on_many_nodes(num_bytes, wanted):
    links = {"ratio": 8.0, "inter_alpha": 15.0, "intra_alpha": 3.0, "inter": 25.0}
    for nodes, ratio in zip((2, 4, 8, 16), wanted, strict=True):
        flat = cost(RingAlgorithm.RING, Op.ALL_GATHER, num_bytes, nodes, 8, **links)
        ho_ring = cost(RingAlgorithm.HO_RING, Op.ALL_GATHER, num_bytes, nodes, 8, **links)
        assert flat / ho_ring == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize("algorithm", RingAlgorithm)
def test_no_algorithm_beats_the_bound(algorithm):
    for num_bytes in (1e3, 1e6, 1e9):
        took = cost(algorithm, Op.ALL_GATHER, num_bytes, 4, 2, ratio=4.0, inter_alpha=10.0, intra_alpha=2.0, inter=5.0)
        assert took >= bound(num_bytes, 4, 2, 4.0, 5.0) * 0.999


@pytest.mark.parametrize("algorithm", RingAlgorithm)
def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather(algorithm):
    links = {"inter_alpha": 10.0, "intra_alpha": 1.0}
    parts = sum(cost(algorithm, operation, 1e8, 4, 2, **links) for operation in (Op.REDUCE_SCATTER, Op.ALL_GATHER))
    assert cost(algorithm, Op.ALL_REDUCE, 1e8, 4, 2, **links) == pytest.approx(parts)


def test_written_out_on_one_node():
    """8 ranks, 10 GB/s each, 2 us: a ring takes 7 rounds, 7/8 of 1 MB in all."""
    megabyte = 1e6 / 10e3  # us at 10 GB/s
    assert cost(RingAlgorithm.RING, Op.ALL_GATHER, 1e6, 1, 8, intra_alpha=2.0) == pytest.approx(
        7 * 2 + 7 / 8 * megabyte
    )


def gloo_ring_us(nodes, local, half_us, latency_us):
    """Play gloo's ring (allgather.cc): two halves of blocks under way a rank, the third after the first has come in.

    Halves that leave a node take turns on its port for ``half_us`` each; all come in a latency after they were sent.
    """
    ranks = nodes * local
    sent: list[list[float]] = [[] for _ in range(ranks)]
    come: list[list[float]] = [[] for _ in range(ranks)]
    port_free = [0.0] * nodes

    def ready_us(rank):
        place = len(sent[rank]) - 2
        if len(sent[rank]) == 2 * (ranks - 1) or place >= len(come[rank]):
            return math.inf
        return 0.0 if place < 0 else max(sent[rank][place], come[rank][place])

    while (begin := min(map(ready_us, range(ranks)))) < math.inf:
        rank = next(rank for rank in range(ranks) if ready_us(rank) == begin)
        node, to = rank // local, (rank + 1) % ranks
        end = begin
        if to // local != node:
            end = port_free[node] = max(begin, port_free[node]) + half_us
        sent[rank].append(end)
        come[to].append(end + latency_us)
    return max(times[-1] for times in come)


@pytest.mark.parametrize(("nodes", "local"), [(4, 1), (2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("latency_share", [0.0, 0.1, 0.5, 2.0, 20.0])
def test_latency_hides_while_other_ranks_of_a_node_use_its_port(nodes, local, latency_share):
    """A latency of this share of a block's time on the port; rounds that waited for it would miss by up to 47 %."""
    block_us = 2000.0
    played = gloo_ring_us(nodes, local, block_us / 2, latency_share * block_us)
    blocks = nodes * local * block_us * 1e3  # bytes, at 1 GB/s
    effort = replace(
        effort_of(RingAlgorithm.RING, Op.ALL_GATHER, blocks, nodes, local), in_flight=float(GLOO_HALVES * local)
    )
    assert effort.us(latency_share * block_us, 1.0, 0.0, 1e6) == pytest.approx(played, rel=0.11)


@pytest.mark.parametrize(("nodes", "port_bytes"), [(2, 1e9), (4, 2e9 * 31 / 32), (64, 2e9 * 511 / 512)])
def test_all_reduces_by_trees_pass_two_ports_once_and_go_as_deep_as_the_tree(nodes, port_bytes):
    """NCCL's latency of trees: up and down a chain of the node's ranks, and as many hops as halvings of the nodes.

    A hop of a tree between nodes takes it 8.5 us where one of a ring takes 4 us (LL128).
    """
    effort = effort_of(RingAlgorithm.RING, Op.ALL_REDUCE, 1e9, nodes, 8, is_streamed=True, sums_by_trees=True)
    latency_us = 2 * (7 * 5.0 + math.log2(nodes) * 14.0 * 8.5 / 4.0)
    assert effort.us(14.0, 50.0, 5.0, 1e6) == pytest.approx(latency_us + port_bytes / 50e3)
    ring = effort_of(RingAlgorithm.RING, Op.ALL_REDUCE, 1e9, nodes, 8, is_streamed=True)
    assert ring.inter_messages + ring.intra_messages == 2 * (8 * nodes - 1)
    for operation, local_nodes in ((Op.ALL_GATHER, nodes), (Op.ALL_REDUCE, 1)):
        by_trees, by_rings = (
            effort_of(RingAlgorithm.RING, operation, 1e9, local_nodes, 8, is_streamed=True, sums_by_trees=trees)
            for trees in (True, False)
        )
        assert by_trees == by_rings


def test_one_rank_sends_nothing():
    assert cost(RingAlgorithm.RING, Op.ALL_REDUCE, 1e6, 1, 1, inter_alpha=9.0, intra_alpha=9.0) == 0


def test_other_operations_are_refused():
    with pytest.raises(UsageError, match="all_to_all"):
        effort_of(RingAlgorithm.RING, Op.ALL_TO_ALL, 1.0, 2, 2)
