"""A Trainer that spawns its ranks: callbacks travel to other processes."""

from __future__ import annotations

import gc

import lightning
import torch
import torch.distributed as dist
from common import STEPS, loader, model
from lightning.pytorch.strategies import DDPStrategy


class Leaving(DDPStrategy):
    """Takes the ranks' group down: gloo's threads abort some processes that end with it (torch 2.13)."""

    def teardown(self):
        super().teardown()
        gc.collect()
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=Leaving(start_method="spawn"), max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader(2))
    print("fitted")
