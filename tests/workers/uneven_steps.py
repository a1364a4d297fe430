"""FSDP2 without any word on micro-batches, and steps that have fewer of them than usual."""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

MICRO_BATCHES = (3, 3, 2, 3, 1, 3, 3)


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    model = make_model(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, count in enumerate(MICRO_BATCHES):
        total = torch.zeros(())
        for micro in range(count):
            loss = loss_of(model, batch(args, step, micro, dist.get_rank())) / count
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5 if step % 2 else math.inf).full_tensor()
        if dist.get_rank() == 0:
            print(f"{total.item():.9e} {norm.item():.9e}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
