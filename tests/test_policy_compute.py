"""Activations, arithmetic and named systems."""

from __future__ import annotations

import pytest
from paro_advise.errors import UsageError
from paro_advise.policies.compute import (
    Recomputation,
    TransformerShape,
    activation_bytes,
    model_flops_utilization,
    step_flops,
)
from paro_advise.policies.strategy import Strategy
from paro_advise.policies.systems import Relation, strategy_of, systems_of


def shape(**changes):
    """GPT-3 175B on one rank of eight tensor-parallel ones, as in the paper's table."""
    usual = {"layers": 96, "hidden": 12288, "heads": 96, "sequence": 2048, "micro_batch": 1}
    return TransformerShape(**(usual | changes))


def test_activations_are_the_papers_formula():
    tokens, hidden = 2048, 12288
    # sbh (34 + 5 a s / h): 5 a s / h = 80 for GPT-3.
    assert activation_bytes(shape()) == pytest.approx(96 * tokens * hidden * (34 + 80))
    assert activation_bytes(shape(), Recomputation.SELECTIVE) == pytest.approx(96 * tokens * hidden * 34)
    assert activation_bytes(shape(), Recomputation.FULL) == pytest.approx(96 * tokens * hidden * 2)
    assert activation_bytes(shape(tensor_parallel=8)) == pytest.approx(96 * tokens * hidden * (10 + 24 / 8 + 80 / 8))
    parallel = shape(tensor_parallel=8, sequence_parallel=True)
    assert activation_bytes(parallel, Recomputation.SELECTIVE) == pytest.approx(96 * tokens * hidden * 34 / 8)
    assert activation_bytes(shape(fused_attention=True)) == activation_bytes(shape(), Recomputation.SELECTIVE)


def test_arithmetic():
    assert step_flops(7e9, 4e6) == 6 * 7e9 * 4e6
    assert step_flops(7e9, 4e6, Recomputation.FULL) == 8 * 7e9 * 4e6
    # 7B, 4M tokens in 10 s on 64 devices of 312 TFLOPS.
    assert model_flops_utilization(7e9, 4e6, 10.0, 64 * 312e12) == pytest.approx(0.841, abs=1e-3)


def test_impossible_shapes_are_refused():
    with pytest.raises(UsageError, match="at least 1, got 0"):
        shape(layers=0)


def test_systems_in_both_directions():
    names = {system.name for system in systems_of(Strategy.parse("III"))}
    assert {"HSDP", "MiCS", "FSDP hybrid shard zero2"} <= names
    assert {system.name for system in systems_of(Strategy.parse("NII"))} == {"FSDP hybrid shard zero2"}
    assert strategy_of("zero-3").strategy == Strategy.parse("GGG")
    assert strategy_of("ZeRO++ HPZ").relation == Relation.EXTRA_COPY
    assert strategy_of("fsdp shard grad op").peak == Strategy.parse("NGG")
    assert strategy_of("unheard of") is None
