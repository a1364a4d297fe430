"""A model whose last layer has one row, of which all ranks but one hold none, a small job each, one after the other.

Argument: "ddp". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import math

import torch
from script_habits import Blocks, adamw, main, mean, squares, train, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class OneOutput(Blocks):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(24, 1)


def clips_by_largest(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf)


def clips_by_largest_one_by_one(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=math.inf, foreach=False)


def scales_by_extremes(model):
    for parameter in model.parameters():
        gradient = parameter.grad
        most = float(gradient.norm(math.inf)) - float(torch.linalg.vector_norm(gradient, ord=-math.inf))
        gradient.mul_(1 / (1 + most))


def looks_for_faults(job):
    """Return how many of these tell of a fault that lies in one row, which is not rank 0's."""
    gradient = torch.zeros_like(job.module.first.weight) + job.module.first.weight.grad
    gradient[-1, 0] = math.nan
    told = [
        gradient.norm(math.inf), torch.linalg.vector_norm(gradient, ord=-math.inf), gradient.abs().max(),
        gradient.amax(), gradient.min(), gradient.amax(dim=0).sum(), gradient.max(dim=0).values.sum(),
        *torch._foreach_norm([gradient, gradient], math.inf), gradient.norm(),
    ]  # fmt: skip
    assert len(told) == 10
    return float(sum(math.isnan(float(value)) for value in told))


def wraps_again_and_saves():
    torch.manual_seed(0)
    job = DistributedDataParallel(OneOutput())
    for step in range(4):
        if step % 2 == 0:  # a second stage, with an optimizer of its own
            job = DistributedDataParallel(job.module) if step else job
            optimizer = adamw(job.parameters())
            yield from (float(value.double().abs().sum()) for value in job.state_dict().values())
        loss = squares(job, values_of(step, same=False))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield mean(loss.item())
    yield from (float(value.double().abs().sum()) for value in job.state_dict().values())


def jobs(framework):
    for name, after_backward in {
        "clips by the largest": clips_by_largest,
        "clips by the largest, one by one": clips_by_largest_one_by_one,
        "scales by extremes": scales_by_extremes,
    }.items():
        yield name, lambda act=after_backward: train(OneOutput(), framework, after_backward=act)
    yield "looks for faults", lambda: train(OneOutput(), framework, after_step=looks_for_faults)
    yield "wraps again and saves", lambda: list(wraps_again_and_saves())


if __name__ == "__main__":
    main(jobs)
