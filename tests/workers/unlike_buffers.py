"""DDP over models whose buffers differ from rank to rank: each way to say when rank 0's are sent, and to change it later.

With a word, its mixed precision instead, by position.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

STEPS = 3


class Model(nn.Module):
    """Normalizes by what its rank saw, and adds noise of its rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.register_buffer("noise", torch.full((6,), 0.1 * dist.get_rank()))

    def forward(self, values):
        return self.layers(values + self.noise)


def set_later(name):
    def wrap(model):
        wrapper = DistributedDataParallel(model)
        setattr(wrapper, name, False)
        return wrapper

    return wrap


def mesh(model):
    found = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return DistributedDataParallel(model, device_mesh=found, forward_sync_buffers=False)


WAYS = {
    "as it is": DistributedDataParallel,
    "no broadcasts": lambda model: DistributedDataParallel(model, broadcast_buffers=False),
    "broadcasts by default": lambda model: DistributedDataParallel(model, broadcast_buffers=None),
    "no broadcasts by position": lambda model: DistributedDataParallel(model, None, None, 0, False),
    "at first only": lambda model: DistributedDataParallel(model, forward_sync_buffers=False),
    "both names": lambda model: DistributedDataParallel(model, broadcast_buffers=False, forward_sync_buffers=True),
    "nothing at first": lambda model: DistributedDataParallel(model, init_sync=False),
    "not from now on": set_later("forward_sync_buffers"),
    "not from now on, as it was called": set_later("broadcast_buffers"),
    "nothing from now on": set_later("require_forward_param_sync"),
    "a mesh": mesh,
}


def trained(wrap):
    """Return what each rank's buffers and loss come to."""
    torch.manual_seed(0)
    model = wrap(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [loss.detach(), *(buffer.double().sum() for buffer in model.buffers())]
    return [f"{value.item():.9e}" for value in found]


def main():
    dist.init_process_group("gloo")
    if len(sys.argv) > 1:
        mixed = _MixedPrecision(param_dtype=torch.bfloat16)
        DistributedDataParallel(
            Model(), None, None, 0, True, True, None, None, False, False, False, False, None, None, mixed
        )
    for name, wrap in WAYS.items():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, trained(wrap))
        if dist.get_rank() == 0:
            print(name + "|" + " ".join(value for rank in told for value in rank), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
