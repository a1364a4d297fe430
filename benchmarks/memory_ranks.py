"""What every rank of bench_memory.py does: trains one system and says what its tensors take at the most."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
from typing import Any

import torch
import torch.distributed as dist
from training_ranks import Transformer, Work, build

from paro_advise.runtime.measure.process_memory import forget_peak, peak_bytes, resident_bytes

MODELS = {
    "first": Work(width=768, layers=8, micro_batches=3),
    "second": Work(width=512, layers=12, sequence=64, micro_batches=2),
}


def model_of(work: Work) -> torch.nn.Module:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Transformer(work.vocabulary, work.width, work.layers, work.heads)


def peak_of(name: str, work: Work, ending: contextlib.ExitStack) -> tuple[int, int, int]:
    """Return parameters, those of the largest unit, and the most that the process takes in a step."""
    first: Any = model_of(work)
    parameters = sum(p.numel() for p in first.parameters())
    block = sum(p.numel() for p in first.blocks[0].parameters())
    step = build(name, work, first, ending)
    del first
    for number in range(2):
        step(number)
    gc.collect()
    forget_peak()
    for number in range(2, 4):
        step(number)
    return parameters, max(block, parameters - work.layers * block), peak_bytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system")
    parser.add_argument("model", choices=MODELS)
    asked = parser.parse_args()
    name = asked.system
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    with contextlib.ExitStack() as ending:  # what libraries load once is no memory of the model
        small = Work(width=64, layers=2)
        build(name, small, model_of(small), ending)(0)
    gc.collect()
    before = resident_bytes()
    with contextlib.ExitStack() as ending:
        parameters, largest, peak = peak_of(name, MODELS[asked.model], ending)
    taken = torch.tensor([peak - before])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(json.dumps({"parameters": parameters, "largest_unit": largest, "peak_bytes": taken.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
