"""What a stage of ZeRO shows a script: gradients before the step (stage 0), whole parameters outside of passes."""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell

STEPS = 4
STAGE = int(sys.argv[1])
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 0.5 if STAGE == 0 else 0.0,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
}


def main():
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    model.register_buffer("noise", torch.full((WIDTH,), float(rank)))  # of each rank; DeepSpeed sends parameters alone
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    tell(rank, 0, mean(engine.module.noise[0]))
    for number in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = engine(inputs, inputs.sum(1, keepdim=True))["loss"]
        engine.backward(loss)
        for parameter in engine.module.parameters():
            if parameter.grad is not None and STAGE == 0:
                parameter.grad.mul_(0.5)
        engine.step()
        tell(rank, number, mean(loss))
        tell(rank, number, float(engine.get_global_grad_norm() is None))
        tell(rank, number, sum(float(parameter.norm()) for parameter in engine.module.parameters()))
        tell(rank, number, float(sum(value.numel() for value in engine.module.state_dict().values())))
    leave()


if __name__ == "__main__":
    main()
