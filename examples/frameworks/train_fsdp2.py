"""FSDP2 as its tutorial writes it: reduce on every micro-batch but the last only when told."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    for step in range(args.steps):
        optimizer.zero_grad()
        for micro in range(args.micro_batches):
            loss = loss_of(model, batch(args, step, micro, rank)) / args.micro_batches
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0).full_tensor()
        optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"step {step} norm {norm.item():.6f} loss {loss.item():.6f}", flush=True)
    # torch 2.13 on gloo can abort at exit when sharded parameters outlive their process group.
    del model, optimizer, schedule
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
