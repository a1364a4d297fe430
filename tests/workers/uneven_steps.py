"""FSDP2 without any word on micro-batches, and steps that have fewer of them than usual."""

from __future__ import annotations

import gc
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
        for micro in range(count):
            (loss_of(model, batch(args, step, micro, dist.get_rank())) / count).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
