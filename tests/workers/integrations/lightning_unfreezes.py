"""A Trainer whose callback gives an optimizer more layers in the second epoch."""

from __future__ import annotations

import warnings

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from torch import nn

warnings.simplefilter("ignore")


class Unfreezing(BaseFinetuning):
    def freeze_before_training(self, module):
        self.freeze(module.body)

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.body, optimizer=optimizer)


class Telling(Callback):
    def on_train_epoch_end(self, *_):
        print("trained", flush=True)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def training_step(self, batch, _):
        return self.head(self.body(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([item for item in self.parameters() if item.requires_grad], lr=0.1)


torch.manual_seed(0)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), batch_size=4)
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=2,
    strategy="ddp_find_unused_parameters_true",
    callbacks=[Unfreezing(), Telling()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), data)
