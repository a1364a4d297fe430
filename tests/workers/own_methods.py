"""Optimizers and models with methods and hooks of their own, a small job each, one after the other."""

from __future__ import annotations

import torch
from script_habits import STEPS, Blocks, main, mean, squares, values_of, whole, wrapped


class Counting(torch.optim.AdamW):
    """Counts its steps, saves the count with its state, and counts how often its gradients are dropped."""

    steps = drops = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        given = dict(state_dict)
        self.steps = given.pop("steps") + 100
        super().load_state_dict(given)

    def zero_grad(self, set_to_none=True):
        self.drops += 1
        super().zero_grad(set_to_none)


class DroppingItself(torch.optim.AdamW):
    """Drops the gradients of its first parameter's group by hand."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class SavingItself(torch.optim.AdamW):
    """Saves its states without torch's help."""

    def state_dict(self):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        return {"state": {place: self.state[parameter] for place, parameter in enumerate(parameters)}}


class SavingAsItIs(torch.optim.AdamW):
    """Saves the table of its states."""

    def state_dict(self):
        return {"state": self.state, "groups": len(self.param_groups)}


class Older(Blocks):
    """Overrides methods with fewer arguments than torch's have today, and counts the calls."""

    calls = 0

    def parameters(self):
        return iter([parameter for _, parameter in self.named_parameters()])

    def zero_grad(self):
        self.calls += 1
        super().zero_grad()

    def load_state_dict(self, state_dict):
        self.calls += 1
        return super().load_state_dict({name: 0.5 * value for name, value in state_dict.items()})

    def state_dict(self):
        return {name: value.detach() for name, value in self.named_parameters()}


def model_of_before(framework):
    """Load, train, load again: a wrapper loads its model part by part, a script by the model's own method."""
    torch.manual_seed(0)
    model = Older()
    job = wrapped(model, framework)
    start = {name: torch.full_like(value, 0.1) for name, value in model.named_parameters()}
    if framework == "ddp":
        job.load_state_dict({f"module.{name}": value for name, value in start.items()})
    optimizer = torch.optim.SGD(job.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        loss = squares(job, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        (job if step % 2 else model).zero_grad()
        found.append(mean(loss.item()))
        if step == 1 and framework == "ddp":
            model.load_state_dict(start)
    return [*found, float(model.calls)]


def trained(framework, kind, with_hooks=False):
    torch.manual_seed(0)
    model = Blocks()
    job = wrapped(model, framework)
    optimizer = kind(job.parameters(), lr=0.01)
    log = []
    if with_hooks:
        optimizer.register_state_dict_pre_hook(lambda _: log.append(1))
        optimizer.register_state_dict_post_hook(lambda _, found: {**found, "extra": 7})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, given: log.append(given["extra"]) or {k: v for k, v in given.items() if k != "extra"}
        )
        optimizer.register_load_state_dict_post_hook(lambda _: log.append(3))
    found = []
    for step in range(STEPS):
        loss = squares(job, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.item()))
        if step == 1 and kind is not DroppingItself:
            saved = optimizer.state_dict()
            found += [float(saved.get("steps", -1)), float(saved.get("extra", -1))]
            if kind not in (SavingItself, SavingAsItIs):
                optimizer.load_state_dict(saved)
    found += [float(getattr(optimizer, "steps", 0)), float(getattr(optimizer, "drops", 0)), *map(float, log)]
    return [*found, sum(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def jobs(framework):
    yield "counts", lambda: trained(framework, Counting)
    yield "has hooks", lambda: trained(framework, torch.optim.AdamW, with_hooks=True)
    yield "drops by hand", lambda: trained(framework, DroppingItself)
    yield "has fewer arguments", lambda: model_of_before(framework)
    if framework == "ddp":
        yield "saves by hand", lambda: trained(framework, SavingItself)
        yield "saves its table", lambda: trained(framework, SavingAsItIs)


if __name__ == "__main__":
    main(jobs)
