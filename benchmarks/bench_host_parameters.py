"""What a step of a model with many small parameters costs its training thread, plain, under FSDP2 and under plans.

    python benchmarks/bench_host_parameters.py [--parameters N] [--repeats N] [STRATEGY ...]

Two gloo ranks on this machine train layers of 16 x 16, so that what counts is the host's work for each parameter.
Each job runs in turn, `--repeats` times; counted is what rank 0's training thread is on a core for in a step, the
median of 12 steps. The last column is a job's median over FSDP2's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from bench_host import cpu_ms

RANKS, WIDTH, BLOCKS, STEPS, WARM_UP = 2, 16, 40, 16, 4
STRATEGIES = ("GGG", "NNG", "IIG")


def train(kind: str, parameters: int) -> float:
    """Return the median milliseconds of CPU time of a step of this thread."""
    import torch
    import torch.distributed as dist

    layers = parameters // (2 * BLOCKS)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if kind not in ("plain", "fsdp2"):
        from paro_advise.runtime import shard

        model, optimizer = shard(model, optimizer, kind, group_size=RANKS)
    x = torch.randn(2, WIDTH)
    times = []
    for _ in range(STEPS):
        begin = time.thread_time()
        model(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.thread_time() - begin) * 1e3)
    dist.barrier()
    return statistics.median(times[WARM_UP:])


def measure(kind: str, parameters: int) -> float:
    """Run one job; return rank 0's figure."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    return cpu_ms(
        kind, [*command, "--train", kind, "--parameters", str(parameters)], os.environ | {"OMP_NUM_THREADS": "1"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", nargs="*", default=STRATEGIES)
    parser.add_argument("--parameters", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        spent = train(options.train, options.parameters)
        if os.environ["RANK"] == "0":
            print(f"cpu_ms {spent}", flush=True)
        os._exit(0)  # gloo's threads need no goodbye
    found: dict[str, list[float]] = {kind: [] for kind in ("plain", "fsdp2", *options.strategies)}
    for _ in range(options.repeats):
        for kind, times in found.items():
            times.append(measure(kind, options.parameters))
    median = {kind: statistics.median(times) for kind, times in found.items()}
    print(f"{'':<8}{'CPU ms a step':>14}{'least':>8}{'most':>8}{'over FSDP2':>12}")
    for kind, times in found.items():
        ratio = f"{median[kind] / median['fsdp2']:.2f}"
        print(f"{kind:<8}{median[kind]:>14.0f}{min(times):>8.0f}{max(times):>8.0f}{ratio:>12}")
    print(json.dumps({"parameters": options.parameters, "cpu_ms": found}))


if __name__ == "__main__":
    main()
