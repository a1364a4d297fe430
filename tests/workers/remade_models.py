"""Makes a second model by the class of the first one, as libraries do (`type(model)(config)`), and trains it.

Argument: "ddp" or "fsdp2"; "pruned" for one whose weights are masked while it trains.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune


class Net(nn.Module):
    made = 0

    def __init__(self, width):
        super().__init__()
        Net.made += 1
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 1)

    def forward(self, values):
        for block in self.blocks:
            values = torch.tanh(block(values))
        return self.head(values)


def wrapped(model, word):
    if word == "ddp":
        return DistributedDataParallel(model)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(model, values):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(values + step).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {float(loss.detach()):.9e}", flush=True)


def prune_it(model):
    """Train with masked weights, then make the masks part of the weights, as whoever prunes does before saving."""
    for block in model.blocks:
        prune.l1_unstructured(block, "weight", amount=0.5)
    job = wrapped(model, "ddp")
    train(job, torch.randn(8, 4))
    for block in model.blocks:
        prune.remove(block, "weight")
    state = job.state_dict()
    if dist.get_rank() == 0:
        print(" ".join(sorted(state)), *(f"{value.double().norm():.9e}" for value in state.values()), flush=True)


def main():
    word = sys.argv[1]
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(1)
    values = torch.randn(8, 4)
    first = Net(4)
    if word == "pruned":
        prune_it(first)
        dist.barrier()
        dist.destroy_process_group()
        return
    train(wrapped(first, word), values)
    torch.manual_seed(2)
    again = type(first)(4)
    if dist.get_rank() == 0:
        print(f"made {float(Net.made):.9e} then {float(torch.rand(())):.9e}", flush=True)
    assert type(again) is Net
    assert isinstance(first, Net)
    if word == "ddp":
        train(DistributedDataParallel(again), values)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
