"""What every rank of bench_ho_ring.py does: times collectives, all kinds in turn; rank 0 prints JSON lines."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paro_advise.runtime.ho_ring import Algorithm, Collectives, HoRing, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

_MB = 1 << 20


def timed(run: Callable[[], None]) -> float:
    """Return the slowest rank's seconds of one run that all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    run()
    took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def interleaved(runs: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Return each kind's median seconds, A B C A B C ..., after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for repeat in range(repeats + 1):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            took = timed(runs[name])
            if repeat:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def job(collectives: Collectives | HoRing, operation: Operation, num_bytes: int, **choice: Any) -> Callable[[], None]:
    world = dist.get_world_size()
    size = max(1, num_bytes // 4 // world)
    whole, block = torch.ones(size * world), torch.ones(size)
    match operation:
        case Operation.ALL_GATHER:
            return lambda: collectives.all_gather(whole, block, **choice)
        case Operation.REDUCE_SCATTER:
            return lambda: collectives.reduce_scatter(block, whole, **choice)
        case _:
            return lambda: collectives.all_reduce(whole.fill_(1.0), **choice)


def large(collectives: Collectives, ring: HoRing, sizes: list[int], repeats: int) -> None:
    for num_bytes in sizes:
        for operation in Operation:
            runs = {
                algorithm.value: job(collectives, operation, num_bytes, algorithm=algorithm)
                for algorithm in collectives.algorithms
            }
            runs["plain_ring"] = job(ring, operation, num_bytes)
            say("large", operation=operation, num_bytes=num_bytes, seconds=interleaved(runs, repeats))


def sweep(collectives: Collectives, sizes: list[int], budget_s: float) -> None:
    begin = time.perf_counter()
    table = collectives.calibrate()
    say("calibration", seconds=time.perf_counter() - begin)
    for sample in table.samples:
        say("sample", operation=sample.operation, num_bytes=sample.num_bytes, seconds=sample.seconds)
    for num_bytes in sizes:
        for operation in Operation:
            runs = {
                "native": job(collectives, operation, num_bytes, algorithm=Algorithm.NATIVE),
                "chosen": job(collectives, operation, num_bytes),
            }
            once = sum(timed(run) for run in runs.values())
            repeats = max(5, min(101, int(budget_s / once)))
            say(
                "sweep",
                operation=operation,
                num_bytes=num_bytes,
                algorithm=table.pick(operation, num_bytes),
                seconds=interleaved(runs, repeats),
                repeats=repeats,
            )


def say(kind: str, **values: object) -> None:
    if dist.get_rank() == 0:
        print(json.dumps({"kind": kind, **values}), flush=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--large-mb", type=int, nargs="+", default=[16, 64])
    options.add_argument("--sweep-kb", type=int, nargs="+", default=[4, 64, 512, 2048, 16384, 65536])
    options.add_argument("--sweep-s", type=float, default=2.0)
    chosen = options.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    collectives = Collectives.of(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    ring = HoRing(ranks_per_node=1)
    large(collectives, ring, [size * _MB for size in chosen.large_mb], chosen.repeats)
    sweep(collectives, [size << 10 for size in chosen.sweep_kb], chosen.sweep_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
