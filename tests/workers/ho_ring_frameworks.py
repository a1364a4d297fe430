"""Unmodified FSDP2, DDP, FSDP1 and ZeroRedundancyOptimizer on HO-Ring: as one process would train."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import sys
import time

import torch
import torch.distributed as dist
from sharding_worker import Model, compare, data, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from paro_advise.errors import UsageError
from paro_advise.runtime.ho_ring import Algorithm, use_ho_ring
from paro_advise.runtime.ho_ring import backend as backend_of_ours

STEPS, CLIP = 4, 0.5


def train_single(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    world, trace = dist.get_world_size(), []
    for step in range(STEPS):
        losses = [loss_of(model, data(step, 0, rank)) / world for rank in range(world)]
        sum(losses).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        trace.append((sum(loss.item() for loss in losses), norm.item()))
    return trace


def train(model, optimizer, clip=None):
    world, rank, trace = dist.get_world_size(), dist.get_rank(), []
    clip = clip or (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    for step in range(STEPS):
        loss = loss_of(model, data(step, 0, rank))
        loss.backward()
        norm = clip()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        trace.append((total.item() / world, norm.item()))
    return trace


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def sharded(first, mesh):
    model = copy.deepcopy(first)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def plugged(first, wanted):
    """FSDP2's own plug-in points, with each algorithm, measured and prefetching."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for algorithm in (*Algorithm, None):
        for prefetches in (False, True):
            model = sharded(first, mesh)
            gathers, reductions = use_ho_ring(model, ranks_per_node=2, algorithm=algorithm, calibration_s=0.5)
            if prefetches:
                prefetch(model)
                gathers.all_gather = late_in_turn(gathers.all_gather)
            compare(f"fsdp2 {algorithm} {prefetches}", train(model, sgd(model)), wanted, 1e-6)
            sent = [c.ho_ring.sent_between.messages for c in (gathers, reductions)]
            assert all(sent) if algorithm == Algorithm.HO_RING else True
    try:
        use_ho_ring(copy.deepcopy(first))
    except UsageError:
        return
    raise AssertionError("a model without FSDP2 was accepted")


def prefetch(model):
    """Let gathers be under way while others are, and while gradients are reduced."""
    for place, block in enumerate(model.blocks):
        block.set_modules_to_forward_prefetch(list(model.blocks[place + 1 :]))
        block.set_modules_to_backward_prefetch(list(model.blocks[:place])[::-1])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(module is not model.blocks[-1])


def late_in_turn(all_gather):
    """Were the order of collectives not that of their calls, ranks would not agree on it."""
    places = itertools.count()

    def late(*args):
        if (dist.get_rank() + next(places)) % 2 == 0:
            time.sleep(0.01)
        all_gather(*args)

    return late


def backend(first, wanted):
    compare("ddp", train(model := DistributedDataParallel(copy.deepcopy(first)), sgd(model)), wanted, 1e-6)
    model = DistributedDataParallel(copy.deepcopy(first))
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    compare("zero", train(model, zero), wanted, 1e-6)
    model = FullyShardedDataParallel(copy.deepcopy(first), device_id=torch.device("cpu"))
    compare("fsdp1", train(model, sgd(model), lambda: model.clip_grad_norm_(CLIP)), wanted, 1e-6)
    model = sharded(first, init_device_mesh("cpu", (dist.get_world_size(),)))
    compare("fsdp2", train(model, sgd(model)), wanted, 1e-6)
    model = sharded(
        first, init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    )
    compare("hsdp", train(model, sgd(model)), wanted, 1e-6)
    other_operations()


def other_operations():
    """What has no algorithm of ours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    value = torch.full((3,), float(rank))
    dist.broadcast(value, 1)
    assert value.tolist() == [1.0] * 3
    least = torch.tensor([5 - rank])
    dist.all_reduce(least, dist.ReduceOp.MIN)
    assert least.item() == 6 - world
    everyone = [None] * world
    dist.all_gather_object(everyone, {"rank": rank})
    assert everyone == [{"rank": other} for other in range(world)]
    parts = torch.arange(world) + 10 * rank
    exchanged = torch.empty_like(parts)
    dist.all_to_all_single(exchanged, parts)
    assert exchanged.tolist() == [10 * other + rank for other in range(world)]
    if rank < 2:
        peer = torch.zeros(2)
        work = dist.isend(torch.full((2,), float(rank)), 1 - rank)
        dist.recv(peer, 1 - rank)
        work.wait()
        assert peer.tolist() == [float(1 - rank)] * 2
    dist.barrier()


def main():
    what = sys.argv[1]
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # two nodes of two ranks
    if what == "backend":
        backend_of_ours.register()
        os.environ["PARO_HO_RING"] = "ho_ring"
        dist.init_process_group("ho_ring")
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first = Model()
    wanted = train_single(copy.deepcopy(first))
    {"fsdp2": plugged, "backend": backend}[what](first, wanted)
    if dist.get_rank() == 0:
        print("equal", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
