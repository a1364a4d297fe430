"""What every rank of bench_start.py does: an FSDP2 script that starts on the meta device, and what it takes when."""

from __future__ import annotations

import gc
import json

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch.distributed.fsdp import fully_shard
from training_ranks import Transformer, Work

from paro_advise.runtime.measure.process_memory import forget_peak, peak_bytes, resident_bytes

WORK = Work(width=1024, layers=8)
STEPS, BATCH = 6, 2


class Peaks:
    """The most that this process takes beyond what it had at first, from point to point."""

    def __init__(self) -> None:
        gc.collect()
        self._before = resident_bytes() or 0
        self.found: dict[str, int] = {}
        forget_peak()

    def reach(self, point: str) -> None:
        """Note the peak of the time before a point, the most of all ranks."""
        peak = torch.tensor([(peak_bytes() or 0) - self._before])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        self.found[point] = int(peak.item())
        forget_peak()


def train(work: Work, steps: int, peaks: Peaks | None) -> None:
    """Shard a model on the meta device, fill it, and train."""

    def reach(point: str) -> None:
        if peaks is not None:
            peaks.reach(point)

    with torch.device("meta"):
        model = Transformer(work.vocabulary, work.width, work.layers, work.heads)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)
    reach("sharded")
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    reach("filled")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, work.vocabulary, (BATCH, work.sequence + 1))
    for step in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        del logits
        reach(f"forward {step}")
        loss.backward()
        reach(f"backward {step}")
        optimizer.step()
        optimizer.zero_grad()
        reach(f"step {step}")


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    peaks = Peaks()
    train(WORK, STEPS, peaks)
    if dist.get_rank() == 0:
        print(json.dumps(peaks.found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
