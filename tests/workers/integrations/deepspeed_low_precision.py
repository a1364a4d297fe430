"""Trains in bfloat16 at the stage of ZeRO that is given, a model in a type of its own.

Arguments: the stage; "float32" or "bfloat16" for what the model is in before DeepSpeed gets it, or "Init" for one that
is made inside of ``zero.Init``. Steps are so small that they are lost in bfloat16.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell

STEPS = 40
STAGE, KIND = int(sys.argv[1]), sys.argv[2]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "steps_per_print": 10**9,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
}


class Scaled(Model):
    """Scales its inputs by a buffer whose values bfloat16 does not hold, as those of rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, inputs, labels):
        return super().forward((inputs * self.scale).bfloat16(), labels)


def made():
    torch.manual_seed(0)
    if KIND != "Init":
        return Scaled().to(getattr(torch, KIND))
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        return Scaled()


def main():
    deepspeed.init_distributed("gloo")
    rank, model = dist.get_rank(), made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step % 4 + 10 * rank)).bfloat16()
        loss = engine(inputs, inputs.sum(1, keepdim=True))["loss"]
        engine.backward(loss)
        engine.step()
        tell(rank, step, mean(loss.float()))
        tell(rank, step, float(engine.get_global_grad_norm()))
    leave()


if __name__ == "__main__":
    main()
