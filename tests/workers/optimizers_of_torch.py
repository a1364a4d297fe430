"""Trains with each of torch's optimizers that act on elements alone, beside one process on the same samples.

Argument: a strategy, on two ranks. All ranks take the same samples, so that means of gradients are exact and weights must
be those of one process bit for bit. Prints the name of each that holds what it promises.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.runtime import shard

STEPS = 4
RATE = 0.05
OPTIMIZERS = {
    "Adadelta": lambda found: torch.optim.Adadelta(found, lr=RATE, weight_decay=0.1),
    "Adagrad": lambda found: torch.optim.Adagrad(found, lr=RATE, lr_decay=0.1),
    "Adam, amsgrad": lambda found: torch.optim.Adam(found, lr=RATE, amsgrad=True),
    "Adam, foreach": lambda found: torch.optim.Adam(found, lr=RATE, foreach=True),
    "AdamW, tensor as rate": lambda found: torch.optim.AdamW(found, lr=torch.tensor(RATE)),
    "Adamax": lambda found: torch.optim.Adamax(found, lr=RATE),
    "ASGD": lambda found: torch.optim.ASGD(found, lr=RATE, t0=2),
    "NAdam": lambda found: torch.optim.NAdam(found, lr=RATE, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda found: torch.optim.RAdam(found, lr=RATE),
    "RMSprop": lambda found: torch.optim.RMSprop(found, lr=RATE, centered=True, momentum=0.5),
    "Rprop": lambda found: torch.optim.Rprop(found, lr=RATE),
    "SGD": lambda found: torch.optim.SGD(found, lr=RATE),
    "SGD, momentum": lambda found: torch.optim.SGD(found, lr=RATE, momentum=0.9, nesterov=True),
    "SGD of its own class": lambda found: type("Own", (torch.optim.SGD,), {})(found, lr=RATE, momentum=0.9),
}


class Branches(nn.Module):
    """One of two branches in turn: the other one has no gradient in a step."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.passes = 0

    def forward(self, values):
        self.passes += 1
        return self.branches[self.passes % 2](self.first(values).tanh())


def fails_once(optimizer):
    """Let the second step end in an exception after its first group, which the script catches."""
    group = optimizer.param_groups[1]
    settings = {name: group.pop(name) for name in list(group) if name != "params"}
    try:
        optimizer.step()
    except KeyError:
        group.update(settings)
        return
    raise AssertionError("the step went through")


def train(model, optimizer, *, closure=False, fails=False):
    for step in range(STEPS):
        values = torch.randn(3, 6, generator=torch.Generator().manual_seed(step))

        def gradients(values=values):
            optimizer.zero_grad()
            loss = model(values).square().mean()
            loss.backward()
            return loss

        if closure:
            optimizer.step(gradients)
            continue
        gradients()
        if fails and step == 1:
            fails_once(optimizer)
        else:
            optimizer.step()


def slows(optimizer, *_):
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5


def replaces_gradients(optimizer, *_):
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.1


def drops_a_gradient(optimizer, *_):
    optimizer.param_groups[0]["params"][0].grad = None


def forgets_states(optimizer, *_):
    optimizer.state.clear()


def halves_moments(optimizer, *_):
    for state in optimizer.state.values():
        for name in ("exp_avg", "momentum_buffer"):
            if state.get(name) is not None:
                state[name] = state[name] * 0.5


def stops_moments(optimizer, *_):
    """Reads them by name, which must be there from the first step on."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter.grad is not None:
            optimizer.state[parameter]["exp_avg"].zero_()


def hooks_of(model, make, strategy):
    """Train with hooks of the script, registered before the model is sharded or after a first step."""
    before = (slows, replaces_gradients, drops_a_gradient, forgets_states, halves_moments)
    after = (slows, forgets_states, halves_moments, stops_moments)
    hooks = [("register_step_pre_hook", hook) for hook in before] + [
        ("register_step_post_hook", hook) for hook in after
    ]
    for register, hook in hooks:
        for is_late in (False, True):
            plain, ours = copy.deepcopy(model), copy.deepcopy(model)
            theirs, mine = make(groups_of(plain)), make(groups_of(ours))
            for optimizer in () if is_late else (theirs, mine):
                getattr(optimizer, register)(hook)
            ours, mine = shard(ours, mine, strategy, group_size=1)
            train(plain, theirs)
            train(ours, mine)
            for optimizer in (theirs, mine) if is_late else ():
                getattr(optimizer, register)(hook)
            train(plain, theirs)
            train(ours, mine)
            same(mine, theirs, ours)


def groups_of(model):
    return [{"params": model.first.parameters()}, {"params": model.branches.parameters()}]


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(ours, theirs, model):
    """Compare weights and states; each state must be laid out as its parameter is."""
    for ours_of, theirs_of in zip(ours.param_groups, theirs.param_groups, strict=True):
        for mine, plain in zip(ours_of["params"], theirs_of["params"], strict=True):
            assert torch.equal(whole(mine), plain)
            state, expected = ours.state[mine], theirs.state[plain]
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                found = state[name]
                if isinstance(value, torch.Tensor):
                    assert torch.equal(whole(found), value), name
                    assert isinstance(found, DTensor) == (isinstance(mine, DTensor) and bool(value.dim())), name
                else:
                    assert found == value, name
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def watched(optimizer):
    """Note what kinds of tensors the script's own hook and function see in a step."""
    seen = []

    def note(optimizer, *_):
        seen.extend(type(parameter).__name__ for group in optimizer.param_groups for parameter in group["params"])

    optimizer.register_step_post_hook(note)
    return seen


def main():
    dist.init_process_group("gloo")
    strategy = sys.argv[1]
    for name, make in OPTIMIZERS.items():
        # ASGD itself cannot go on after such a step.
        for how in ({}, {"closure": True}, *([] if name == "ASGD" else [{"fails": True}])):
            torch.manual_seed(0)
            plain = Branches()
            ours, theirs = copy.deepcopy(plain), make(groups_of(plain))
            model, optimizer = shard(ours, make(groups_of(ours)), strategy, group_size=1)
            seen = watched(optimizer)
            train(plain, theirs, **how)
            train(model, optimizer, **how)
            same(optimizer, theirs, model)
            if strategy.endswith("G"):
                assert not {"Tensor", "Parameter"} & set(seen), seen
        if dist.get_rank() == 0:
            print(f"held|{name}", flush=True)
    torch.manual_seed(0)
    hooks_of(Branches(), OPTIMIZERS["Adam, amsgrad"], strategy)
    if dist.get_rank() == 0:
        print("held|hooks of the script", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
