"""What a rank's host does for a strategy as the world grows: one process, where torch's fake backend stands for others.

    python benchmarks/bench_at_scale.py [--repeats N]

A model of 24 blocks with 12 parameters each is sharded for 8 to 1,024 ranks in groups of 8 and takes steps of two
micro-batches. Collectives cost nothing here, in ours as in FSDP2's, so what is left is what the host does: process
groups, start-up, CPU time of all threads, and copies. Kinds take turns; medians over processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

WORLDS = (8, 64, 256, 1024)
KINDS = ("FSDP2", "FSDP2 hybrid", "GGG", "III", "IIG", "NNG")
WIDTH, BLOCKS, STEPS, WARM_UP = 64, 24, 10, 3
_COPIES = ("aten::copy_", "aten::_foreach_copy_", "aten::cat", "fsdp::chunk_cat", "fsdp::split_with_sizes_copy")


def _model() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(self.norm(x)).relu()
            return x

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(BLOCKS)))


def _fsdp2(model: Any, world: int, *, hybrid: bool) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

    from paro_advise.runtime.ho_ring.fsdp2 import PlainMemory

    class NoGather(PlainMemory, AllGather):
        def __call__(self, *_: Any, **__: Any) -> None:
            return None

    class NoScatter(PlainMemory, ReduceScatter):
        def __call__(self, *_: Any, **__: Any) -> None:
            return None

    shape = (world // 8, 8) if hybrid else (world,)
    names = ("across", "inside")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (*model[1:], model):
        fully_shard(part, mesh=mesh)
        part.set_custom_all_gather(NoGather())
        part.set_custom_reduce_scatter(NoScatter())
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _ours(model: Any, strategy: str) -> Any:
    import torch

    from paro_advise.runtime import shard
    from paro_advise.runtime.sharding.exchange.channels import Channels
    from paro_advise.runtime.sharding.exchange.native import NativeGroup
    from paro_advise.runtime.sharding.exchange.usage import Usage

    # Sums are not there.
    Channels.self_check = lambda *_: None  # type: ignore[method-assign]
    Usage.check_order = lambda *_: None  # type: ignore[method-assign]
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        setattr(NativeGroup, name, lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    shard(model, optimizer, strategy, group_size=8, ranks_per_node=8, native_collectives=True)
    return optimizer


def measure(kind: str, world: int) -> dict[str, float]:
    """Return what one process has seen."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    made = [0]
    new_group = dist.new_group

    def counted(*arguments: Any, **options: Any) -> Any:
        made[0] += 1
        return new_group(*arguments, **options)

    dist.new_group = dist.device_mesh.new_group = counted
    model = _model()
    begun = time.perf_counter()
    optimizer = _fsdp2(model, world, hybrid="hybrid" in kind) if "FSDP2" in kind else _ours(model, kind)
    start_s = time.perf_counter() - begun
    batch = torch.randn(2, WIDTH)

    def step() -> None:
        for micro in range(2):
            if "FSDP2" not in kind:  # else it would keep whole gradients between the two
                model.set_requires_gradient_sync(micro == 1)
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for number in range(WARM_UP + STEPS):
        begun = time.process_time()  # of all threads, ours run collectives beside
        step()
        if number >= WARM_UP:
            times.append(time.process_time() - begun)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    copies = sum(event.count for event in profile.key_averages() if event.key in _COPIES)
    return {"groups": made[0], "start_s": start_s, "step_ms": 1e3 * statistics.median(times), "copies": copies}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]))))
        return
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for kind in KINDS:
            for world in WORLDS:
                done = subprocess.run(
                    [sys.executable, __file__, "--one", kind, str(world)], capture_output=True, text=True, check=True
                )
                found.setdefault((kind, world), []).append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'':14}{'ranks':>6}{'groups made':>13}{'start-up s':>12}{'CPU ms a step':>15}{'copies a step':>15}")
    for (kind, world), runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(
            f"{kind:14}{world:>6}{middle['groups']:>13.0f}{middle['start_s']:>12.2f}"
            f"{middle['step_ms']:>15.1f}{middle['copies']:>15.0f}"
        )


if __name__ == "__main__":
    main()
