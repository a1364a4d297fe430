"""What scripts copy of a model between two backward passes of a step, as those do that save in the middle of one.

Argument: "ddp". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import copy

import torch
from script_habits import STEPS, main, mean, values_of, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def copied_amid():
    """Train with a copy in the middle of each step; tell losses, what the copy holds, and how many gradients it has."""
    torch.manual_seed(0)
    model, found = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for micro in range(2):
            loss = model(values_of(2 * step + micro, same=False)).square().mean()
            loss.backward()
            found.append(mean(loss))
            if not micro:
                kept = list(copy.deepcopy(model.module).parameters())
                found.append(sum(parameter.grad is not None for parameter in kept))
                found += [float(value.detach().double().abs().sum()) for value in kept]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def jobs(_):
    yield "copies amid a step", copied_amid


if __name__ == "__main__":
    main(jobs)
