"""What is left of gradients, and what rank 0 saves, in scripts around DeepSpeed: in the way that is given.

`cleared`: ZeRO-2, gradients are dropped by the optimizer before each micro-batch. `gathered`: ZeRO-3, what has a `ds_id` is
gathered before it is saved, as DeepSpeed-Chat does. `accelerate`: through accelerate, with accumulation; `accelerate-3`:
the same with ZeRO-3.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

STEPS, MICRO_BATCHES = 3, 2
WAY = sys.argv[1]
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "gradient_clipping": 0.5,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3 if WAY in ("gathered", "accelerate-3") else 2,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
    },
}


def batch(number):
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    return inputs, inputs.sum(1, keepdim=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained_by_engine():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config=CONFIG)
    for number in range(STEPS * MICRO_BATCHES):
        if WAY == "cleared":
            optimizer.zero_grad()
        loss = engine(*batch(number))["loss"]
        engine.backward(loss)
        engine.step()
        tell(dist.get_rank(), number, mean(loss))
    saved = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            absent = [parameter] if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE else []
            with deepspeed.zero.GatheredParameters(absent, enabled=bool(absent)):
                saved[name] = parameter.data.detach().clone().cpu()
        else:
            saved[name] = parameter.detach().cpu()
    return saved


def trained_by_accelerate():
    os.environ.update(ACCELERATE_USE_CPU="false", ACCELERATE_USE_DEEPSPEED="true")
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    torch.manual_seed(0)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    model = Model()
    model, optimizer = accelerator.prepare(model, sgd(model))
    for number in range(STEPS * MICRO_BATCHES):
        with accelerator.accumulate(model):
            loss = model(*batch(number))["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        tell(dist.get_rank(), number, mean(loss))
    assert isinstance(accelerator.unwrap_model(model), Model)
    return accelerator.get_state_dict(model)


def main():
    saved = trained_by_accelerate() if WAY.startswith("accelerate") else trained_by_engine()
    if dist.get_rank() == 0:
        assert list(saved) == [name for name, _ in Model().named_parameters()]
        for value in saved.values():
            assert type(value) is torch.Tensor
            tell(0, STEPS, float(value.double().abs().sum()))
    dist.barrier()
    leave()


if __name__ == "__main__":
    main()
