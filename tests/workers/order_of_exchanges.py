"""Ranks that multiply sharded weights in an order of their own: equal in number and shape, and never the same."""

from __future__ import annotations

import torch.distributed as dist
from script_habits import Blocks, adamw, squares, values_of, wrapped


def main():
    dist.init_process_group("gloo")
    job = wrapped(Blocks(), "ddp")
    optimizer = adamw(job.parameters())
    squares(job, values_of(0, same=False)).backward()
    optimizer.step()
    first, second = (block.weight.detach() for block in job.module.blocks[:2])
    if dist.get_rank() == 0:
        traces = (first @ first).trace(), (second @ second).trace()
    else:
        traces = reversed(((second @ second).trace(), (first @ first).trace()))
    print("traces", *map(float, traces), flush=True)


if __name__ == "__main__":
    main()
