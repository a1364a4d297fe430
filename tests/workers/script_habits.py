"""What public scripts do around and inside their models, a small job each, one after the other.

Arguments: "ddp", "fsdp1", which wraps the whole model once, or "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from abc import ABC
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paro_advise.errors import UsageError

STEPS = 3


class Blocks(nn.Module):
    """A model of repeated blocks, and what is called before and after its forward pass."""

    def __init__(self, blocks=None, before=None):
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(24, 24) for _ in range(3)])
        self.last = nn.Linear(24, 8)
        self.before = before

    def forward(self, values):
        if self.before is not None:
            self.before(self)
        values = self.first(values).relu()
        for block in self.blocks:
            values = block(values).relu()
        return self.last(values)


class Scaled(Blocks):
    """Blocks with a temperature, which has no dimension, and an offset that every second pass leaves out."""

    passes = 0

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(0.1))

    def forward(self, values):
        self.passes += 1
        found = super().forward(values) * self.scale.exp()
        return found + self.offset if self.passes % 2 else found


class Tempered(Blocks):
    """A temperature that alone trains, before batch norms whose means are rank 0's where DDP sends them."""

    def __init__(self):
        super().__init__([nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24))])
        self.requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, values):
        return super().forward(values * self.scale)


class Towers(nn.Module):
    """Two models in one, each with a loss of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Blocks() for _ in range(2))

    def forward(self, values):
        return [block(values) for block in self.blocks]


class Shown(Blocks):
    """Blocks that are run again in backward, beneath a head that does not train; it returns what lies between too."""

    def __init__(self):
        super().__init__()
        self.last.requires_grad_(requires_grad=False)

    def forward(self, values):
        values = self.first(values).relu()
        between = []
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=True).relu()
            between.append(values)
        return self.last(values), between


class Limited(nn.Linear):
    max_norm = 0.5  # as embeddings have it, for rows that all ranks shorten alike


class Nested(nn.Module):
    """Lists of modules in a list, as U-Nets have them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(2))

    def forward(self, values):
        for first, second in self.blocks:
            values = second(first(values).relu())
        return values


class Tokens(nn.Module):
    """An embedding, and an LSTM that knows its weights by a list of its own."""

    def __init__(self, **settings):
        super().__init__()
        self.embed = nn.Embedding(20, 16, **settings)
        self.recurrent = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.last = nn.Linear(24, 8)

    def forward(self, values):
        tokens = (values[:, :6].abs() * 5).long().clamp(max=19)
        return self.last(self.recurrent(self.embed(tokens))[0])


class Clamped(nn.Linear):
    """A layer that clamps its weight when it is used, by ``.data`` or without gradients."""

    by_data = True

    def forward(self, values):
        with torch.no_grad():
            (self.weight.data if self.by_data else self.weight).clamp_(-0.1, 0.1)
        return super().forward(values)


class ClampedPlainly(Clamped):
    by_data = False


class Checkpointed(nn.Linear):
    """A layer that is run again in backward."""

    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=True)


class CheckpointedBlocks(Blocks):
    """Blocks that the model runs again in backward, as models of transformers do, while the rest has gradients."""

    def forward(self, values):
        values = self.first(values).relu()
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=True).relu()
        return self.last(values)


class Skipped(Blocks):
    """A layer is left out in every second pass."""

    passes = 0

    def forward(self, values):
        self.passes += 1
        return super().forward(values) if self.passes % 2 else self.last(self.first(values))


def wrapped(model, framework):
    if framework == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=isinstance(model, (Skipped, Scaled)))
    if framework == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    blocks = [part for part in model.modules() if isinstance(part, (nn.Linear, nn.LSTM)) and part is not model]
    for block in [part for part in blocks if part not in (getattr(model, "first", None), getattr(model, "last", None))]:
        fully_shard(block)
    return fully_shard(model)


def values_of(step, *, same):
    generator = torch.Generator().manual_seed(10 * step + (0 if same else dist.get_rank()))
    return torch.randn(4, 16, generator=generator)


def mean(value):
    value = torch.as_tensor(float(value), dtype=torch.float64)
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class DealtOut(torch.optim.SGD):
    """An optimizer whose ranks update some parameters each, as those do that cost much."""

    @torch.no_grad()
    def step(self, closure=None):
        for place, parameter in enumerate(self.param_groups[0]["params"]):
            owner = place % dist.get_world_size()
            if dist.get_rank() == owner:
                parameter.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
            dist.broadcast(parameter.data, owner)


class Abstract(ABC, torch.optim.Optimizer):
    """What libraries of optimizers derive theirs from."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.99)})  # schedules change both


class Descent(Abstract):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train(
    model, framework, *, after_forward=None, after_backward=None, after_step=None, same=False, optimizer_of=adamw,
    loss_of=None,
):  # fmt: skip
    torch.manual_seed(0)
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    job = wrapped(model, framework)
    optimizer = optimizer_of(job.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    found = []
    for step in range(STEPS):
        loss = (loss_of or squares)(job, values_of(step, same=same))
        if after_forward is not None:
            after_forward(model)
        loss.backward()
        if after_backward is not None:
            after_backward(model)
        optimizer.step()
        schedule.step()
        if after_step is not None and step == 1:
            found.append(after_step(job))
        optimizer.zero_grad()
        found.append(mean(loss.item()))
    state = (job if framework == "fsdp1" else model).state_dict()
    found.append(sum(float(whole(value).double().abs().sum()) for value in state.values()))
    return found


def change_inner(model):
    for block in model.blocks:
        block.weight.data.mul_(0.9)


def change_root(model):
    with torch.no_grad():
        model.last.weight.mul_(0.9)


def pickled(job):
    buffer = io.BytesIO()
    torch.save(job.module, buffer)
    buffer.seek(0)
    assert b"paro_advise" not in buffer.getvalue()
    return mean(torch.load(buffer, weights_only=False)(values_of(9, same=False)).sum())


def penalized(job, values):
    """Return a loss that holds the gradient with respect to the inputs."""
    values.requires_grad_()
    found = job(values)
    (slope,) = torch.autograd.grad(found.sum(), values, create_graph=True)
    return found.square().mean() + slope.square().mean()


class Averaging:
    """Averages the weights of the wrapper itself, in a copy made before training."""

    def __init__(self):
        self.mean = None

    def loss_of(self, job, values):
        if self.mean is None:
            self.mean = torch.optim.swa_utils.AveragedModel(job)
        self.mean.update_parameters(job)
        return squares(job, values)

    def after_step(self, _):
        with torch.no_grad():
            return mean(self.mean(values_of(9, same=False)).sum())


def squares_in_two_passes(job, values):
    values = values.double()  # norms over few values enlarge what rounding makes of them
    with job.no_sync():
        squares(job, values[:2]).backward()
    return squares(job, values[2:])


def normalized(framework):
    model = Blocks([nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24)) for _ in range(2)]).double()
    return train(model, framework, loss_of=squares_in_two_passes) + [
        mean(float(block[1].running_mean.sum())) for block in model.blocks
    ]


def squares_of_towers(job, values):
    first, second = job(values)
    first.square().mean().backward()
    return second.square().mean()


def squares_of_shown(job, values):
    found, between = job(values)
    return found.square().mean() + between[0].mean()


def shorten(model):
    with torch.no_grad():
        for block in model.blocks:
            block.weight.copy_(torch.renorm(block.weight, 2, 0, block.max_norm))


def scaled_losses(framework):
    torch.manual_seed(0)
    model = Scaled()
    job = wrapped(model, framework)
    optimizer, scaler, found = adamw(job.parameters()), torch.amp.GradScaler("cpu", init_scale=1024.0), []
    for step in range(STEPS):
        loss = squares(job, values_of(step, same=False))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found += [mean(loss.item()), mean(float(nn.utils.clip_grad_norm_(job.parameters(), 0.5)))]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def squares_of_this_rank(job, values):
    with job.no_sync(), job.join(enable=False):  # its batches may be uneven, and are not today
        squares(job, values).backward()
        return 0.0 * squares(job, values)


def squares_unreduced(job, values, *, drops=False):
    job.set_requires_gradient_sync(False)
    if drops:
        squares(job, values).backward()
        job.zero_grad()
        job.set_requires_gradient_sync(True)
    return squares(job, values)


def squares_in_parts(job, values):
    found = job(values)
    found[:, :2].square().mean().backward(retain_graph=True)
    return found[:, 2:].square().mean()


def grows(framework):
    model = Blocks()
    found = train(model, framework)
    model.last = nn.Linear(24, 5)
    return found + train(model, framework)


def squares(job, values):
    return job(values).square().mean()


def dealt_out(parameters):
    return DealtOut(parameters, lr=1e-2, momentum=0.9)


def project(model):
    """Put gradients in place that are cut out of a single vector, as gradient surgery does."""
    parameters = list(model.parameters())
    vector = torch.cat([parameter.grad.clone().flatten() for parameter in parameters])
    vector = vector - vector.mean()
    place = 0
    for parameter in parameters:
        parameter.grad = vector[place : place + parameter.numel()].view_as(parameter).clone()
        place += parameter.numel()


def swaps(job):
    """Evaluate with other weights and go on with those of before, which the script has by their ``.data``."""
    before = {name: parameter.data for name, parameter in job.named_parameters()}
    for name, parameter in job.named_parameters():
        parameter.data = 0.5 * before[name]
    with torch.no_grad():
        found = job(values_of(9, same=False)).sum()
    for name, parameter in job.named_parameters():
        parameter.data = before[name]
    return mean(found)


def generates(job):
    """Run the inner model on whole parameters, on each rank a different number of times, as text generation does."""
    values = values_of(9, same=False)
    with FullyShardedDataParallel.summon_full_params(job, writeback=False), torch.no_grad():
        for _ in range(1 + dist.get_rank()):
            found = job.module(values)
    return mean(found.sum())


def trains_while_whole(job):
    with FullyShardedDataParallel.summon_full_params(job):
        return mean(job.module(values_of(9, same=False)).sum().item())


def jobs(framework):
    yield "nested lists", lambda: train(Nested(), framework)
    yield "recurrent", lambda: train(Tokens(), framework)
    yield (
        "weight norm",
        lambda: train(Blocks([nn.utils.parametrizations.weight_norm(nn.Linear(24, 24)) for _ in range(2)]), framework),
    )
    if framework == "ddp":  # FSDP takes no parameter without a dimension
        yield "scaled", lambda: train(Scaled(), framework, after_backward=clip)
        yield "trains a temperature alone", lambda: train(Tempered(), framework)
        yield "normalizes in two passes", lambda: normalized(framework)
        yield "scales its loss", lambda: scaled_losses(framework)
        yield "goes back by towers", lambda: train(Towers(), framework, loss_of=squares_of_towers)
        yield "shows what lies between", lambda: train(Shown(), framework, loss_of=squares_of_shown)
        limited = Blocks([Limited(24, 24) for _ in range(2)])
        yield "shortens weights", lambda: train(limited, framework, after_step=lambda _: shorten(limited) or 0.0)
    yield "skipped", lambda: train(Skipped(), framework)
    yield "changes itself in forward", lambda: train(Blocks([Clamped(24, 24) for _ in range(2)]), framework)
    yield "changes the root before backward", lambda: train(Blocks(), framework, after_forward=change_root_by_data)
    if framework == "fsdp1":
        yield "generates", lambda: train(Blocks(), framework, after_step=generates)
        yield "trains while whole", lambda: train(Blocks(), framework, after_step=trains_while_whole)
        return  # which ends with errors of its own in most of what follows
    yield "run again", lambda: train(Blocks([Checkpointed(24, 24) for _ in range(2)]), framework)
    yield "runs its blocks again", lambda: train(CheckpointedBlocks(), framework)
    yield "changes an inner unit in forward", lambda: train(Blocks(before=change_inner), framework)
    yield "changes itself plainly", lambda: train(Blocks([ClampedPlainly(24, 24) for _ in range(2)]), framework)
    yield "changes the root in forward", lambda: train(Blocks(before=change_root), framework)
    yield "limits its embedding", lambda: train(Tokens(max_norm=1.0), framework, same=True)
    if framework == "fsdp2":
        yield "steps unreduced", lambda: train(Blocks(), framework, loss_of=squares_unreduced)
        yield "drops unreduced", lambda: train(Blocks(), framework, loss_of=partial(squares_unreduced, drops=True))
    if framework == "ddp":
        yield "projects gradients", lambda: train(Blocks(), framework, after_backward=project)
        yield "penalizes gradients", lambda: train(Blocks(), framework, loss_of=penalized)
        averaging = Averaging()
        yield (
            "averages the wrapper",
            lambda: train(Blocks(), framework, loss_of=averaging.loss_of, after_step=averaging.after_step),
        )
        yield "swaps weights", lambda: train(Blocks(), framework, after_step=swaps)
        yield "sparse", lambda: train(Tokens(sparse=True), framework)
        yield "pickled", lambda: train(Blocks(), framework, after_step=pickled)
        yield "takes an abstract optimizer", lambda: train(Blocks(), framework, optimizer_of=Descent)
        yield "steps on its own", lambda: train(Blocks(), framework, loss_of=squares_of_this_rank)
        yield "goes back twice", lambda: train(Blocks(), framework, loss_of=squares_in_parts)
        yield "grows", lambda: grows(framework)
        yield "deals parameters out", lambda: train(Blocks(), framework, optimizer_of=dealt_out)


def change_root_by_data(model):
    model.last.weight.data.mul_(0.9)


def main(jobs):
    framework = sys.argv[1]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, job in jobs(framework):
        try:
            told = " ".join(f"{value:.9e}" for value in job())
        except (UsageError, RuntimeError, SystemExit) as error:
            told = f"refused: {error}"
        if dist.get_rank() == 0:
            print(f"{name}|{told}", flush=True)
        gc.collect()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # plain torch 2.13 with gloo aborts at exit in some runs where a model is still there


if __name__ == "__main__":
    main(jobs)
