"""Lightning with the mean of weights over the last epochs: trained, then validated by the same trainer."""

from __future__ import annotations

import lightning
import torch
from common import leave, loader, model, tell
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.strategies import DDPStrategy

EPOCHS = 3


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, batch, place):
        loss = self.model(**batch)["loss"]
        if place == 0:
            mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
            tell(self.global_rank, self.current_epoch, mean.item())
        return loss

    def validation_step(self, batch, _):
        self.log("loss", self.model(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    trainer = lightning.Trainer(
        accelerator="cpu", devices=4, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=EPOCHS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)],
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader(4))
    (found,) = trainer.validate(module, loader(4), verbose=False)
    tell(trainer.global_rank, EPOCHS, found["loss"])
    leave()


if __name__ == "__main__":
    main()
