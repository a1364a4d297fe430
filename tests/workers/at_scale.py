"""Rank 0 of a world of 1,024 ranks that is not there: which process groups a strategy makes.

Torch's fake backend lets collectives end at once, without a result; nothing is compared.
"""

import gc
import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from paro_advise.runtime import shard
from paro_advise.runtime.ho_ring import groups
from paro_advise.runtime.sharding.exchange.channels import Channels
from paro_advise.runtime.sharding.exchange.usage import Usage

WORLD = 1024


def model_of(num_blocks=3, width=64):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(width, width), nn.Sequential(*blocks))


def groups_of(strategy, group_size, *, native):
    """Shard a model and take a step; return the calls that make groups, each with the groups that it names."""
    made = []
    new_group, split_group = dist.new_group, dist.split_group
    dist.new_group = lambda ranks, **options: made.append([ranks]) or new_group(ranks, **options)

    def split(*, split_ranks, **options):
        made.append(split_ranks)
        mine = next(ranks for ranks in split_ranks if 0 in ranks)
        return new_group(mine, use_local_synchronization=True, **options)

    dist.split_group = split
    try:
        model = model_of()
        optimizer = torch.optim.AdamW(model.parameters())
        shard(model, optimizer, strategy, group_size=group_size, ranks_per_node=8, native_collectives=native)
        model(torch.randn(2, 64)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    finally:
        dist.new_group, dist.split_group = new_group, split_group
    return [[len(call), sorted({rank for ranks in call for rank in ranks}) == [*range(WORLD)]] for call in made]


def main():
    if "split" in sys.argv:
        groups._splits = lambda: True  # as of NCCL, bound to a device
    # Sums are not there either.
    Channels.self_check = lambda *_: None
    Usage.check_order = lambda *_: None
    found = {}
    for native in (True, False):
        for size in (8, 16):
            for strategy in sys.argv[1].split(","):
                dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
                found[f"{strategy}/{size} {'native' if native else 'ring'}"] = groups_of(strategy, size, native=native)
                gc.collect()
                dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
