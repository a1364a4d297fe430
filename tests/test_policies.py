"""Strategies: coefficients, memory and dominance against the table of the reference."""

from __future__ import annotations

import itertools

import pytest

from paro_advise.errors import UsageError
from paro_advise.policies.memory import state_bytes
from paro_advise.policies.strategy import ALL, KEPT, PARTIAL_ONLY, Strategy, dominated_by
from paro_advise.policies.traffic import Shape, coefficients, step_traffic

# triple, intra/micro-batch P/D, inter/micro-batch P/D, intra/step, inter/step (gradient + parameter
# sync), memory in multiples of the parameter count at m=8, g=4 for all, 1/16 and 3/1000 trainable.
TABLE = """
NNN 0/0 0/0 2+0 2+0 16.000 2.875 2.042
NNI 0/0 0/0 1+1 2+0 5.500 2.219 2.010
NNG 0/0 0/0 1+1 1+1 4.375 2.148 2.007
NIN 0/1 0/0 1+0 2+0 14.250 2.766 2.037
NII 0/1 0/0 0+1 2+0 3.750 2.109 2.005
NIG 0/1 0/0 0+1 1+1 2.625 2.039 2.002
NGN 0/1 0/1 1+0 1+0 14.062 2.754 2.036
NGI 0/1 0/1 0+1 1+0 3.562 2.098 2.005
NGG 0/1 0/1 0+1 0+1 2.438 2.027 2.001
INN 2/0 0/0 2+0 2+0 14.250 1.125 0.292
INI 2/0 0/0 1+0 2+0 3.750 0.469 0.261
ING 2/0 0/0 1+0 1+1 2.625 0.398 0.257
IIN 2/1 0/0 1+0 2+0 12.500 1.016 0.287
III 2/1 0/0 0+0 2+0 2.000 0.359 0.255
IIG 2/1 0/0 0+0 1+1 0.875 0.289 0.252
IGN 2/1 0/1 1+0 1+0 12.312 1.004 0.286
IGI 2/1 0/1 0+0 1+0 1.812 0.348 0.255
IGG 2/1 0/1 0+0 0+1 0.688 0.277 0.251
GNN 2/0 2/0 2+0 2+0 14.062 0.938 0.105
GNI 2/0 2/0 1+0 2+0 3.562 0.281 0.073
GNG 2/0 2/0 1+0 1+0 2.438 0.211 0.070
GIN 2/1 2/0 1+0 2+0 12.312 0.828 0.099
GII 2/1 2/0 0+0 2+0 1.812 0.172 0.068
GIG 2/1 2/0 0+0 1+0 0.688 0.102 0.064
GGN 2/1 2/1 1+0 1+0 12.125 0.816 0.099
GGI 2/1 2/1 0+0 1+0 1.625 0.160 0.067
GGG 2/1 2/1 0+0 0+0 0.500 0.090 0.064
"""
ROWS = [line.split() for line in TABLE.strip().splitlines()]

# memory, intra and inter bytes per parameter; bf16, m=8, g=4, 4 micro-batches, all trained.
GOLDEN = {
    "NNG": (4.375, 3.5, 0.375), "NII": (3.75, 8.75, 0.375), "NIG": (2.625, 8.75, 0.375), "NGG": (2.4375, 8.75, 0.9375),
    "ING": (2.625, 15.75, 0.375), "III": (2.0, 21.0, 0.375), "IIG": (0.875, 21.0, 0.375), "IGG": (0.6875, 21.0, 0.9375),
    "GGG": (0.5, 21.0, 2.25), "NNN": (16.0, 3.5, 0.375), "GIG": (0.6875, 21.0, 1.6875), "GNG": (2.4375, 15.75, 1.6875),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_coefficients_and_memory_of_all_27(row):
    triple, intra_micro, inter_micro, intra_step, inter_step, *memory = row
    strategy = Strategy.parse(triple)
    got = coefficients(strategy)
    assert f"{got.parameter_per_micro_batch.intra}/{got.gradient_per_micro_batch.intra}" == intra_micro
    assert f"{got.parameter_per_micro_batch.inter}/{got.gradient_per_micro_batch.inter}" == inter_micro
    assert f"{got.gradient_sync_per_step.intra}+{got.parameter_sync_per_step.intra}" == intra_step
    assert f"{got.gradient_sync_per_step.inter}+{got.parameter_sync_per_step.inter}" == inter_step
    shape = Shape(group_size=8, num_groups=4)
    for share, expected in zip((1.0, 1 / 16, 0.003), memory, strict=True):
        assert state_bytes(strategy, shape, 1.0, share).total == pytest.approx(float(expected), abs=5.01e-4)


@pytest.mark.parametrize("triple", GOLDEN)
def test_golden_values(triple):
    shape = Shape(group_size=8, num_groups=4, micro_batches=4)
    memory, intra, inter = GOLDEN[triple]
    strategy = Strategy.parse(triple)
    traffic = step_traffic(strategy, shape, parameter_bytes=2.0, gradient_bytes=2.0)
    assert state_bytes(strategy, shape, 1.0).total == memory
    assert (traffic.intra_bytes, traffic.inter_bytes) == (intra, inter)


def test_the_table_holds_all_triples():
    assert [str(strategy) for strategy in ALL] == [row[0] for row in ROWS]


def test_what_is_left_after_dominance_is_the_kept_set():
    assert tuple(strategy for strategy in ALL if dominated_by(strategy) is None) == KEPT


GRID = [
    Shape(group_size=m, num_groups=g, micro_batches=s)
    for m, g, s in itertools.product((2, 4, 8), (2, 4, 16), (1, 4, 16))
]


@pytest.mark.parametrize("strategy", [item for item in ALL if dominated_by(item)], ids=str)
def test_a_dominated_strategy_never_wins(strategy):
    better = dominated_by(strategy)
    for shape, trained in itertools.product(GRID, (1.0, 1 / 16, 0.003)):
        mine = step_traffic(strategy, shape, 2.0, 2.0 * trained)
        other = step_traffic(better, shape, 2.0, 2.0 * trained)
        assert other.intra_bytes <= mine.intra_bytes + 1e-12
        assert other.inter_bytes <= mine.inter_bytes + 1e-12
        assert state_bytes(better, shape, 1.0, trained).total <= state_bytes(strategy, shape, 1.0, trained).total


# Kept for their other timing (docs/strategies.md).
TIES = [("NNN", "NNG"), ("NNI", "NNG"), ("NII", "NIG"), ("INI", "ING"), ("III", "IIG")]


@pytest.mark.parametrize(("coarse", "fine"), [tuple(map(Strategy.parse, pair)) for pair in TIES], ids=str)
def test_ties_move_the_same_and_hold_more(coarse, fine):
    for shape in GRID:
        assert step_traffic(coarse, shape, 2.0, 2.0) == step_traffic(fine, shape, 2.0, 2.0)
        assert state_bytes(coarse, shape, 1.0).total > state_bytes(fine, shape, 1.0).total


@pytest.mark.parametrize(("few", "full"), PARTIAL_ONLY.items(), ids=str)
def test_partial_strategies_pay_only_when_little_is_trained(few, full):
    shape = Shape(group_size=8, num_groups=4, micro_batches=4)
    assert state_bytes(few, shape, 1.0).total == state_bytes(full, shape, 1.0).total
    assert step_traffic(few, shape, 2.0, 2.0).intra_bytes >= step_traffic(full, shape, 2.0, 2.0).intra_bytes
    assert state_bytes(few, shape, 1.0, 0.003).total < state_bytes(full, shape, 1.0, 0.003).total


@pytest.mark.parametrize("text", ["", "II", "IIGG", "XYZ", "I I"])
def test_wrong_triples_are_refused_with_an_example(text):
    with pytest.raises(UsageError, match="three letters"):
        Strategy.parse(text)


def test_shapes_below_one_are_refused():
    with pytest.raises(UsageError, match=r"shape\.group_size"):
        Shape(group_size=0, num_groups=1)
