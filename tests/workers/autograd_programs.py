"""Scripts for DDP that call torch.autograd.grad themselves. Argument: which; rank 0 prints the loss of each step."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 8


class Gain(nn.Module):
    """Multiplies by a parameter, which the gradient of the output by the input holds."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, values):
        return (values * self.gain).tanh()


class Adjoint(torch.autograd.Function):
    """A few steps of Euler through a block; backward goes back by the block's own gradients, as torchdiffeq does."""

    @staticmethod
    def forward(ctx, block, values, *parameters):
        ctx.block = block
        with torch.no_grad():
            for _ in range(3):
                values = values + 0.3 * block(values)
        ctx.save_for_backward(values, *parameters)
        return values

    @staticmethod
    def backward(ctx, gradient):
        values, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(3):
            with torch.enable_grad():
                values = values.detach().requires_grad_()
                moved = ctx.block(values)
                by_values, *found = torch.autograd.grad(moved, (values, *parameters), gradient, allow_unused=True)
            values, gradient = values.detach() - 0.3 * moved.detach(), gradient + 0.3 * by_values
            sums = [total if one is None else total + 0.3 * one for total, one in zip(sums, found, strict=True)]
        return None, gradient, *sums


class Flow(nn.Module):
    """Blocks whose gradients come from the adjoint."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))

    def forward(self, values):
        for block in self.blocks:
            values = Adjoint.apply(block, values, *block.parameters())
        return values


def slope_of(found, values):
    return torch.autograd.grad(found.sum(), values, create_graph=True)[0]


def penalty(job, values):
    """Return a loss on the gradient of the output by the input."""
    return (slope_of(job(values), values).norm(dim=1) - 1).square().mean()


def curvature(job, values):
    """Return a loss on the second derivative of the output by the input."""
    found = job(values)
    return (slope_of(slope_of(found, values)[:, 0], values) - found).square().mean()


def squares(job, values):
    return job(values).square().mean()


PROGRAMS = {
    "penalty_on_gains": (lambda: nn.Sequential(Gain(), Gain()), penalty),
    "penalty_on_norms": (
        lambda: nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Tanh()) for _ in "ab")),
        penalty,
    ),
    "curvature": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), curvature),
    "adjoint": (Flow, squares),
}


def main():
    make, loss_of = PROGRAMS[sys.argv[1]]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    job = nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.SGD(job.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        seed = 10 * step + dist.get_rank()
        values = torch.randn((6, WIDTH), generator=torch.Generator().manual_seed(seed)).requires_grad_()
        loss = loss_of(job, values)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"{loss.item():.8f}", flush=True)
    dist.barrier()
    os._exit(0)  # plain DDP hangs now and then where it is taken down


if __name__ == "__main__":
    main()
