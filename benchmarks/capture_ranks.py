"""What capturing costs steps that are not profiled: FSDP2, with and without it in turn, in one run.

Started by bench_loop under torchrun. Two runs of the same job differ by more than the figure sought, so
stretches of steps alternate; the first step of each is left out. Rank 0 prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from paro_advise.runtime.capture import capture

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

PAIRS, STRETCH = 80, 5


def main() -> None:
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = make_model(args)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        optimizer.zero_grad()
        for micro in range(args.micro_batches):
            (loss_of(model, batch(args, number, micro, rank)) / args.micro_batches).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        norm.full_tensor().item()
        optimizer.step()

    def stretch(folder: Path | None) -> float:
        """Return the median milliseconds of a step, captured where a folder is given."""
        times = []
        with capture(folder, steps="1000:1001") if folder else nullcontext() as recording:
            for number in range(STRETCH):
                started = time.perf_counter()
                step(number)
                if folder:
                    recording.step()
                times.append(1e3 * (time.perf_counter() - started))
        return statistics.median(times[1:])

    with tempfile.TemporaryDirectory() as folder:
        stretch(None)  # warm-up
        pairs = []
        for number in range(PAIRS):
            order = (None, Path(folder, f"{number}.{rank}"))
            first, second = (stretch(where) for where in (order if number % 2 else order[::-1]))
            pairs.append((first, second) if number % 2 else (second, first))
        assert any(Path(folder).iterdir()), "nothing was captured"
    if rank == 0:
        shares = [captured / plain - 1 for plain, captured in pairs]
        error = 1.25 * statistics.stdev(shares) / len(shares) ** 0.5  # of a median
        print(json.dumps({"share": statistics.median(shares), "standard_error": error}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
