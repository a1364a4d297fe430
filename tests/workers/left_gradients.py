"""Gradients from before the first training pass: of a model that has run alone, a small job each, one after the other."""

from __future__ import annotations

import torch
from script_habits import STEPS, Blocks, main, mean, squares, values_of, whole, wrapped
from torch import distributed as dist


def gradients_of_alone(model, place):
    """Leave gradients by a pass of the model alone, on rank 0 others than on the others."""
    (model(values_of(90 + place, same=False)).square().sum() * (1 + dist.get_rank())).backward()


def trained(framework, before, *, wraps_first=False, between=lambda model, optimizer: None):
    torch.manual_seed(0)
    model = Blocks()
    if not wraps_first:
        before(model)
    job = wrapped(model, framework)
    optimizer = torch.optim.SGD(job.parameters(), lr=0.05)
    if wraps_first:
        before(model)
    found = []
    for step in range(STEPS):
        loss = squares(job, values_of(step, same=False))
        if step == 0:
            between(model, optimizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.item()))
    return [*found, sum(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def on_all(model):
    gradients_of_alone(model, 0)


def on_rank_0(model):
    if dist.get_rank() == 0:
        gradients_of_alone(model, 0)
    dist.barrier()


def drop(_, optimizer):
    optimizer.zero_grad()


def set_to_zero(_, optimizer):
    optimizer.zero_grad(set_to_none=False)


def drop_one(model, _):
    next(model.parameters()).grad = None


def jobs(framework):
    yield "left before it is wrapped", lambda: trained(framework, on_all)
    yield "dropped after forward", lambda: trained(framework, on_all, between=drop)
    yield "set to zero after forward", lambda: trained(framework, on_all, between=set_to_zero)
    if framework == "ddp":
        yield "left by rank 0", lambda: trained(framework, on_rank_0)
        yield "left once it is wrapped", lambda: trained(framework, on_all, wraps_first=True)
        yield "dropped of one parameter", lambda: trained(framework, on_all, between=drop_one)


if __name__ == "__main__":
    main(jobs)
