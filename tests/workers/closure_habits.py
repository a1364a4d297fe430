"""Optimizers that call their closure more than once in a step, a small job each, one after the other."""

from __future__ import annotations

import torch
from script_habits import STEPS, Blocks, main, mean, squares, values_of, whole, wrapped


class Perturbed(torch.optim.SGD):
    """Steps by the gradients at perturbed weights, as SAM does in a single optimizer."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad * (0.05 / norm) for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(parameters, moves)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class PerturbedBefore(torch.optim.SGD):
    """Perturbs by the gradients that the script made before the step; its closure makes those to step by."""

    @torch.no_grad()
    def step(self, closure):
        parameters = self.param_groups[0]["params"]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        moves = [parameter.grad * (0.05 / norm) for parameter in parameters]
        torch._foreach_add_(parameters, moves)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        torch._foreach_sub_(parameters, moves)
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])
        return loss


class Halving(torch.optim.SGD):
    """Steps as ever; its script puts half of each gradient into its place."""


class LineSearch(torch.optim.SGD):
    """Halves its step until the loss falls."""

    def step(self, closure):
        loss = closure()
        loss.backward()
        parameters = self.param_groups[0]["params"]
        before = [(parameter.detach().clone(), parameter.grad.detach().clone()) for parameter in parameters]
        length = 8.0
        with torch.no_grad():
            while length > 1e-3:
                for parameter, (value, gradient) in zip(parameters, before, strict=True):
                    parameter.copy_(value - length * gradient)
                if mean(closure().item()) < mean(loss.item()):
                    break
                length /= 2
        self.param_groups[0]["lr"] = length
        return loss


def steps_of(framework, kind):
    torch.manual_seed(0)
    model = Blocks()
    job = wrapped(model, framework)
    optimizer = kind(job.parameters(), lr=0.05)
    found, calls = [], []

    for step in range(STEPS):

        def closure(step=step):
            calls.append(step)
            loss = squares(job, values_of(step, same=False))
            if kind is not LineSearch:
                optimizer.zero_grad()
                loss.backward()
            if kind is Halving:
                for parameter in job.parameters():
                    parameter.grad = parameter.grad * 0.5
            return loss

        if kind is LineSearch:
            optimizer.zero_grad()
        if kind is PerturbedBefore:
            closure()
        found.append(mean(optimizer.step(closure).item()))
        found.append(optimizer.param_groups[0]["lr"])
    states = sum(float(whole(value).double().abs().sum()) for value in model.state_dict().values())
    return [*found, float(len(calls)), states]


def jobs(framework):
    yield "perturbs", lambda: steps_of(framework, Perturbed)
    yield "perturbs by what came before", lambda: steps_of(framework, PerturbedBefore)
    yield "halves its gradients", lambda: steps_of(framework, Halving)
    if framework == "ddp":  # FSDP2 computes passes after one without gradients with the root's weights of before
        yield "searches", lambda: steps_of(framework, LineSearch)


if __name__ == "__main__":
    main(jobs)
