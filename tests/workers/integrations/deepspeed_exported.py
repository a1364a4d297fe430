"""What scripts and libraries ask of DeepSpeed's engine to save a model of which a part is frozen: in the given stage.

Its settings, the whole state in 16 bits that accelerate and transformers save at ZeRO-3, a file of it, and a checkpoint
without what is frozen, below ZeRO-3 into a model whose
frozen part has changed since.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell

STEPS = 2
STAGE = int(sys.argv[1])
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "steps_per_print": 10**9,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": STAGE,
        "stage3_gather_16bit_weights_on_model_save": True,
        "stage3_param_persistence_threshold": 0,
        "reduce_bucket_size": 12345,
    },
}


def tell_settings(engine):
    tell(dist.get_rank(), 0, float(engine.zero_gather_16bit_weights_on_model_save()))
    tell(dist.get_rank(), 0, float(engine.zero_optimization_partition_weights()))
    tell(dist.get_rank(), 0, float(engine.zero_optimization_partition_gradients()))
    tell(dist.get_rank(), 0, float(engine.zero_reduce_bucket_size()))
    tell(dist.get_rank(), 0, float(engine.zero_cpu_offload()))
    tell(dist.get_rank(), 0, float(engine.wall_clock_breakdown()))
    assert engine.optimizer_name() == "SGD"
    for absent in ("no_such_setting", "_mixed_precision_dtypes_", "no_such_attribute"):
        assert not hasattr(engine, absent)


def tell_state(state, names):
    if dist.get_rank() == 0:
        assert list(state) == names
        for value in state.values():
            assert type(value) is torch.Tensor
            tell(0, STEPS, float(value.double().abs().sum()))


def step(engine, number):
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    loss = engine(inputs, inputs.sum(1, keepdim=True))["loss"]
    engine.backward(loss)
    engine.step()
    tell(dist.get_rank(), number, mean(loss))


def main():
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(trained, lr=0.05, momentum=0.9), config=CONFIG
    )[0]
    tell_settings(engine)
    for number in range(STEPS):
        step(engine, number)
    if STAGE == 3:
        tell_state(engine._consolidated_16bit_state_dict(), names)
        tell_state(engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True), names[1:])
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    tell(dist.get_rank(), STEPS, float(engine.save_16bit_model(shared[0], "model.bin", exclude_frozen_parameters=True)))
    if dist.get_rank() == 0:
        tell_state(torch.load(Path(shared[0]) / "model.bin"), names[1:])
    engine.save_checkpoint(shared[0], tag="kept", exclude_frozen_parameters=True)
    if STAGE < 3:
        with torch.no_grad():
            next(iter(engine.module.parameters())).mul_(0.5)
    step(engine, STEPS)
    engine.load_checkpoint(shared[0], tag="kept", load_module_strict=False)
    step(engine, STEPS + 1)
    leave()


if __name__ == "__main__":
    main()
