"""What models return of their parameters themselves, and scripts read after the pass.

Argument: "ddp", "fsdp1" or "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from script_habits import STEPS, main, mean, values_of, whole
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Found:
    """What a model returns that names its outputs."""

    hidden: torch.Tensor
    weight: torch.Tensor


class Gated(nn.Module):
    """A block that returns an offset of its own beside its activations, as it is or seen in another way."""

    def __init__(self, way):
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.offset = nn.Parameter(torch.linspace(-0.1, 0.1, 16))
        self.way = way

    def forward(self, values):
        return self.inner(values).tanh(), self.way(self.offset)


class Policy(nn.Module):
    """Means and a deviation that does not depend on the input, as policies have it; a table that is read outside."""

    def __init__(self, way=lambda offset: offset):
        super().__init__()
        self.blocks = nn.ModuleList(Gated(way) for _ in range(3))
        self.table = nn.Parameter(torch.linspace(-1, 1, 8 * 16).view(8, 16))
        self.log_std = nn.Parameter(torch.full((8,), -0.5))

    def forward(self, values):
        for block in self.blocks:
            values, offset = block(values)
            values = values + offset
        return {
            "found": Found(values, self.table[1:]),
            "log_std": self.log_std.expand(len(values), -1),
            "raw": self.log_std,
        }


def wrapped(model, framework):
    """Return a model as it trains: the frameworks that shard keep the root's parameters whole after a pass."""
    if framework == "ddp":
        return DistributedDataParallel(model)
    if framework == "fsdp1":
        return FullyShardedDataParallel(
            model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, device_id=torch.device("cpu")
        )
    fully_shard(model, reshard_after_forward=False)
    return model


def trained(framework, read, *, way=lambda offset: offset, after=lambda _: []):
    """Train by losses outside of the model; read outputs between backward and step, and after the step."""
    torch.manual_seed(0)
    model, found = wrapped(Policy(way), framework), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        outputs = model(values_of(step, same=False))
        hidden, weight = outputs["found"].hidden, outputs["found"].weight
        loss = (hidden @ weight.T).square().mean() + (outputs["log_std"].exp() - 0.3).square().mean()
        loss.backward()
        found += [mean(loss), *read(outputs)]
        optimizer.step()
        found += after(outputs)
        optimizer.zero_grad()
        with torch.no_grad():
            found += read(model(values_of(30 + step, same=True)))
    return [*found, *(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def sums(outputs):
    tensors = (outputs["found"].hidden, outputs["found"].weight, outputs["log_std"], outputs["raw"])
    return [mean(tensor.detach().double().square().sum()) for tensor in tensors]


def changed(outputs):
    """Change in place what the model has returned of its own."""
    with torch.no_grad():
        outputs["raw"].clamp_(max=-0.6)
    return []


def jobs(framework):
    run = partial(trained, framework)
    if framework == "ddp":  # the others free the blocks' parameters themselves
        yield "offsets as they are", lambda: run(sums)
        yield "offsets seen otherwise", lambda: run(sums, way=lambda offset: offset.view(2, 8).flatten().expand(4, 16))
        yield "reads after the step", lambda: run(lambda _: [], after=sums)
        yield "changes what it got", lambda: run(lambda _: [], after=changed)
        yield "changes it before the step", lambda: run(changed)
    else:
        yield (
            "the root's, evaluated",
            lambda: run(lambda found: [] if torch.is_grad_enabled() else sums(found), way=torch.clone),
        )


if __name__ == "__main__":
    main(jobs)
