"""Saves and loads a model with parameters that have no dimension, one of them frozen; arguments: strategy, folder."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from paro_advise.runtime import load_checkpoint, save_checkpoint, shard


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(1.5), requires_grad=False)

    def forward(self, values):
        return self.layer(values) * self.scale.exp() * self.fixed


def made(strategy):
    torch.manual_seed(0)
    model = Scaled()
    return shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), strategy, ranks_per_node=1)


def steps(model, optimizer, first):
    for step in range(first, first + 2):
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.scale.item(), model.fixed.item()


strategy, folder = sys.argv[1:3]
dist.init_process_group("gloo")
model, optimizer = made(strategy)
steps(model, optimizer, 0)
save_checkpoint(folder, model)
wanted = steps(model, optimizer, 2)
again, its_optimizer = made(strategy)
with torch.no_grad():
    again.scale.fill_(9.0)
    again.fixed.fill_(9.0)
load_checkpoint(folder, again)
found = steps(again, its_optimizer, 2)
print(f"{dist.get_rank()} {wanted == found} {wanted}", flush=True)
dist.barrier()
dist.destroy_process_group()
