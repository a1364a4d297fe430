"""Records profiles of a model under our runtime, all threads, as `paro-advise capture` does."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sharding_accounts import Model, backward
from torch.profiler import ProfilerActivity, profile, schedule

from paro_advise.runtime import shard

MICRO_BATCHES, STEPS = 2, 2


def record(strategy, folder):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Groups are not nodes here, so that every collective is one of the units of the reference.
    shard(model, optimizer, strategy, group_size=2, reshard_root=True, ranks_per_node=dist.get_world_size())
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everything, schedule=plan) as recording:
        for _ in range(STEPS + 1):
            for micro in range(MICRO_BATCHES):
                backward(model, micro == MICRO_BATCHES - 1)
            optimizer.step()
            optimizer.zero_grad()
            recording.step()
    folder.mkdir(parents=True, exist_ok=True)
    recording.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json"))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for strategy in sys.argv[2:]:
        record(strategy, Path(sys.argv[1]) / strategy)
        dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
