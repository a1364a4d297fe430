"""DDP whose ranks have different numbers of micro-batches, of which only the last is reduced."""

from __future__ import annotations

import gc
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

from paro_advise.errors import UsageError


def main():
    args = parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(args))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        count = 1 + (step + rank) % 3
        total = torch.zeros(())

        def one_pass(micro, step=step, count=count, total=total):
            loss = loss_of(model, batch(args, step, micro, rank)) / count
            loss.backward()
            total += loss.detach()

        if step % 2:
            for micro in range(count - 1):
                with model.no_sync():
                    one_pass(micro)
        else:
            with model.no_sync():
                for micro in range(count - 1):
                    one_pass(micro)
        one_pass(count - 1)
        optimizer.step()
        if rank == 0 and step == 2:
            saved = optimizer.state_dict()["state"]
            print(f"{sum(float(state['momentum_buffer'].norm()) for state in saved.values()):.9e}", flush=True)
        optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{total.item():.9e}", flush=True)
    # A reducer of DDP that goes after its group may wait for ever for a thread that wants what it holds (torch 2.13).
    model = optimizer = one_pass = None
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(1)  # the others wait for this rank until it is gone
