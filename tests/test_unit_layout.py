"""Where the rows of parameters lie in the buffers of collectives, compared with torch.chunk."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paro_advise.policies.strategy import Strategy  # noqa: E402
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure, UnitState  # noqa: E402
from paro_advise.runtime.sharding.parameters.layout import UnitLayout  # noqa: E402 - needs torch
from paro_advise.runtime.sharding.parameters.rows import cut_dimension  # noqa: E402

SHAPES = [(7, 3), (16, 2), (1,), (5,), (12, 4, 2), (0, 3), (), (3, 24), (2, 12, 3), (37,)]


def chunk(tensor, count, place, dim):
    """Return what torch.chunk gives one of so many ranks, nothing where it has no more."""
    parts = torch.chunk(tensor, count, dim)
    return parts[place] if place < len(parts) else tensor.narrow(dim, 0, 0)


def cut(tensor, rows, m, g, *, by_ranks, nested):
    """Return the rows of each place by torch.chunk: {(local rank, group): rows}, or {(local rank, 0): band}."""
    tensor = tensor if tensor.dim() else tensor.view(1)
    found = {}
    for local in range(m):
        for group in range(g if nested else 1):
            if by_ranks:
                found[local, group] = chunk(tensor, m * g, group * m + local, rows.dim)
            else:
                band = chunk(tensor, m, local, rows.dim)
                found[local, group] = chunk(band, g, group, rows.dim) if nested and band.numel() else band
    return found


def expected_buffer(tensors, layout, m, g, *, by_ranks, nested):
    """Lay the parts out place by place, each padded with zeros."""
    parts = [
        cut(tensor, rows, m, g, by_ranks=by_ranks, nested=nested)
        for tensor, rows in zip(tensors, layout.rows, strict=True)
    ]
    flat = []
    for local in range(m):
        for group in range(g if nested else 1):
            for rows, found in zip(layout.rows, parts, strict=True):
                size = rows.slice_elements if nested else rows.band_elements
                part = found[local, group].reshape(-1)
                flat += [part, torch.zeros(size - part.numel())]
    return torch.cat(flat)


GRIDS = [(1, 1), (2, 2), (4, 1), (1, 4), (3, 2), (2, 5), (8, 3)]


@pytest.mark.parametrize("kind", ["packed bands", "nested bands", "ranks"])
@pytest.mark.parametrize(("m", "g"), GRIDS)
def test_buffers_hold_what_torch_chunk_cuts(m, g, kind):
    by_ranks, nested = kind == "ranks", kind != "packed bands"
    layout = UnitLayout.of(SHAPES, group_size=m, num_groups=g, local=0, nested=nested, by_ranks=by_ranks)
    numbers = iter(range(1, 10_000))
    tensors = [torch.tensor([float(next(numbers)) for _ in range(math.prod(s))]).view(s) for s in SHAPES]
    buffer = torch.full((m * layout.slab_elements,), -1.0)
    layout.fill(buffer, tensors)
    assert torch.equal(buffer, expected_buffer(tensors, layout, m, g, by_ranks=by_ranks, nested=nested))
    back = [torch.full(shape, -1.0) for shape in SHAPES]
    layout.spread(buffer, back)
    assert all(torch.equal(one, other) for one, other in zip(back, tensors, strict=True))


@pytest.mark.parametrize(("m", "g"), GRIDS)
def test_a_slab_of_slices_goes_into_bands(m, g):
    numbers = iter(range(1, 10_000))
    tensors = [torch.tensor([float(next(numbers)) for _ in range(math.prod(s))]).view(s) for s in SHAPES]
    for local in range(m):
        layout = UnitLayout.of(SHAPES, group_size=m, num_groups=g, local=local, nested=True, by_ranks=False)
        whole = torch.empty(m * layout.slab_elements)
        layout.fill(whole, tensors)
        bands = [chunk(t if t.dim() else t.view(1), m, local, r.dim) for t, r in zip(tensors, layout.rows, strict=True)]
        held = [torch.full((band.numel(),), -1.0) for band in bands]
        layout.unnest(whole.view(m, -1)[local], held)
        assert all(torch.equal(one, band.reshape(-1)) for one, band in zip(held, bands, strict=True))


def test_what_has_no_gradient_is_zero():
    layout = UnitLayout.of([(6,), (5,)], group_size=2, num_groups=2, local=0, nested=True, by_ranks=False)
    buffer = torch.full((2 * layout.slab_elements,), -1.0)
    layout.fill(buffer, [None, torch.ones(5)])
    assert buffer.sum() == 5
    assert layout.view_of(buffer.view(2, -1)[0], 0, sliced=False).abs().sum() == 0


@pytest.mark.parametrize("kind", ["packed bands", "nested bands", "ranks"])
def test_copies_do_not_grow_with_the_ranks(kind):
    """A parameter has at most four kinds of runs of rows, and seven areas of padding, at any number of ranks."""

    def count(num_ranks):
        layout = UnitLayout.of(
            [(4096, 8), (4096 + 8, 8), (4099,)],
            group_size=8,
            num_groups=num_ranks // 8,
            local=0,
            nested=kind != "packed bands",
            by_ranks=kind == "ranks",
        )
        tensors = [torch.zeros(rows.num_rows * rows.row_elements) for rows in layout.rows]
        buffer = torch.empty(8 * layout.slab_elements)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            layout.fill(buffer, tensors)
        return sum(event.count for event in profile.key_averages() if event.key in {"aten::copy_", "aten::zero_"})

    assert all(count(num_ranks) <= 3 * (4 + 7) for num_ranks in (16, 64, 1024, 4096))


@pytest.mark.parametrize("strategy", ["NNN", "GGG"])
def test_gradients_are_packed_where_the_model_is_and_not_where_the_optimizer_steps(strategy):
    """With the optimizer on the host its parameters are there, and collectives are still the device's (here the CPU)."""
    shapes = [(6, 4), (5,)]
    channels: Any = SimpleNamespace(grid=SimpleNamespace(world_size=4, group_size=2))
    procedure = UnitProcedure(Strategy.parse(strategy), channels)
    spec: Any = SimpleNamespace(training=[SimpleNamespace(shape=torch.Size(shape)) for shape in shapes])
    unit = UnitState(
        spec=spec,
        layout=UnitLayout.of(shapes, group_size=2, num_groups=2, local=0, nested=True, by_ranks=False),
        masters=[torch.empty(shape, device="meta") for shape in shapes],
    )
    gradients = [torch.ones(shape) for shape in shapes]
    packed = procedure.whole_buffer(unit, gradients, torch.float32, torch.device("cpu"))
    assert packed.device.type == "cpu"
    assert packed.sum() == 6 * 4 + 5


def test_a_parameter_of_no_elements_is_cut_where_it_has_none():
    assert [cut_dimension(shape, 4) for shape in ((3, 0), (0, 4), (2, 5, 0))] == [1, 0, 2]
