"""What scripts do with the means of their framework alone, a small job each, one after the other.

Arguments: "ddp", "fsdp1" or "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from script_habits import STEPS, Blocks, adamw, main, mean, squares, train, values_of, whole
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel


class Replaced(nn.Linear):
    """Puts a smaller weight in place of its own in its forward pass."""

    def forward(self, values):
        self.weight.data = self.weight.detach() * 0.99
        return super().forward(values)


class Coder(Blocks):
    """A model whose other method is a pass of training too, alone or inside of ``forward``."""

    def encode(self, values):
        return self.first(values).tanh()

    def forward(self, values):
        return super().forward(values) + self.encode(values).sum()


def sums_norms(model):
    """Put the norm of all gradients together from those of the shards, as FSDP1 shows them."""
    total = torch.zeros(())
    for gradient in gradients_of(model):
        total += gradient.norm() ** 2
    dist.all_reduce(total)
    clip(model, total.sqrt())


def averages_squares(model):
    found = torch.stack([gradient.detach().square().sum() for gradient in gradients_of(model)]).mean()
    clip(model, found.item())


def clip(model, norm):
    for gradient in gradients_of(model):
        gradient.mul_(0.1 / norm)


def skips_faults(model):
    if not all(torch.isfinite(gradient).all() for gradient in gradients_of(model)):
        model.zero_grad()


def gradients_of(model):
    """Return those of which this rank has a part."""
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None and gradient.numel()]


def clips_twice(job, values):
    """Clip what the pass before has left, first."""
    norm = job.clip_grad_norm_(0.05)
    return squares(job, values) + 0.0 * float(norm)


def squares_after_waiting(job, values):
    part = job.blocks[0]
    part.set_requires_gradient_sync(False)
    squares(job, values).backward()
    part.set_requires_gradient_sync(True)
    return squares(job, -values)


def squares_after_the_root_waited(job, values):
    job.set_requires_gradient_sync(False)
    squares(job, values).backward()
    job.blocks[0].set_requires_gradient_sync(True)
    job.set_requires_gradient_sync(True)
    return squares(job, -values)


def squares_without_replicas(job, values):
    job.set_requires_all_reduce(False)
    return squares(job, values)


def edits_while_gathered(job):
    part = job.blocks[0]
    part.unshard()
    with torch.no_grad():
        part.weight.mul_(0.5)
    part.reshard()
    return 0.0


def looks_while_gathered(job):
    job.blocks[0].unshard()
    found = mean(whole(job.blocks[0].weight.detach()).square().sum())
    job.blocks[0].reshard()
    return found


class Means:
    """Means of weights, and a momentum, made of FSDP2's own DTensors before the first pass of training."""

    def start(self, parameters):
        self.parameters = list(parameters)
        self.means = [parameter.detach().clone() for parameter in self.parameters]
        self.moments = [torch.zeros_like(parameter) for parameter in self.parameters]
        return adamw(self.parameters)

    def after_step(self, job):
        values = values_of(9, same=False)
        with torch.no_grad():
            now = list(job.parameters())
            for moment, parameter, mean_of in zip(self.moments, now, self.means, strict=True):
                moment.mul_(0.9).add_(parameter.grad)
                parameter.add_(moment, alpha=-0.05)
                mean_of.sub_((mean_of - parameter) * 0.1)
            torch._foreach_lerp_(self.means, [parameter.detach() for parameter in now], 0.3)
            before = [parameter.detach().clone() for parameter in now]
            for parameter, mean_of in zip(job.parameters(), self.means, strict=True):
                parameter.copy_(mean_of)
            found = mean(job(values).sum())
            job.reshard()  # FSDP2 keeps the root's parameters gathered
            for parameter, value in zip(job.parameters(), before, strict=True):
                parameter.data.copy_(value.data)
        return found


def keeps_means(framework):
    means = Means()
    return train(Blocks(), framework, optimizer_of=means.start, after_step=means.after_step)


def assigns_data(job):
    for parameter in job.parameters():
        parameter.data = parameter.detach() * 0.5
    return 0.0


def coded(framework):
    model = Coder()

    def squares_of_both(job, values):
        if not isinstance(model.encode, type(squares)):
            register_fsdp_forward_method(job, "encode")
        return job.encode(values).square().mean() + squares(job, values)

    return train(model, framework, loss_of=squares_of_both)


def by_layers(_):
    """Wrap the layers and not the model that holds them."""
    torch.manual_seed(0)
    model = Blocks()
    for part in (model.first, *model.blocks, model.last):
        fully_shard(part)
    return steps(model, adamw(model.parameters()))


def two_with_one_optimizer(_):
    torch.manual_seed(0)
    model = nn.Sequential(DistributedDataParallel(nn.Linear(16, 24)), DistributedDataParallel(nn.Linear(24, 8)))
    return steps(model, adamw(model.parameters()))


def steps(model, optimizer):
    found = []
    for step in range(STEPS):
        loss = squares(model, values_of(step, same=False))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(mean(loss.item()))
    return found


def jobs(framework):
    if framework == "ddp":
        yield (
            "puts weights in place in forward",
            lambda: train(Blocks([Replaced(24, 24) for _ in range(2)]), framework),
        )
        yield "trains two with one optimizer", lambda: two_with_one_optimizer(framework)
    elif framework == "fsdp1":
        yield "sums norms of shards", lambda: train(Blocks(), framework, after_backward=sums_norms)
        yield "averages squares of shards", lambda: train(Blocks(), framework, after_backward=averages_squares)
        yield "skips faults", lambda: train(Blocks(), framework, after_backward=skips_faults)
        yield "clips", lambda: train(Blocks(), framework, loss_of=clips_twice)
    else:
        yield "lets a part wait", lambda: train(Blocks(), framework, loss_of=squares_after_waiting)
        yield "lets the root wait", lambda: train(Blocks(), framework, loss_of=squares_after_the_root_waited)
        yield "has no replicas", lambda: train(Blocks(), framework, loss_of=squares_without_replicas)
        yield "edits while gathered", lambda: train(Blocks(), framework, after_step=edits_while_gathered)
        yield "looks while gathered", lambda: train(Blocks(), framework, after_step=looks_while_gathered)
        yield "keeps means of weights", lambda: keeps_means(framework)
        yield "assigns data", lambda: train(Blocks(), framework, after_step=assigns_data)
        yield "trains by another method", lambda: coded(framework)
        yield "wraps layers alone", lambda: by_layers(framework)


if __name__ == "__main__":
    main(jobs)
