"""Gradients of many micro-batches in bfloat16: prints how far FSDP2's sum, and those of strategies, are from exact.

Arguments: strategies. FSDP2 reduces each pass; a strategy that shards gradients does, too.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paro_advise.runtime import shard

PASSES = 64


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def batches(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, 32, generator=generator) for _ in range(PASSES)]


def flat(model):
    grads = [parameter.grad for parameter in model.parameters()]
    return torch.cat(
        [(grad.full_tensor() if hasattr(grad, "full_tensor") else grad).flatten().double() for grad in grads]
    )


def summed(model, begin_pass):
    """Return the gradient of all passes, of which a function is told before each whether it is the last."""
    for place, batch in enumerate(batches(dist.get_rank())):
        begin_pass(place == PASSES - 1)
        ((model(batch).float() + 1).square().mean() / PASSES).backward()
    return flat(model)


def exact():
    model = made().double()
    for rank in range(dist.get_world_size()):
        for batch in batches(rank):
            ((model(batch.double()) + 1).square().mean() / PASSES / dist.get_world_size()).backward()
    return flat(model)


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    wanted, found = exact(), {}
    plain = made()
    fully_shard(plain, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    found["FSDP2"] = summed(plain, lambda _: None)
    for strategy in sys.argv[1].split(","):
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shard(model, optimizer, strategy, native_collectives=True, param_dtype=torch.bfloat16, keep_types=True)
        found[strategy] = summed(model, model.set_requires_gradient_sync)
    for name, value in found.items():
        if dist.get_rank() == 0:
            print(f"{name} {float((value - wanted).norm() / wanted.norm()):.6e}", flush=True)
    dist.barrier()
    os._exit(0)  # plain torch 2.13 with gloo aborts at exit in some runs where a model is still there


if __name__ == "__main__":
    main()
