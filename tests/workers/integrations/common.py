"""A small model, data and options that the training loops of all frameworks share."""

from __future__ import annotations

import argparse
import atexit
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, BATCH, STEPS = 48, 3, 4, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Takes what a Trainer hands on, and returns the loss as it expects it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, inputs, labels):
        x = inputs
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.mse_loss(self.head(x), labels)}


class Data(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, WIDTH, generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, place):
        row = self.inputs[place]
        return {"inputs": row, "labels": row.sum()[None]}


def options():
    """--folder records, --plan trains under a plan, --before compares; none of them leaves the script as it was."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder")
    parser.add_argument("--plan")
    parser.add_argument("--before")
    parser.add_argument("--trackers")
    return parser.parse_args()


def recording_of(args):
    return {"folder": args.folder, "steps": "4:6", "plan": args.plan, "before": args.before}


def model():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Model()


def loader(world_size, **others):
    return torch.utils.data.DataLoader(Data(STEPS * BATCH * world_size), batch_size=BATCH, **others)


def tell(rank, step, loss):
    if rank == 0:
        print(f"LOSS {step} {loss!r}", flush=True)


def mean(value):
    """Return the mean over ranks of a tensor with one element."""
    value = value.detach().double().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def leave():
    """End the process: a thread of gloo's can abort an interpreter that is shutting down (docs/scripts.md)."""
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
