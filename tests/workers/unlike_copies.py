"""Noise that each rank draws for itself is refused where a plan keeps copies of a parameter; like noise is not."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from sharding_by_hand import fresh, one_pass, refused, sgd

from paro_advise.errors import DivergedError
from paro_advise.runtime import shard


def trains_with_noise(strategy, generator):
    model = fresh()
    model, optimizer = shard(model, sgd(model), strategy, group_size=2)
    for step in range(2):
        optimizer.zero_grad()
        one_pass(model, step)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + torch.rand((), generator=generator))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    for strategy in ("NNN", "NNG", "IGG", "III"):
        own = torch.Generator().manual_seed(rank)
        refused(
            "copies that differ", lambda own=own, strategy=strategy: trains_with_noise(strategy, own), DivergedError
        )
        trains_with_noise(strategy, torch.Generator().manual_seed(0))
    for strategy in ("IGG", "III"):
        # Each shard is noisy in a way of its own, and its copy in the other group in the same.
        trains_with_noise(strategy, torch.Generator().manual_seed(rank % 2))
    trains_with_noise("GGG", torch.Generator().manual_seed(rank))
    print("held", flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
