"""FSDP1 with a wrapping policy, its own clipping and ``no_sync``."""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from train import Block


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FullyShardedDataParallel(
        make_model(args),
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        for micro in range(args.micro_batches):
            last = micro == args.micro_batches - 1
            with nullcontext() if last else model.no_sync():
                (loss_of(model, batch(args, step, micro, rank)) / args.micro_batches).backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} norm {norm.item():.6f}", flush=True)
    # torch 2.13 on gloo can abort at exit when sharded parameters outlive their process group.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
