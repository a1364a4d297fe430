"""Trains under DDP until a file is there; its name is the argument, and with `.begun` tells that training runs."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    stop = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters())
    goes_on = torch.ones(1)
    while goes_on:
        model(torch.ones(8, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        goes_on.fill_(not stop.exists())
        dist.broadcast(goes_on, 0)
        stop.with_name("stop.begun").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
