"""Runs each collective by the algorithm that a short calibration measured as fastest at its size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from paro_advise.runtime.ho_ring.calibration import Stopwatch, samples_of
from paro_advise.runtime.ho_ring.choice import Algorithm, ChoiceTable, Operation, Sample
from paro_advise.runtime.ho_ring.constants import CALIBRATION_S, SIZES_BYTES
from paro_advise.runtime.ho_ring.groups import Subgroups
from paro_advise.runtime.ho_ring.schedules.reductions import reduce_options, scatter_options
from paro_advise.runtime.ho_ring.schedules.ring import HoRing
from paro_advise.runtime.ho_ring.schedules.two_hop import TwoHop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.runtime.ho_ring.schedules.reductions import Reduction


class Collectives:
    """Native, two-hop and HO-Ring collectives of one group behind one interface.

    Every rank of the group makes it at the same point and calls the same collectives in the same
    order. The algorithms add in different orders: results may differ in the last bits between them,
    never between ranks.

    Attributes:
        table: which algorithm when; equal on all ranks.
        ho_ring: counts what it sends.

    Args:
        native: the group that the backend's own collectives run on.
        ho_ring: of the same ranks.
    """

    def __init__(self, native: dist.ProcessGroup, ho_ring: HoRing) -> None:
        self.native = native
        self.ho_ring = ho_ring
        self.table = ChoiceTable()
        grid = ho_ring.grid
        self._two_hop = TwoHop(grid, ho_ring.rails) if grid.num_nodes > 1 and grid.ranks_per_node > 1 else None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None, *, ranks_per_node: int, alone: bool = False) -> Collectives:
        """Make them for a group of torch's.

        Args:
            group: None for all ranks.
            ranks_per_node: see HoRing.
            alone: the native collectives, too, get a communicator that nothing else uses.
        """
        native = group or _get_default_group()
        if alone:
            ranks = dist.get_process_group_ranks(native)
            native = Subgroups([[ranks]] if len(ranks) == dist.get_world_size() else ()).of(ranks) or native
        return cls(native, HoRing(group, ranks_per_node=ranks_per_node))

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Return those that make sense on this grid."""
        if self.ho_ring.grid.num_nodes == 1:
            return (Algorithm.NATIVE,)
        return tuple(Algorithm) if self._two_hop else (Algorithm.NATIVE, Algorithm.HO_RING)

    def all_gather(self, output: torch.Tensor, block: torch.Tensor, algorithm: Algorithm | None = None) -> None:
        """Gather every rank's block, in order of the group: (N * S) from (S)."""
        match algorithm or self.table.pick(Operation.ALL_GATHER, _num_bytes(output)):
            case Algorithm.HO_RING:
                self.ho_ring.all_gather(output, block)
            case Algorithm.TWO_HOP if self._two_hop:
                self._two_hop.all_gather(output, block)
            case _:
                self.native._allgather_base(output.view(-1), block.view(-1)).wait()  # noqa: SLF001 - in all versions

    def reduce_scatter(
        self,
        output: torch.Tensor,
        blocks: torch.Tensor,
        op: Reduction = dist.ReduceOp.SUM,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Reduce the buffers of all ranks; each rank gets its block: (S) from (N * S)."""
        match algorithm or self.table.pick(Operation.REDUCE_SCATTER, _num_bytes(blocks)):
            case Algorithm.HO_RING:
                self.ho_ring.reduce_scatter(output, blocks, op)
            case Algorithm.TWO_HOP if self._two_hop:
                self._two_hop.reduce_scatter(output, blocks, op)
            case _:
                options = scatter_options(op)
                self.native._reduce_scatter_base(output.view(-1), blocks.view(-1), options).wait()  # noqa: SLF001

    def all_reduce(
        self, tensor: torch.Tensor, op: Reduction = dist.ReduceOp.SUM, algorithm: Algorithm | None = None
    ) -> None:
        """Reduce a tensor over all ranks, in place."""
        match algorithm or self.table.pick(Operation.ALL_REDUCE, _num_bytes(tensor)):
            case Algorithm.HO_RING:
                self.ho_ring.all_reduce(tensor, op)
            case Algorithm.TWO_HOP if self._two_hop:
                self._two_hop.all_reduce(tensor, op)
            case _:
                self.native.allreduce([tensor], reduce_options(op)).wait()

    def calibrate(
        self,
        operations: Sequence[Operation] = tuple(Operation),
        sizes: Sequence[int] = SIZES_BYTES,
        *,
        budget_s: float = CALIBRATION_S,
        device: torch.device | None = None,
    ) -> ChoiceTable:
        """Measure all algorithms and use the fastest from now on; all ranks call it.

        Args:
            operations: what will be used.
            sizes: bytes of the whole buffer.
            budget_s: of an operation, shared out among sizes; each runs at least once all the same.
            device: of the tensors.

        Returns:
            The table, which is now ``table``.
        """
        samples: list[Sample] = []
        if len(self.algorithms) > 1:
            for operation in operations:
                samples += self._measure(operation, sizes, budget_s, device)
        self.table = ChoiceTable(tuple(samples))
        return self.table

    def _measure(
        self, operation: Operation, sizes: Sequence[int], budget_s: float, device: torch.device | None
    ) -> list[Sample]:
        stopwatch = Stopwatch(self.native, device)

        def runs_of(num_bytes: int) -> dict[Algorithm, Callable[[], None]]:
            return {name: self._make_run(operation, num_bytes, name, device) for name in self.algorithms}

        def seconds_of(num_bytes: int, budget_s: float) -> dict[Algorithm, float]:
            return stopwatch.median_seconds(runs_of(num_bytes), budget_s)

        stopwatch.connect(runs_of(sizes[0]))
        return samples_of(operation, sizes, seconds_of, budget_s)

    def _make_run(
        self, operation: Operation, num_bytes: int, algorithm: Algorithm, device: torch.device | None
    ) -> Callable[[], None]:
        size = max(1, num_bytes // 4 // self.ho_ring.size)
        whole = torch.ones(size * self.ho_ring.size, dtype=torch.float32, device=device)
        block = torch.ones(size, dtype=torch.float32, device=device)
        match operation:
            case Operation.ALL_GATHER:
                return lambda: self.all_gather(whole, block, algorithm)
            case Operation.REDUCE_SCATTER:
                return lambda: self.reduce_scatter(block, whole, algorithm=algorithm)
            case _:
                return lambda: self.all_reduce(whole.fill_(1.0), algorithm=algorithm)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
