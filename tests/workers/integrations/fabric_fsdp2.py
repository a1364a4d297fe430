"""Fabric over FSDP2 by its own strategy: trained, saved whole or in parts, trained on, loaded, and trained again."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

STEPS = 2
WAY = sys.argv[1]


def parallelize(model, device_mesh):
    mesh = device_mesh["data_parallel"]
    for child in (module for module in model.modules() if type(module).__name__ == "Block"):
        fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(fabric, model, optimizer, begin):
    for number in range(begin, begin + STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + fabric.global_rank))
        loss = model(inputs, inputs.sum(1, keepdim=True))["loss"]
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        tell(fabric.global_rank, number, mean(loss))


def main():
    strategy = ModelParallelStrategy(
        parallelize_fn=parallelize,
        data_parallel_size=4,
        tensor_parallel_size=1,
        process_group_backend="gloo",
        save_distributed_checkpoint=WAY == "parts",
    )
    fabric = Fabric(accelerator="cpu", devices=4, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(Model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(fabric, model, optimizer, 0)
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    path = Path(shared[0]) / "saved.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "steps": STEPS})
    train(fabric, model, optimizer, STEPS)
    state = {"model": model, "optimizer": optimizer, "steps": 0}
    fabric.load(path, state)
    assert state["steps"] == STEPS
    train(fabric, model, optimizer, STEPS)
    if WAY == "whole" and fabric.global_rank == 0:
        saved = torch.load(path, weights_only=True)["model"]
        assert list(saved) == list(Model().state_dict())
        for value in saved.values():
            tell(0, STEPS, float(value.double().abs().sum()))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
