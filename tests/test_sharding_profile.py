"""Our analyzer reads our own runs: what was moved, for which state, over which group."""

from __future__ import annotations

import pytest
from helpers import analyze
from test_sharding import run

pytestmark = pytest.mark.distributed

STRATEGIES = ("IIG", "NIG", "GGG")
UNITS, MICRO_BATCHES, STEPS = 3, 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("profiles")
    run("sharding_profile", made, *STRATEGIES, warnings="default")
    return made


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_of_ours_is_understood(strategy, folder):
    analysis = analyze(folder / strategy)
    assert analysis.run.strategy.triple == strategy
    assert analysis.run.strategy.group_size == 2
    assert analysis.run.framework == "paro-advise runtime"
    states = analysis.states
    # docs/strategies.md, procedure: gathers twice a micro-batch; reductions once a micro-batch and unit, and
    # once more at the boundary where the optimizer is finer; updated parameters once a step.
    # World-wide collectives in two hops count twice.
    hops = {"I": 1, "G": 2}
    gathers = 0 if strategy[0] == "N" else 2 * MICRO_BATCHES * UNITS * hops[strategy[0]]
    reductions = MICRO_BATCHES * UNITS * hops[strategy[1]]
    boundary = UNITS if strategy[1] != strategy[2] else 0
    updates = {"N": 2 * UNITS, "I": UNITS, "G": 0}[strategy[0]]
    assert states["parameter"].count == pytest.approx(gathers)
    notes = 3  # an all-reduce that tells which parameters have a gradient: a scatter, an all-reduce, a gather
    assert states["gradient"].count == pytest.approx(reductions + boundary + notes)
    assert states["optimizer"].count == pytest.approx(updates)
    assert states["gradient"].evidence == "annotation"
    assert states["unknown"].count == 0
    assert {entry.group_size for entry in analysis.collectives if entry.state in ("parameter", "gradient")} == {2}
