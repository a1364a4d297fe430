"""Costs of collectives against the reference's tables (strategies, section 5.4) and simple cases."""

from __future__ import annotations

import pytest
from paro_advise.errors import UsageError
from paro_advise.policies.collectives import (
    Algorithm,
    Network,
    Operation,
    algorithms_of,
    cheapest,
    collective_us,
    lower_bound_us,
)


def network(nodes, local, ratio=10.0, inter_alpha=0.0, intra_alpha=0.0, inter=1.0):
    return Network(
        num_nodes=nodes,
        ranks_per_node=local,
        inter_alpha_us=inter_alpha,
        inter_gbps=inter,
        intra_alpha_us=intra_alpha,
        intra_gbps=ratio * inter,
    )


# T_flat/T_seq, T_flat/T_HO, T_flat/LB without latency; by B_a/B_e, then n, then m = 2, 4, 8.
RATIOS = {
    3: {
        2: ((1.12, 1.29, 1.50), (1.17, 1.40, 1.75), (1.18, 1.45, 1.88)),
        4: ((0.95, 1.11, 1.17), (0.94, 1.15, 1.25), (0.93, 1.18, 1.29)),
        8: ((0.90, 1.05, 1.07), (0.86, 1.07, 1.11), (0.84, 1.08, 1.12)),
        16: ((0.88, 1.02, 1.03), (0.83, 1.03, 1.05), (0.81, 1.04, 1.06)),
    },
    30: {
        2: ((1.45, 1.48, 1.50), (1.67, 1.71, 1.75), (1.77, 1.82, 1.88)),
        4: ((1.14, 1.16, 1.17), (1.21, 1.24, 1.25), (1.24, 1.28, 1.29)),
        8: ((1.05, 1.07, 1.07), (1.08, 1.10, 1.11), (1.09, 1.12, 1.12)),
        16: ((1.02, 1.03, 1.03), (1.02, 1.05, 1.05), (1.02, 1.06, 1.06)),
    },
}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("nodes", [2, 4, 8, 16])
def test_ratios_of_the_reference(ratio, nodes):
    for local, (sequential, overlapped, bound) in zip((2, 4, 8), RATIOS[ratio][nodes], strict=True):
        net = network(nodes, local, ratio)
        flat = collective_us(Algorithm.RING, Operation.ALL_GATHER, 1e9, net)
        two_hop = collective_us(Algorithm.TWO_HOP, Operation.ALL_GATHER, 1e9, net)
        ho_ring = collective_us(Algorithm.HO_RING, Operation.REDUCE_SCATTER, 1e9, net)
        # Two decimals are printed there, and one of them is rounded up from 1.015.
        assert flat / two_hop == pytest.approx(sequential, abs=0.0101)
        assert flat / ho_ring == pytest.approx(overlapped, abs=0.0101)
        assert flat / lower_bound_us(Operation.ALL_GATHER, 1e9, net) == pytest.approx(bound, abs=0.0101)


@pytest.mark.parametrize(
    ("num_bytes", "wanted"),
    [
        (16e6, (2.11, 1.93, 2.27, 2.99)),
        (128e6, (1.75, 1.34, 1.28, 1.37)),
        (1e9, (1.70, 1.26, 1.13, 1.09)),
    ],
)
def test_latency_makes_ho_ring_win_more_on_many_nodes(num_bytes, wanted):
    for nodes, ratio in zip((2, 4, 8, 16), wanted, strict=True):
        net = network(nodes, 8, 8.0, inter_alpha=15.0, intra_alpha=3.0, inter=25.0)
        flat = collective_us(Algorithm.RING, Operation.ALL_GATHER, num_bytes, net)
        assert flat / collective_us(Algorithm.HO_RING, Operation.ALL_GATHER, num_bytes, net) == pytest.approx(
            ratio, abs=0.02
        )


@pytest.mark.parametrize("operation", Operation)
def test_no_algorithm_beats_the_bound_of_an_all_gather_like_collective(operation):
    net = network(4, 2, 4.0, inter_alpha=10.0, intra_alpha=2.0, inter=5.0)
    for algorithm in algorithms_of(operation):
        for num_bytes in (1e3, 1e6, 1e9):
            took = collective_us(algorithm, operation, num_bytes, net)
            assert took > 0
            if operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_REDUCE):
                assert took >= lower_bound_us(operation, num_bytes, net) * 0.999, algorithm


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    net = network(4, 2, inter_alpha=10.0, intra_alpha=1.0)
    for algorithm in (Algorithm.RING, Algorithm.TWO_HOP, Algorithm.HO_RING):
        parts = sum(
            collective_us(algorithm, operation, 1e8, net)
            for operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
        )
        assert collective_us(algorithm, Operation.ALL_REDUCE, 1e8, net) == pytest.approx(parts)


def test_written_out_on_one_node():
    """8 ranks, 10 GB/s each, 2 us: recursive doubling takes 3 rounds, a ring 7, 1 MB in all."""
    net = network(1, 8, 10.0, intra_alpha=2.0)
    megabyte = 1e6 / 10e3  # us at 10 GB/s
    assert collective_us(Algorithm.RING, Operation.ALL_GATHER, 1e6, net) == pytest.approx(7 * 2 + 7 / 8 * megabyte)
    assert collective_us(Algorithm.BUTTERFLY, Operation.ALL_GATHER, 1e6, net) == pytest.approx(3 * 2 + 7 / 8 * megabyte)
    assert collective_us(Algorithm.TREE, Operation.BROADCAST, 1e6, net) == pytest.approx(3 * (2 + megabyte))
    assert collective_us(Algorithm.RABENSEIFNER, Operation.ALL_REDUCE, 1e6, net) == pytest.approx(
        2 * (3 * 2 + 7 / 8 * megabyte)
    )
    assert collective_us(Algorithm.SERVER, Operation.ALL_REDUCE, 1e6, net) == pytest.approx(2 * 7 * (2 + megabyte))
    assert collective_us(Algorithm.PAIRWISE, Operation.ALL_TO_ALL, 1e6, net) == pytest.approx(7 * 2 + 7 / 8 * megabyte)


def test_small_messages_want_few_rounds_and_large_ones_few_bytes():
    net = network(4, 8, 8.0, inter_alpha=15.0, intra_alpha=3.0, inter=25.0)
    small, _ = cheapest(Operation.ALL_REDUCE, 1e3, net)
    large, _ = cheapest(Operation.ALL_REDUCE, 1e9, net)
    assert small in (Algorithm.TREE, Algorithm.BUTTERFLY, Algorithm.RABENSEIFNER)
    assert large in (Algorithm.HO_RING, Algorithm.RABENSEIFNER)
    only, _ = cheapest(Operation.ALL_REDUCE, 1e9, net, [Algorithm.RING, Algorithm.TREE])
    assert only == Algorithm.RING


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="one that does all_to_all"):
        collective_us(Algorithm.RING, Operation.ALL_TO_ALL, 1.0, network(2, 2))
    with pytest.raises(UsageError, match="inter_gbps"):
        network(2, 2, inter=0.0)
    assert collective_us(Algorithm.RING, Operation.ALL_GATHER, 1e9, network(1, 1)) == 0.0
