"""ZeRO-3 with what its scripts do beside training: ``zero.Init``, and whole parameters to change, read, run and save.

--changes: change a parameter in the middle of training; --reads: read what DeepSpeed's optimizer keeps of one.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell
from torch import nn

GatheredParameters = deepspeed.zero.GatheredParameters
unwrap_model_for_generation = deepspeed.zero.unwrap_model_for_generation
STEPS = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def made():
    """Return a model whose head rank 0 alone has changed, which counts on all ranks."""
    torch.manual_seed(dist.get_rank())
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        model = Model()
    with GatheredParameters(model.head.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            nn.init.constant_(model.head.weight, 0.01)
    return model


def main():
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    engine, _, _, _ = deepspeed.initialize(model=made(), config=CONFIG)
    kept = None
    for step in range(STEPS):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(inputs, inputs.sum(1, keepdim=True))["loss"]
        engine.backward(loss)
        engine.step()
        tell(rank, step, mean(loss))
        parameters = list(engine.module.parameters())
        # A mean of weights on every rank, read from tensors that were listed before they were gathered.
        with GatheredParameters(parameters), torch.no_grad():
            now = [parameter.clone() for parameter in parameters]
        kept = now if kept is None else [0.9 * old + 0.1 * new for old, new in zip(kept, now, strict=True)]
        # As text generation does it: each rank runs as often as it likes.
        with torch.no_grad(), GatheredParameters(parameters) if step else unwrap_model_for_generation(engine):
            for _ in range(1 + rank):
                found = engine.module(inputs, inputs.sum(1, keepdim=True))["loss"]
        tell(rank, step, mean(found))
        with GatheredParameters(engine.module.head.weight, modifier_rank=0):
            if "--changes" in sys.argv and step == 1 and rank == 0:
                engine.module.head.weight.data.zero_()
    if "--reads" in sys.argv:
        deepspeed.utils.safe_get_full_fp32_param(engine.module.head.weight)
    saved = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters([parameter]):
            if rank == 0:
                saved[name] = parameter.detach().cpu().clone()
    if rank == 0:
        assert all(type(value) is torch.Tensor for value in saved.values())
        tell(0, STEPS, sum(value.double().abs().sum().item() for value in saved.values()))
        tell(0, STEPS, sum(value.double().abs().sum().item() for value in kept))
    leave()


if __name__ == "__main__":
    main()
