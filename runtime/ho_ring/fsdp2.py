"""Lets unmodified FSDP2 gather and reduce through HO-Ring."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring.choice import Algorithm, Operation
from paro_advise.runtime.ho_ring.collectives import Collectives
from paro_advise.runtime.ho_ring.constants import CALIBRATION_S
from paro_advise.runtime.ho_ring.work import AsyncWork
from paro_advise.runtime.ho_ring.worker import Worker, reaching_all_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from torch import nn

    from paro_advise.runtime.ho_ring.schedules.reductions import Reduction


class PlainMemory:
    """Buffers from torch's own allocator, for FSDP2's custom collectives."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an empty buffer."""
        return torch.empty(tuple(size), dtype=dtype, device=device)


class HoRingAllGather(PlainMemory, AllGather):
    """FSDP2's all-gather through our collectives; one object for all units that share them.

    All ranks must gather in one order: from the first asynchronous gather on, every one goes through
    one thread, or a unit's would overtake that of another on some ranks only.

    Args:
        collectives: its own, since messages of two must not mix.
        algorithm: None for what the calibration chose.
    """

    def __init__(self, collectives: Collectives, algorithm: Algorithm | None = None) -> None:
        self._collectives = collectives
        self._algorithm = algorithm
        self._worker: Worker | None = None

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards of a unit."""
        # A GPU's collectives are asynchronous by themselves.
        if output_tensor.is_cuda or (not async_op and self._worker is None):
            with reaching_all_ranks("a gather of parameters"):
                self._collectives.all_gather(output_tensor, input_tensor, self._algorithm)
            return None
        self._worker = self._worker or Worker("all-gather")
        job: Future[object] = self._worker.submit(
            lambda: self._collectives.all_gather(output_tensor, input_tensor, self._algorithm)
        )
        work = AsyncWork(job, "a gather of parameters", [output_tensor])
        if async_op:
            return work
        work.wait()
        return None


class HoRingReduceScatter(PlainMemory, ReduceScatter):
    """FSDP2's reduce-scatter through our collectives.

    Args:
        collectives: its own.
        algorithm: None for what the calibration chose.
    """

    def __init__(self, collectives: Collectives, algorithm: Algorithm | None = None) -> None:
        self._collectives = collectives
        self._algorithm = algorithm

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Reduction,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce the gradients of a unit."""
        with reaching_all_ranks("a reduction of gradients"):
            self._collectives.reduce_scatter(output_tensor, input_tensor, op, self._algorithm)
        return None


def use_ho_ring(
    model: nn.Module,
    *,
    ranks_per_node: int | None = None,
    algorithm: Algorithm | str | None = None,
    calibration_s: float = CALIBRATION_S,
) -> tuple[Collectives, Collectives]:
    """Let the units of a model that FSDP2 shards gather and reduce through our collectives.

    Every rank calls it after all calls of ``fully_shard``. Numbers may differ from the native
    collectives' in the last bits, because gradients are added in another order.

    Args:
        model: the root.
        ranks_per_node: None for the environment's LOCAL_WORLD_SIZE; 1 makes plain rings.
        algorithm: None to measure which one is fastest at which size.
        calibration_s: how long that may take, each for gathers and reductions.

    Returns:
        The collectives of gathers and of reductions, with what they measured.

    Raises:
        UsageError: the model is not sharded by FSDP2, or over several groups.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    group, device = _shard_group(model, modules)
    per_node = ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    per_node = per_node if group.size() % per_node == 0 else group.size()
    # On a CPU a gather may run in our thread while another one reduces, or the user's code does: on one
    # communicator the ranks would not agree which came first. A GPU's are in order of their calls.
    gathers = Collectives.of(group, ranks_per_node=min(per_node, group.size()), alone=device.type == "cpu")
    reductions = Collectives.of(group, ranks_per_node=min(per_node, group.size()))
    wanted = Algorithm(algorithm) if algorithm else None
    if wanted is None:
        gathers.calibrate([Operation.ALL_GATHER], budget_s=calibration_s, device=device)
        reductions.calibrate([Operation.REDUCE_SCATTER], budget_s=calibration_s, device=device)
    all_gather, reduce_scatter = HoRingAllGather(gathers, wanted), HoRingReduceScatter(reductions, wanted)
    for module in modules:
        if next(module.parameters(), None) is not None:
            module.set_custom_all_gather(all_gather)
            module.set_custom_reduce_scatter(reduce_scatter)
    return gathers, reductions


def _shard_group(model: nn.Module, modules: Sequence[FSDPModule]) -> tuple[dist.ProcessGroup, torch.device]:
    """Return the group that a model's parameters are sharded over, and where they are.

    Raises:
        UsageError: the model is not sharded by FSDP2, or over several groups.
    """
    parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    if not modules or not parameters:
        raise UsageError("the model must be sharded by FSDP2, got none of its modules", hint="call fully_shard first")
    meshes = {parameter.device_mesh for parameter in parameters}
    if len(meshes) > 1:
        raise UsageError(f"all units must be sharded over one mesh, got {len(meshes)}")
    mesh = meshes.pop()
    return mesh.get_group(mesh.ndim - 1), parameters[0].device
