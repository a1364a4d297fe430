"""What scripts do to all gradients or parameters at once, of a model with a temperature and a layer without elements.

Argument: "ddp". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.distributed as dist
from script_habits import STEPS, main, mean, values_of, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Tempered(nn.Module):
    """A layer, a temperature, and where asked for a parameter without elements."""

    def __init__(self, *, has_empty):
        super().__init__()
        self.body = nn.Linear(16, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        if has_empty:
            self.unused = nn.Parameter(torch.zeros(0))

    def forward(self, values):
        found = self.body(values) * self.temperature
        return found + self.unused.sum() if hasattr(self, "unused") else found


def decays_by_hand(parameters, gradients):
    torch._foreach_add_(gradients, parameters, alpha=0.5)


def adds_noise(_, gradients):
    torch._foreach_add_(gradients, [torch.full(gradient.shape, 0.3) for gradient in gradients])


def steps_by_hand(parameters, gradients):
    torch._foreach_add_(parameters, gradients, alpha=-0.1)


def scales(parameters, gradients):
    torch._foreach_mul_(parameters, 0.9)
    torch._foreach_mul_(gradients, torch.tensor(0.5))


def mixes(parameters, gradients):
    torch._foreach_lerp_(gradients, parameters, 0.25)
    torch._foreach_addcmul_(parameters, gradients, gradients, value=-0.1)


def clips(parameters, _):
    nn.utils.clip_grad_norm_(parameters, 0.1)


def makes_gradients_anew(parameters, gradients):
    made = (torch.zeros_like, lambda item: item.detach() * 0.1, lambda item: torch.full(item.shape, 0.2))
    for place, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        parameter.grad = made[place % 3](parameter) + (0.1 * gradient if place == 1 else 0.0)


def trained(change, *, has_empty):
    """Train with a change of all gradients or parameters before each step; tell losses and weights."""
    torch.manual_seed(0)
    model, found = DistributedDataParallel(Tempered(has_empty=has_empty)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        loss = model(values_of(step, same=False)).square().mean()
        loss.backward()
        found.append(mean(loss))
        parameters = list(model.parameters())
        with torch.no_grad():
            change(parameters, [parameter.grad for parameter in parameters])
        optimizer.step()
        optimizer.zero_grad()
        found.append(model.module.temperature.item())
    return [*found, *(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


class Flat(torch.optim.Optimizer):
    """An optimizer with states of the parameters' elements in a row, as Prodigy, and a function in its groups."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05, "schedule": lambda rate: rate / 2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter.flatten())
                    state["first"] = parameter.flatten().clone()
                state["sum"].add_(parameter.grad.flatten()).sub_(parameter.flatten() - state["first"], alpha=0.1)
                parameter.sub_(state["sum"].view_as(parameter), alpha=group["schedule"](group["lr"]))


def flat_states_resumed():
    """Load an optimizer's own states, which are flat, in the middle of training."""
    torch.manual_seed(0)
    model, found = DistributedDataParallel(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))), []
    optimizer = Flat(model.parameters())
    for step in range(STEPS + 2):
        loss = model(values_of(step, same=False)).square().mean()
        loss.backward()
        found.append(mean(loss))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())
    return [*found, *(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def walks_its_groups():
    """Look at what each group holds, of which some is frozen, as logs and regularizers do."""
    torch.manual_seed(0)
    net, found = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8)), []
    net[0].requires_grad_(False)
    net[0].weight.grad = torch.full_like(net[0].weight, 1.0 + dist.get_rank())  # of before it was frozen
    model = DistributedDataParallel(net)
    groups = [{"params": [parameter], "lr": 0.1 / place} for place, parameter in enumerate(net.parameters(), 1)]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(values_of(step, same=False)).square().mean()
        loss.backward()
        optimizer.step()
        found += [mean(loss), *(len(group["params"]) for group in optimizer.param_groups)]
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found += [parameter.detach().norm().item() for parameter in held]
        found.append(sum(parameter.numel() for parameter in held))
    return [*found, len(optimizer.state)]


def draws_beside_collectives():
    """Draw Python's random numbers between collectives of gradients and parameters by hand."""
    torch.manual_seed(0)
    random.seed(3)
    model, found = DistributedDataParallel(nn.Linear(16, 8)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        found.append(random.random())
        loss = model(values_of(step, same=False) * found[-1]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            dist.broadcast(parameter.grad, 0)
            dist.all_gather([torch.empty(parameter.shape) for _ in range(dist.get_world_size())], parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss))
    return [*found, random.random()]


def jobs(_):
    yield "flat states resumed", flat_states_resumed
    yield "walks its groups", walks_its_groups
    yield "draws beside collectives", draws_beside_collectives
    for change in (decays_by_hand, adds_noise, steps_by_hand, scales, mixes, clips, makes_gradients_anew):
        for has_empty in (False, True):
            name = change.__name__.replace("_", " ") + (", one is empty" if has_empty else "")
            yield name, partial(trained, change, has_empty=has_empty)


if __name__ == "__main__":
    main(jobs)
