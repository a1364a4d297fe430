"""A training script that profiles itself: on all ranks or on rank 0 alone.

Arguments before those of ``common``: the folder of its traces, and "all" or "one".
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

STEPS = 14


def main():
    folder, who = Path(sys.argv.pop(1)), sys.argv.pop(1)
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make_model(args))
    optimizer = torch.optim.AdamW(model.parameters())
    own = contextlib.nullcontext()
    if who == "all" or rank == 0:
        own = profile(
            schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(folder / f"own{rank}.json")),
        )
    with own:
        for step in range(STEPS):
            loss_of(model, batch(args, step, 0, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(own, "step"):
                own.step()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
