"""What scripts do around DeepSpeed's engine, at the stage of ZeRO that is given.

They accumulate by ``loss.backward()``, drop gradients before each pass, meet infinite gradients in a step, and take more
micro-batches a step from some step on.
"""

from __future__ import annotations

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from common import BATCH, WIDTH, Model, leave, mean, tell

STEPS, MICRO_BATCHES = 4, 2
STAGE = int(sys.argv[1])
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
}


class WithOutputs(Model):
    """Returns what the loss is made of as well, as transformers do."""

    def forward(self, inputs, labels):
        hidden = inputs
        for block in self.blocks:
            hidden = block(hidden)
        found = self.head(hidden)
        return {"loss": torch.nn.functional.mse_loss(found, labels), "logits": found}


def passes(engine):
    """Yield (number of the pass, loss of this rank) for each micro-batch."""
    rank = dist.get_rank()
    for number in range(STEPS * MICRO_BATCHES):
        inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
        yield number, engine(inputs, inputs.sum(1, keepdim=True))["loss"]


def made(kind):
    torch.manual_seed(0)
    return deepspeed.initialize(model=kind(), config=CONFIG)[0]


def main():
    deepspeed.init_distributed("gloo")
    rank = dist.get_rank()
    engine = made(WithOutputs)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    for number, loss in passes(engine):
        loss.backward()
        engine.step()
        tell(rank, number, mean(loss))
        tell(rank, number, float(engine.get_global_grad_norm() or 0.0))  # AdamW steps alike whatever scales gradients
    engine = made(Model)
    for number, loss in passes(engine):
        engine.zero_grad()
        returned = engine.backward(loss)
        engine.step()
        tell(rank, number, mean(returned))
    engine = made(Model)
    for number, loss in passes(engine):
        engine.backward(loss * float("inf") if number == 3 and rank == 0 else loss)
        engine.step()
        tell(rank, number, mean(loss))
        tell(rank, number, engine.skipped_steps + 10 * engine.global_steps)
        tell(rank, number, min(float(engine.get_global_grad_norm() or 0.0), 1e9))
        scaled = engine.optimizer
        tell(rank, number, scaled.overflow + 10 * scaled.loss_scale + 100 * scaled.cur_scale)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], tag="skipped")
    loaded = made(Model)
    loaded.load_checkpoint(folder[0], tag="skipped")
    tell(rank, number, loaded.skipped_steps + 10 * loaded.global_steps)
    engine = made(Model)
    for number, loss in passes(engine):
        engine.backward(loss)
        engine.step()
        if number == MICRO_BATCHES - 1:
            engine.set_train_batch_size(3 * BATCH * dist.get_world_size())
        tell(rank, number, mean(loss))
        tell(rank, number, engine.global_steps + 10 * engine.gradient_accumulation_steps())
    leave()


if __name__ == "__main__":
    main()
