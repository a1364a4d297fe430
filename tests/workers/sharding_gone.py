"""Drops sharded models: nothing of them may stay in the process."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from paro_advise.runtime import engine_of, shard


def train_and_drop(strategy):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, strategy, group_size=2)
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    return weakref.ref(model), weakref.ref(engine_of(model))


def held_by_this_process():
    """Return how many process groups, threads and descriptors there are."""
    own = Path("/proc/self")
    return len(distributed_c10d._world.pg_map), len([*own.glob("task/*")]), len([*own.glob("fd/*")])


def main():
    dist.init_process_group("gloo")
    held = []
    for strategy in ("NIG", "IIG", "GGG") * 3:
        left = train_and_drop(strategy)
        # A worker may still be at what nobody waits for.
        deadline = time.monotonic() + 10
        while any(thing() is not None for thing in left) and time.monotonic() < deadline:
            time.sleep(0.01)
            gc.collect()
        assert [thing() for thing in left] == [None, None], strategy
        held.append(held_by_this_process())
    # What one model needed serves the next.
    assert held[-1][0] == held[2][0], held
    assert all(last <= first + 2 for last, first in zip(held[-1], held[2], strict=True)), held
    for thread in threading.enumerate():
        if thread.name.startswith("paro_advise"):
            thread.join(timeout=10)
            assert not thread.is_alive(), thread.name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
