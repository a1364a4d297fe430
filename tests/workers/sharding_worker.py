"""Trains a small model under strategies and compares it with one process that sees all the data."""

from __future__ import annotations

import copy
import faulthandler
import gc
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from paro_advise.policies.strategy import KEPT
from paro_advise.runtime import shard

MICRO_BATCHES, STEPS, BATCH, WIDTH = 4, 10, 3, 16
CLIP = 0.5

# The launcher ends the ranks that wait for one that failed; their stacks tell what they waited for.
faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        # 37 is divisible by no group size, and the bias is shorter than some meshes times two. What has another
        # dimension that ranks divide is cut along that one.
        self.up, self.between, self.down = nn.Linear(width, 37), nn.Linear(37, 37), nn.Linear(37, width)

    def forward(self, hidden):
        return hidden + self.down(gelu(self.between(self.up(self.norm(hidden)))))


class Model(nn.Module):
    def __init__(self, width=WIDTH, tied=False):
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 29, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)) * self.scale


class Keeper(Model):
    """Leaves what it keeps out of copies, as Lightning's modules leave their trainer."""

    def __getstate__(self):
        return {**self.__dict__, "kept": None}


def fill(module):
    """Give a module that was made without memory its first values."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif hasattr(module, "scale"):
        module.scale.fill_(0.5)


def data(step, micro, rank):
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 29, (BATCH, 9), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten()) / MICRO_BATCHES


def optimizer_of(kind, model):
    decay = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    rest = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 2e-3}]
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, fused=kind == "fused", foreach=False if kind == "fused" else None)


def train_single(model, kind, steps=range(STEPS), optimizer=None):
    """One process over the data of all ranks."""
    world = dist.get_world_size()
    optimizer = optimizer or optimizer_of(kind, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    trace = []
    for step in steps:
        total = 0.0
        for micro in range(MICRO_BATCHES):
            for rank in range(world):
                loss = loss_of(model, data(step, micro, rank)) / world
                loss.backward()
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        trace.append((total, norm.item()))
    return trace


def train_sharded(model, optimizer, steps=range(STEPS), schedule=None, after_step=None):
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    trace = []
    for step in steps:
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            loss = loss_of(model, data(step, micro, rank))
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        trace.append((total.item() / world, norm.item()))
        if after_step:
            after_step(step)
    return trace


def whole_parameters(model):
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def compare(label, got, wanted, tolerance):
    for step, ((loss, norm), (loss_wanted, norm_wanted)) in enumerate(zip(got, wanted, strict=True)):
        assert abs(loss - loss_wanted) <= tolerance * abs(loss_wanted), (label, step, "loss", loss, loss_wanted)
        assert abs(norm - norm_wanted) <= 5 * tolerance * abs(norm_wanted), (label, step, "norm", norm, norm_wanted)


def compare_parameters(label, got, wanted, tolerance):
    for name, value in wanted.items():
        worst = (got[name].float() - value.float()).norm() / value.float().norm().clamp_min(1e-3)
        assert worst <= tolerance, (label, name, worst.item())


def parity(kind, strategies, sizes):
    torch.manual_seed(0)
    first = Model()
    reference = copy.deepcopy(first)
    wanted = train_single(reference, kind)
    parameters = dict(reference.named_parameters())
    for strategy in strategies:
        for size in sizes:
            model = copy.deepcopy(first)
            model, optimizer = shard(model, optimizer_of(kind, model), strategy, group_size=size)
            label = f"{strategy} groups of {size} {kind}"
            compare(label, train_sharded(model, optimizer), wanted, 1e-6)
            compare_parameters(label, whole_parameters(model), parameters, 1e-6)
            if dist.get_rank() == 0:
                print("equal", label, flush=True)


def main():
    dist.init_process_group("gloo")
    # Torch numbers groups on each rank by itself: these ranks have made one more than the others.
    dist.new_group([0, 1])
    torch.set_num_threads(1)
    kinds, sizes = sys.argv[1].split(","), [int(size) for size in sys.argv[2].split(",")]
    strategies = sys.argv[3].split(",") if len(sys.argv) > 3 else [str(strategy) for strategy in KEPT]
    for kind in kinds:
        parity(kind, strategies, sizes)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
