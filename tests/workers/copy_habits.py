"""What scripts copy of a model: whole models and parts, on all ranks or rank 0, between steps and in the middle of one.

Argument: "ddp". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import copy
import io
from functools import partial
from threading import Lock

import torch
import torch.distributed as dist
from script_habits import STEPS, Blocks, main, mean, values_of, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel


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


class Tied(Blocks):
    """A frozen first layer and two that share a weight."""

    def __init__(self):
        super().__init__([nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)), nn.Linear(24, 24)])
        self.first.requires_grad_(requires_grad=False)
        self.blocks[1].weight = self.blocks[0][0].weight


class Normed(Tied):
    """The same, and a weight that is put together from two parameters."""

    def __init__(self):
        super().__init__()
        self.last = nn.utils.parametrizations.weight_norm(self.last)  # torch refuses to pickle such a model


def rebuilt(cls, state):
    """Return a module of a class as a file holds it."""
    module = cls.__new__(cls)
    module.__setstate__(state)
    return module


class KeptLinear(nn.Linear):
    """Pickled in a way of its own, with its state among the arguments, as NVIDIA's EDM and StyleGAN are."""

    def __reduce__(self):
        return rebuilt, (KeptLinear, super().__reduce__()[2]), None


class Kept(Blocks):
    """The same of a model, with such parts."""

    def __init__(self):
        super().__init__([KeptLinear(24, 24), KeptLinear(24, 24)])

    def __reduce__(self):
        return rebuilt, (Kept, super().__reduce__()[2])


class Locked(Tied):
    """A model that leaves what cannot be pickled out of its state, and makes it anew."""

    def __init__(self):
        super().__init__()
        self.lock = Lock()

    def __getstate__(self):
        return tuple(item for item in self.__dict__.items() if item[0] != "lock")

    def __setstate__(self, state):
        super().__setstate__({**dict(state), "lock": Lock()})


def trained(after_step, make=Normed):
    """Train, calling a function with the wrapped model after each step; return losses and what the function found."""
    torch.manual_seed(0)
    model, found = DistributedDataParallel(make()), []
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = model(values_of(step, same=False)).square().mean()
        loss.backward()
        found.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        found += after_step(model, step)
    return found


def seen(model):
    """Return what a copy computes, holds and shares; it evaluates and trains by itself, as a plain model."""
    values = values_of(20, same=True)
    with torch.no_grad():
        found = [model.eval()(values).square().mean()]
    model.train()(values).square().mean().backward()
    trains = [one for one in model.parameters() if one.requires_grad]
    found += [sum(one.grad.double().square().sum() for one in trains), len(trains), len(list(model.parameters()))]
    found += [value.double().abs().sum() for value in model.state_dict().values()]
    halved = model.half()
    kinds = {type(one) for one in halved.parameters()}
    assert kinds == {nn.Parameter}, kinds
    return [float(value) for value in (*found, *(one.float().abs().sum() for one in halved.parameters()))]


def copied_on_all():
    """Copy the model inside of DDP on every rank."""
    return trained(lambda model, _: seen(copy.deepcopy(model.module)))


def copied_on_rank_0(make=Tied):
    """Copy the model on rank 0 alone, halve and save it whole, as detectors do at the end of an epoch."""

    def save(model, _):
        if dist.get_rank():
            return []
        file = io.BytesIO()
        torch.save({"model": copy.deepcopy(model.module).half(), "whole": model.module}, file)
        assert b"paro_advise" not in file.getvalue()
        file.seek(0)
        kept = torch.load(file, weights_only=False)
        return [*seen(kept["model"].float()), *seen(kept["whole"])]

    return trained(save, make)


def averaged_from_the_second_step():
    """Begin a mean of weights in training, and go on with it."""
    means = []

    def average(model, step):
        if step == 1:
            means.append(AveragedModel(model.module))
        for each in means:
            each.update_parameters(model.module)
        return seen(copy.deepcopy(means[0].module)) if means else []

    return trained(average)


def copied_part():
    """Copy a block of the model on every rank."""
    return trained(
        lambda model, _: [
            float(one.detach().double().abs().sum()) for one in copy.deepcopy(model.module.blocks).parameters()
        ]
    )


def jobs(_):
    yield "copies amid a step", copied_amid
    yield "copies on all ranks", copied_on_all
    yield "copies on rank 0", copied_on_rank_0
    yield "averages from the second step", averaged_from_the_second_step
    yield "copies a part", copied_part
    yield "copies of a class that is pickled in its own way", partial(copied_on_rank_0, Kept)
    yield "copies of a class that leaves something out", partial(copied_on_rank_0, Locked)


if __name__ == "__main__":
    main(jobs)
