"""One rank alone: every strategy trains, and ends where plain PyTorch does."""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist

from paro_advise.runtime import shard


def trained(strategy):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if strategy:
        model, optimizer = shard(model, optimizer, strategy, group_size=1, units=[torch.nn.Linear])
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        return model(torch.ones(1, 8)).tolist()


def main():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        plain = torch.tensor(trained(""))
        for strategy in sys.argv[1].split(","):
            got = torch.tensor(trained(strategy))
            assert torch.allclose(got, plain, atol=1e-6), (strategy, got, plain)
            print(strategy, "equal")
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
