"""The backend ``ho_ring``: unmodified code runs on our collectives.

Importing this module registers it; then ``torch.distributed.init_process_group("ho_ring")``. The
transport is gloo, so tensors must be on the CPU. Collectives without an algorithm of ours use gloo's.
"""

# torch calls each method of a group in one way only, while its stub lists several ways for most of them.
# mypy: disable-error-code="override"

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _world

from paro_advise.runtime.ho_ring.choice import Algorithm
from paro_advise.runtime.ho_ring.collectives import Collectives
from paro_advise.runtime.ho_ring.constants import CALIBRATION_S
from paro_advise.runtime.ho_ring.grid import Grid
from paro_advise.runtime.ho_ring.rails import Rails
from paro_advise.runtime.ho_ring.schedules.reductions import RING_REDUCTIONS, reduction_of
from paro_advise.runtime.ho_ring.schedules.ring import HoRing
from paro_advise.runtime.ho_ring.work import AsyncWork
from paro_advise.runtime.ho_ring.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Store, _DistributedBackendOptions

    from paro_advise.runtime.ho_ring.schedules.reductions import Reduction

    Tensors: TypeAlias = list[torch.Tensor]

NAME = "ho_ring"
ALGORITHM_VARIABLE = "PARO_HO_RING"  # native, two_hop or ho_ring: no calibration
CALIBRATION_VARIABLE = "PARO_HO_RING_CALIBRATION_S"


class HoRingGroup(dist.ProcessGroup):
    """A process group whose large collectives go through our algorithms, in order, in one thread."""

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta, per_node: int) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]  # the stub has one of two constructors
        self._store, self._timeout = store, timeout
        self._flat = self._connect("flat", rank, len(ranks))
        self._collectives = Collectives(self._flat, HoRing.over(*self._grid_of(rank, ranks, per_node)))
        self._worker = Worker(NAME)
        self._fixed = Algorithm(os.environ[ALGORITHM_VARIABLE]) if os.environ.get(ALGORITHM_VARIABLE) else None
        if self._fixed is None:
            budget_s = float(os.environ.get(CALIBRATION_VARIABLE, CALIBRATION_S))
            self._collectives.calibrate(budget_s=budget_s)

    def _connect(self, name: str, place: int, size: int) -> dist.ProcessGroup:
        gloo = dist.ProcessGroupGloo(PrefixStore(name, self._store), place, size, self._timeout)
        return cast("dist.ProcessGroup", gloo)  # it has a group's collectives, which its stub leaves out

    def _grid_of(self, rank: int, ranks: Sequence[int], per_node: int) -> tuple[Grid, Rails, Sequence[int]]:
        nodes = [member // per_node for member in ranks]
        width = nodes.count(nodes[0])
        regular = all(
            nodes[place : place + width] == [nodes[place]] * width for place in range(0, len(ranks), width)
        ) and len(set(nodes)) * width == len(ranks)
        grid = Grid.of(len(ranks), rank, width if regular else 1)
        many_nodes, many_local = grid.num_nodes > 1, grid.ranks_per_node > 1
        ring = self._connect(f"ring{grid.local}", grid.node, grid.num_nodes) if many_nodes else None
        inside = self._connect(f"inside{grid.node}", grid.local, grid.ranks_per_node) if many_local else None
        return grid, Rails(ring=ring, inside=inside), ranks

    @property
    def group_name(self) -> str:
        """Return the name that torch gave this group."""
        return str(_world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return NAME

    def _run(self, job: Callable[[], object], what: str, result: Tensors) -> dist.Work:
        return AsyncWork(self._worker.submit(job), what, result)

    def _native(self, job: Callable[[], dist.Work], what: str, result: Tensors) -> dist.Work:
        """Run gloo's collective in the same order as ours."""
        return self._run(lambda: job().wait(), what, result)

    # ---- gathers ------------------------------------------------------------------------------

    def _allgather_base(self, output: torch.Tensor, block: torch.Tensor, opts: object = None) -> dist.Work:
        algorithm = self._fixed if output.is_contiguous() and block.is_contiguous() else Algorithm.NATIVE
        return self._run(lambda: self._collectives.all_gather(output, block, algorithm), "an all-gather", [output])

    all_gather_single = _allgather_base  # type: ignore[assignment]  # argument names differ

    def allgather(self, outputs: list[Tensors], blocks: Tensors, opts: object = None) -> dist.Work:
        """Gather into lists of tensors."""
        places, block = outputs[0], blocks[0]
        if any(place.shape != block.shape for place in places):
            return self._native(lambda: self._flat.allgather(outputs, blocks), "an all-gather", places)

        def job() -> None:
            whole = block.new_empty(len(places) * block.numel())
            self._collectives.all_gather(whole, block.contiguous(), self._fixed)
            for place, part in zip(places, torch.split(whole, block.numel()) if block.numel() else places, strict=True):
                place.copy_(part.view_as(place))

        return self._run(job, "an all-gather", places)

    def all_gather_single_coalesced(self, outputs: Tensors, blocks: Tensors, opts: object = None) -> dist.Work:
        """Gather several tensors."""

        def job() -> None:
            for output, block in zip(outputs, blocks, strict=True):
                self._collectives.all_gather(output, block.contiguous(), self._fixed)

        return self._run(job, "an all-gather", outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]  # argument names differ

    # ---- reductions ---------------------------------------------------------------------------

    def _algorithm_for(self, op: Reduction) -> Algorithm | None:
        return self._fixed if op in RING_REDUCTIONS else Algorithm.NATIVE

    def _reduce_scatter_base(
        self, output: torch.Tensor, blocks: torch.Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        op = reduction_of(opts)
        return self._run(
            lambda: self._collectives.reduce_scatter(output, blocks.contiguous(), op, self._algorithm_for(op)),
            "a reduce-scatter",
            [output],
        )

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]  # argument names differ

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce lists of tensors."""
        parts = inputs[0]
        if any(part.shape != parts[0].shape for part in parts):
            return self._native(lambda: self._flat.reduce_scatter(outputs, inputs, opts), "a reduce-scatter", outputs)
        whole = torch.cat([part.reshape(-1) for part in parts])
        return self._reduce_scatter_base(outputs[0], whole, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        """Reduce several tensors."""
        op = reduction_of(opts)

        def job() -> None:
            for output, blocks in zip(outputs, inputs, strict=True):
                self._collectives.reduce_scatter(output, blocks.contiguous(), op, self._algorithm_for(op))

        return self._run(job, "a reduce-scatter", outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]  # argument names differ

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions | None = None) -> dist.Work:
        """Reduce tensors in place."""
        op = reduction_of(opts)

        def job() -> None:
            for tensor in tensors:
                dense = not tensor.is_sparse and tensor.is_contiguous() and tensor.numel() >= self.size()
                self._collectives.all_reduce(tensor, op, self._algorithm_for(op) if dense else Algorithm.NATIVE)

        return self._run(job, "an all-reduce", tensors)

    allreduce_coalesced = allreduce

    # ---- the rest is gloo's -------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: object) -> dist.Work:
        """Copy from one rank."""
        return self._native(lambda: self._flat.broadcast(tensors, opts), "a broadcast", tensors)

    def reduce(self, tensors: Tensors, opts: object) -> dist.Work:
        """Reduce onto one rank."""
        return self._native(lambda: self._flat.reduce(tensors, opts), "a reduce", tensors)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: object) -> dist.Work:
        """Gather on one rank."""
        return self._native(lambda: self._flat.gather(outputs, inputs, opts), "a gather", [])

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object) -> dist.Work:
        """Scatter from one rank."""
        return self._native(lambda: self._flat.scatter(outputs, inputs, opts), "a scatter", outputs)

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: object = None
    ) -> dist.Work:
        """Exchange parts with every rank."""
        return self._native(
            lambda: self._flat.alltoall_base(output, source, out_sizes, in_sizes), "an all-to-all", [output]
        )

    all_to_all_single = alltoall_base  # type: ignore[assignment]  # argument names differ

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: object = None) -> dist.Work:
        """Exchange tensors with every rank."""
        return self._native(lambda: self._flat.alltoall(outputs, inputs), "an all-to-all", outputs)

    def barrier(self, opts: object = None) -> dist.Work:
        """Wait for all ranks."""
        return self._native(lambda: self._flat.barrier(), "a barrier", [])

    def send(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Send to one rank, beside the collectives."""
        return self._flat.send(tensors, rank, tag)

    def recv(self, tensors: Tensors, rank: int, tag: int = 0) -> dist.Work:
        """Receive from one rank, beside the collectives."""
        return self._flat.recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive from any rank, beside the collectives."""
        return self._flat.recv_anysource(tensors, tag)


def _create(options: _DistributedBackendOptions, _: object = None) -> HoRingGroup:
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return HoRingGroup(options.store, options.group_rank, ranks, options.timeout, per_node)


def register() -> None:
    """Make the backend known to torch; more calls change nothing."""
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 - registering twice is an error
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
