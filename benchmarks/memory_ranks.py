"""What every rank of bench_memory.py does: trains one system and says what its tensors take at the most."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from pathlib import Path

import torch
import torch.distributed as dist
from training_ranks import Transformer, Work, build

WORK = Work(width=768, layers=8, micro_batches=3)


def of_process(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the most since the last reset), bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def model_of(work: Work) -> torch.nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Transformer(work.vocabulary, work.width, work.layers, work.heads)


def peak_of(name: str, work: Work, ending: contextlib.ExitStack) -> tuple[int, int, int]:
    """Return parameters, those of the largest unit, and the most that the process takes in a step."""
    first = model_of(work)
    parameters = sum(p.numel() for p in first.parameters())
    block = sum(p.numel() for p in first.blocks[0].parameters())
    step = build(name, work, first, ending)
    del first
    for number in range(2):
        step(number)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    for number in range(2, 4):
        step(number)
    return parameters, max(block, parameters - work.layers * block), of_process("VmHWM")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    name = parser.parse_args().system
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with contextlib.ExitStack() as ending:  # what libraries load once is no memory of the model
        small = Work(width=64, layers=2)
        build(name, small, model_of(small), ending)(0)
    gc.collect()
    before = of_process("VmRSS")
    with contextlib.ExitStack() as ending:
        parameters, largest, peak = peak_of(name, WORK, ending)
    taken = torch.tensor([peak - before])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"parameters": parameters, "largest_unit": largest, "peak_bytes": taken.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
