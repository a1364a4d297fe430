"""Takes for each collective the algorithm that a short calibration found fastest at its size."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paro_advise.runtime.ho_ring.collectives import HoRing
from paro_advise.runtime.ho_ring.groups import Subgroups
from paro_advise.runtime.ho_ring.two_hop import TwoHop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# How much faster than the native collective another one must be measured to be taken: small messages
# vary by a tenth from one calibration to the next.
_SMALL_BYTES, _SMALL_MARGIN, _MARGIN = 1 << 20, 0.85, 0.95
_SIZES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
_REPEATS = (3, 25)  # at least and at most, as the time allows


class Operation(StrEnum):
    """A collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Algorithm(StrEnum):
    """A way to do it."""

    NATIVE = "native"
    TWO_HOP = "two_hop"
    HO_RING = "ho_ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of one collective at one size, equal on all ranks.

    Attributes:
        operation: which.
        num_bytes: of the whole buffer, as nccl-tests count.
        seconds: by algorithm; the slowest rank's median.
    """

    operation: Operation
    num_bytes: int
    seconds: Mapping[Algorithm, float]


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """What a calibration measured; () takes the native collective always."""

    samples: tuple[Sample, ...] = ()

    def pick(self, operation: Operation, num_bytes: int) -> Algorithm:
        """Return the algorithm for a buffer size.

        Between two measured sizes times are interpolated, both on logarithmic scales; outside, the
        nearest size decides. The native collective is kept unless another one is 5 % faster, 15 % below
        1 MiB.
        """
        points = sorted((s for s in self.samples if s.operation == operation), key=lambda s: s.num_bytes)
        if not points:
            return Algorithm.NATIVE
        below = max((p for p in points if p.num_bytes <= num_bytes), key=lambda p: p.num_bytes, default=points[0])
        above = min((p for p in points if p.num_bytes >= num_bytes), key=lambda p: p.num_bytes, default=points[-1])
        span = math.log(above.num_bytes / below.num_bytes)
        share = math.log(num_bytes / below.num_bytes) / span if span > 0 else 0.0
        times = {
            algorithm: math.exp(
                (1 - share) * math.log(below.seconds[algorithm]) + share * math.log(above.seconds[algorithm])
            )
            for algorithm in below.seconds
        }
        best = min(times, key=lambda algorithm: times[algorithm])
        margin = _SMALL_MARGIN if num_bytes < _SMALL_BYTES else _MARGIN
        return best if times[best] <= margin * times[Algorithm.NATIVE] else Algorithm.NATIVE


class Collectives:
    """Native, two-hop and HO-Ring collectives of one group under one roof.

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

    def __init__(self, native: Any, ho_ring: HoRing) -> None:
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
        native = group or dist.group.WORLD
        if alone:
            ranks = dist.get_process_group_ranks(native)
            native = Subgroups([ranks] if len(ranks) == dist.get_world_size() else ()).of(ranks) or native
        return cls(native, HoRing(group, ranks_per_node=ranks_per_node))

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """Return those that make sense on this grid."""
        if self.ho_ring.grid.num_nodes == 1:
            return (Algorithm.NATIVE,)
        return tuple(Algorithm) if self._two_hop else (Algorithm.NATIVE, Algorithm.HO_RING)

    def all_gather(self, output: torch.Tensor, block: torch.Tensor, algorithm: Algorithm | None = None) -> None:
        """Gather every rank's block, in order of the group: (N * S) from (S)."""
        match algorithm or self.table.pick(Operation.ALL_GATHER, _bytes(output)):
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
        op: Any = dist.ReduceOp.SUM,
        algorithm: Algorithm | None = None,
    ) -> None:
        """Reduce the buffers of all ranks; each rank gets its block: (S) from (N * S)."""
        match algorithm or self.table.pick(Operation.REDUCE_SCATTER, _bytes(blocks)):
            case Algorithm.HO_RING:
                self.ho_ring.reduce_scatter(output, blocks, op)
            case Algorithm.TWO_HOP if self._two_hop:
                self._two_hop.reduce_scatter(output, blocks, op)
            case _:
                options = dist.ReduceScatterOptions()
                options.reduceOp = op
                self.native._reduce_scatter_base(output.view(-1), blocks.view(-1), options).wait()  # noqa: SLF001

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, algorithm: Algorithm | None = None) -> None:
        """Reduce a tensor over all ranks, in place."""
        match algorithm or self.table.pick(Operation.ALL_REDUCE, _bytes(tensor)):
            case Algorithm.HO_RING:
                self.ho_ring.all_reduce(tensor, op)
            case Algorithm.TWO_HOP if self._two_hop:
                self._two_hop.all_reduce(tensor, op)
            case _:
                options = dist.AllreduceOptions()
                options.reduceOp = op
                self.native.allreduce([tensor], options).wait()

    def calibrate(
        self,
        operations: Sequence[Operation] = tuple(Operation),
        sizes: Sequence[int] = _SIZES,
        *,
        budget_s: float = 5.0,
        device: torch.device | None = None,
    ) -> ChoiceTable:
        """Measure all algorithms and use the fastest from now on; all ranks call it.

        Args:
            operations: what will be used.
            sizes: bytes of the whole buffer.
            budget_s: shared out among operations and sizes; each runs at least four times all the same.
            device: of the tensors.

        Returns:
            The table, which is now ``table``.
        """
        samples: list[Sample] = []
        if len(self.algorithms) > 1:
            for operation in operations:
                samples += self._measure(operation, sizes, budget_s / len(operations), device)
        self.table = ChoiceTable(tuple(samples))
        return self.table

    def _measure(
        self, operation: Operation, sizes: Sequence[int], budget_s: float, device: torch.device | None
    ) -> list[Sample]:
        found: list[Sample] = []
        for num_bytes in sizes:
            runs = {algorithm: self._job(operation, num_bytes, algorithm, device) for algorithm in self.algorithms}
            for run in runs.values():
                self._timed(run, device)  # connects and allocates
            times: dict[Algorithm, list[float]] = {algorithm: [] for algorithm in runs}
            spent, least, most = 0.0, *_REPEATS
            for repeat in range(most):
                for algorithm, run in runs.items():
                    times[algorithm].append(self._timed(run, device))
                    spent += times[algorithm][-1]
                if repeat + 1 >= least and spent > budget_s / len(sizes):
                    break
            medians = {algorithm: statistics.median(values) for algorithm, values in times.items()}
            found.append(Sample(operation=operation, num_bytes=num_bytes, seconds=medians))
        return found

    def _timed(self, run: Callable[[], None], device: torch.device | None) -> float:
        """Return the slowest rank's seconds, equal on all ranks."""
        took = torch.zeros(1, dtype=torch.float64, device=device)
        self.native.allreduce([took]).wait()  # all start together
        _synchronize(device)
        begin = time.perf_counter()
        run()
        _synchronize(device)
        took.fill_(time.perf_counter() - begin)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self.native.allreduce([took], options).wait()
        return float(took.item())

    def _job(
        self, operation: Operation, num_bytes: int, algorithm: Algorithm, device: torch.device | None
    ) -> Callable[[], None]:
        size = max(1, num_bytes // 4 // self.ho_ring.size)
        whole = torch.ones(size * self.ho_ring.size, device=device)
        block = torch.ones(size, device=device)
        match operation:
            case Operation.ALL_GATHER:
                return lambda: self.all_gather(whole, block, algorithm)
            case Operation.REDUCE_SCATTER:
                return lambda: self.reduce_scatter(block, whole, algorithm=algorithm)
            case _:
                return lambda: self.all_reduce(whole.fill_(1.0), algorithm=algorithm)


def _bytes(tensor: torch.Tensor) -> int:
    return int(tensor.numel() * tensor.element_size())


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
