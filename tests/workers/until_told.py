"""DDP that trains until the file "end" is in its folder; while "slow" is there, rank 1 sleeps in every step
as many seconds as it says.
"""

import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def seconds_in(path):
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return 0.0


def main():
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    while True:
        is_over = torch.tensor([float((folder / "end").exists())])
        dist.broadcast(is_over, 0)
        if is_over:
            break
        time.sleep(0.03 + (seconds_in(folder / "slow") if dist.get_rank() == 1 else 0))
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
