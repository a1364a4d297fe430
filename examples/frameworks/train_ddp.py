"""DDP with ``no_sync`` on all micro-batches but the last."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(args))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(args.steps):
        for micro in range(args.micro_batches):
            last = micro == args.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                (loss_of(model, batch(args, step, micro, rank)) / args.micro_batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} norm {norm.item():.6f}", flush=True)
    # torch 2.13 on gloo can wait for itself forever when DDP outlives its process group.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
