"""``torchrun ... -m paro_advise.runtime.probe``: measures collectives, printed as nccl-tests prints them.

What it prints can be given to ``analyze`` and ``recommend`` beside traces.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZES_BYTES = (1 << 16, 1 << 20, 4 << 20, 16 << 20)  # bytes; measured buffers; assumed: from latency to bandwidth
_REPEATS = 5  # measured calls at a size, whose median counts; assumed: short, and no single slow call decides
_HEAD = (
    "#                                                              out-of-place                       in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw"
    " #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
)


def main() -> None:
    """Measure all-gather and reduce-scatter over all ranks, or inside groups of neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, help="ranks of a group; all of them without it")
    options = parser.parse_args()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device is not None else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    size = options.group_size or world
    if world % size:
        parser.error(f"--group-size must divide {world} ranks, got {size}")
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    names: list[str | None] = [None] * world
    dist.all_gather_object(names, socket.gethostname())
    for operation in ("all_gather", "reduce_scatter"):
        if rank == 0:
            print(_preamble(operation, size, names), flush=True)
        for num_bytes in _SIZES_BYTES:
            took = _measure(operation, groups[rank // size], size, num_bytes, device)
            if rank == 0:
                print(_row(operation, num_bytes, size, took), flush=True)
        if rank == 0:
            print("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 0\n", flush=True)
    dist.destroy_process_group()


def _preamble(operation: str, size: int, names: list[str | None]) -> str:
    devices = [
        f"#  Rank {rank:2} Group {rank // size:2} Pid {10_000 + rank} on {name} device {rank % size:2} [0x00] any"
        for rank, name in enumerate(names)
    ]
    return "\n".join([f"# Collective test starting: {operation}_perf", "# Using devices", *devices, "#", _HEAD])


def _measure(operation: str, group: dist.ProcessGroup, size: int, num_bytes: int, device: torch.device | None) -> float:
    """Return the median time in microseconds of the slowest rank."""
    whole = torch.zeros(num_bytes // 4 // size * size, device=device)
    part = torch.zeros(whole.numel() // size, device=device)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
    }
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        calls[operation]()
        if device is not None:
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item() * 1e6)
    return float(sorted(times[1:])[_REPEATS // 2])


def _row(operation: str, num_bytes: int, size: int, took_us: float) -> str:
    num_bytes = num_bytes // 4 // size * size * 4
    algbw = num_bytes / took_us / 1e3
    busbw = algbw * (size - 1) / size
    redop = "sum" if operation == "reduce_scatter" else "none"
    measured = f"{took_us:8.1f}  {algbw:6.3f}  {busbw:6.3f}      0"
    return f"{num_bytes:12d}  {num_bytes // 4 // size:12d}     float  {redop:>6}      -1  {measured}  {measured}"


if __name__ == "__main__":
    main()
