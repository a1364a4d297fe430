"""DDP with ZeroRedundancyOptimizer, gradients reduced on every micro-batch."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from common import batch, loss_of, make_model, parse_args
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(args), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)
    for step in range(args.steps):
        optimizer.zero_grad()
        for micro in range(args.micro_batches):
            (loss_of(model, batch(args, step, micro, rank)) / args.micro_batches).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step} norm {norm.item():.6f}", flush=True)
    # torch 2.13 on gloo can wait for itself forever when DDP outlives its process group.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
