"""Trains under DDP until a file is there; its name is the argument, and with `.begun` tells that training runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    stop = Path(sys.argv[1])
    begun, decided = stop.with_name("stop.begun"), stop.with_name("stop.decided")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]))
    optimizer = torch.optim.AdamW(model.parameters())
    step, last = 0, sys.maxsize
    while step < last:
        model(torch.ones(8, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        begun.touch()
        step += 1
        time.sleep(0.03)  # what is recorded does not matter, and other tests want the processors
        # The ranks agree by a file: a collective on a tensor that Python holds, as the last thing before the
        # interpreter ends, makes torch abort when gloo's thread lets go of it too late (seen with torch 2.13).
        if dist.get_rank() == 0 and stop.exists() and not decided.exists():
            part = stop.with_name("stop.part")
            part.write_text(str(step + 2))  # no rank is more than one step ahead
            part.rename(decided)
        if last == sys.maxsize and decided.exists():
            last = int(decided.read_text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
