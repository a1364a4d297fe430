"""Steps of DeepSpeed's engine after several backward passes, at the stage of ZeRO and in the way that are given."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell

STEPS = 3
STAGE, WAY = int(sys.argv[1]), sys.argv[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": STAGE},
}


def loss_of(engine, number):
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    return engine(inputs, inputs.sum(1, keepdim=True))["loss"]


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    engine = deepspeed.initialize(model=Model(), config=CONFIG)[0]
    for step in range(STEPS):
        for number in range(2):
            if WAY == "boundaries":
                engine.set_gradient_accumulation_boundary(number == 1)
            loss = loss_of(engine, 2 * step + number)
            if WAY == "late":  # as accelerate does
                engine.set_gradient_accumulation_boundary(number == 1)
            if WAY == "direct":
                loss.backward()
            else:
                engine.backward(loss)
        engine.step()
        tell(dist.get_rank(), step, mean(loss))
        tell(dist.get_rank(), step, float(engine.get_global_grad_norm() or 0.0))
    leave()


if __name__ == "__main__":
    main()
