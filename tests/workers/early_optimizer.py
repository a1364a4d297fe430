"""An FSDP1 script that makes its optimizer before it wraps the model; "orig" lets FSDP1 keep the parameters' objects.

Prints the loss of each step on the same samples: without "orig" nothing trains in plain FSDP1.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = FullyShardedDataParallel(model, use_orig_params="orig" in sys.argv, device_id=torch.device("cpu"))
    values = torch.randn(6, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        job.zero_grad()
        loss = job(values).square().mean()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"loss|{loss.item():.9e}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
