"""Trains with an optimizer that writes what it makes of gradients into one flat buffer, as early forms of Muon do."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class FlatUpdates(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            flat = torch.zeros(sum(parameter.numel() for parameter in group["params"]))
            at = 0
            for parameter in group["params"]:
                flat[at : at + parameter.numel()] = parameter.grad.flatten()
                at += parameter.numel()
            at = 0
            for parameter in group["params"]:
                parameter.sub_(flat[at : at + parameter.numel()].view_as(parameter), alpha=group["lr"])
                at += parameter.numel()


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizer = FlatUpdates(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
print("trained")
dist.destroy_process_group()
