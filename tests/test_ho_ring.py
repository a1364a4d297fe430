"""HO-Ring against torch's own collectives, on real gloo processes."""

from __future__ import annotations

import pytest
from conftest import ROOT
from ranks import run_ranks

from paro_advise.errors import UsageError

WORKER = ROOT / "tests/workers/ho_ring_worker.py"
MIB = 1 << 20


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "per_node"), [(4, "1,2,4"), pytest.param(6, "2,3", marks=pytest.mark.variant)])
def test_collectives_equal_torch_on_every_grid(ranks, per_node):
    """n x m = 4x1, 2x2, 1x4, 3x2 and 2x3; all types, odd sizes, SUM, AVG, MAX, one to many chunks."""
    done = run_ranks(WORKER, per_node, ranks=ranks)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.distributed
@pytest.mark.parametrize("what", ["fsdp2", "backend"])
def test_unmodified_code_trains_the_same(what):
    """FSDP2's plug-in, and the backend under DDP, FSDP1, FSDP2 (1-D, 2-D), ZeroRedundancyOptimizer."""
    done = run_ranks(ROOT / "tests/workers/ho_ring_frameworks.py", what)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout


def table_of(**times):
    """Times at 1 KiB and 1 MiB by algorithm, seconds."""
    from paro_advise.runtime.ho_ring import Algorithm, ChoiceTable, Operation, Sample

    return ChoiceTable(
        tuple(
            Sample(
                operation=Operation.ALL_GATHER,
                num_bytes=size,
                seconds={Algorithm(name): pair[place] for name, pair in times.items()},
            )
            for place, size in enumerate((1 << 10, 1 << 20))
        )
    )


def test_the_fastest_algorithm_is_taken_and_native_in_doubt():
    pytest.importorskip("torch")
    from paro_advise.runtime.ho_ring import Operation

    table = table_of(native=(1.0, 8.0), two_hop=(0.8, 8.0), ho_ring=(2.0, 4.0))
    pick = lambda size: table.pick(Operation.ALL_GATHER, size).value  # noqa: E731
    assert pick(1 << 10) == pick(16) == "two_hop"
    assert pick(1 << 20) == pick(1 << 30) == "ho_ring"
    # Half way on the logarithmic scale two-hop takes sqrt(0.8) = 0.89 of native's time: too little.
    assert pick(1 << 15) == "native"
    assert table.pick(Operation.ALL_REDUCE, 1 << 20).value == "native"  # never measured


def test_a_grid_is_node_major():
    pytest.importorskip("torch")
    from paro_advise.runtime.ho_ring.grid import Grid

    grid = Grid.of(8, 5, 2)
    assert (grid.num_nodes, grid.node, grid.local) == (4, 2, 1)
    assert grid.at(2, 1) == 5
    assert grid.at(4, 0) == 0  # nodes count round the ring
    assert Grid.of(8, 5, 4).peers == (2, 3, 0)


@pytest.mark.parametrize(("size", "index", "per_node"), [(8, 0, 3), (8, 8, 2), (8, 0, 0)])
def test_impossible_grids_are_refused(size, index, per_node):
    pytest.importorskip("torch")
    from paro_advise.runtime.ho_ring.grid import Grid

    with pytest.raises(UsageError):
        Grid.of(size, index, per_node)


def test_a_run_that_something_else_held_up_is_run_again():
    """1 MiB takes 10 ms natively and 5 by HO-Ring, 8 MiB eight times that; the first run of HO-Ring there is held up."""
    from paro_advise.runtime.ho_ring import Algorithm, Operation
    from paro_advise.runtime.ho_ring.calibration import samples_of

    calls = []

    def seconds_of(num_bytes, budget_s):
        calls.append(num_bytes)
        held_up = 0.2 if calls == [MIB, 8 * MIB] else 0.0
        share = num_bytes / MIB
        return {Algorithm.NATIVE: 0.010 * share, Algorithm.HO_RING: 0.005 * share + held_up}

    *_, large = samples_of(Operation.ALL_GATHER, (MIB, 8 * MIB), seconds_of, 0.4)
    assert large.seconds == pytest.approx({Algorithm.NATIVE: 0.080, Algorithm.HO_RING: 0.040})
    assert calls == [MIB, 8 * MIB, 8 * MIB]
    samples_of(Operation.ALL_GATHER, (MIB, 8 * MIB), seconds_of, 0.4)
    assert calls[3:] == [MIB, 8 * MIB]  # nothing is run again where nothing was held up
