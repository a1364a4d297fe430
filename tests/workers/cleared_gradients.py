"""DDP scripts that clear gradients in other ways than one optimizer's ``zero_grad()``, or step without a backward pass."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, WIDTH = 5, 8


class Halves(nn.Module):
    """Each pass uses one of two halves."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)

    def forward(self, inputs, half):
        return (self.first if half == 0 else self.second)(inputs)


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
}


def to_none(model, optimizers):
    for parameter in model.parameters():
        parameter.grad = None


def by_each_optimizer(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()


def to_zero(model, optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)


def to_zero_by_model(model, optimizers):
    model.zero_grad(set_to_none=False)


def train(name, make, clear, *, count=1, skipped=None):
    """Print the weights after some steps of a model whose halves take turns; a skipped batch has no backward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Halves(), find_unused_parameters=True)
    halves = [model.module.first, model.module.second]
    optimizers = [make(half.parameters()) for half in halves] if count == 2 else [make(model.parameters())]
    for step in range(STEPS):
        clear(model, optimizers)
        if step != skipped:
            inputs = torch.full((2, WIDTH), 1.0 + dist.get_rank() + step)
            model(inputs, step % 2).square().mean().backward()
        missing = [half.weight.grad is None for half in halves]
        for optimizer in optimizers:
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"{name} missing {step} {missing[0] + 2 * missing[1]}", flush=True)
    state = model.state_dict()
    if dist.get_rank() == 0:
        for key, value in state.items():
            print(f"{name} {key} {value.double().sum():.9e} {value.double().norm():.9e}", flush=True)


def main():
    dist.init_process_group("gloo")
    for name, make in OPTIMIZERS.items():
        train(f"{name} none", make, to_none)
        train(f"{name} each", make, by_each_optimizer, count=2)
        for clear in (to_zero, to_zero_by_model):
            train(f"{name} {clear.__name__}", make, clear, skipped=2)
        train(f"{name} to_zero two", make, to_zero, count=2, skipped=2)
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
