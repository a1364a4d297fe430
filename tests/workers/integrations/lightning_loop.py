"""Lightning's Trainer over DDP, under a plan by the strategy that is registered for it."""

from __future__ import annotations

import os

import lightning
import torch
from common import STEPS, leave, loader, model, options, tell
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, batch, _):
        return self.model(**batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Tell(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, place):
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        tell(trainer.global_rank, trainer.global_step, loss.item())


def main():
    args = options()
    callbacks, strategy = [Tell()], DDPStrategy(process_group_backend="gloo")
    if args.plan:
        from paro_advise.runtime.integrations import lightning_trainer

        lightning_trainer.register()
        os.environ["PARO_ADVISE_PLAN"] = args.plan
        strategy = "paro_advise"
    if args.before:
        from paro_advise.runtime.integrations.lightning_trainer import ParoCallback

        callbacks.append(ParoCallback(args.folder, "4:6", plan=args.plan, before=args.before))
    elif args.folder:  # by Lightning's entry point, without a line in the script
        os.environ["PARO_CAPTURE"], os.environ["PARO_CAPTURE_STEPS"] = args.folder, "4:6"
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=STEPS, logger=CSVLogger(args.trackers) if args.folder else False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        gradient_clip_val=1.0, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Module(), loader(2))
    leave()


if __name__ == "__main__":
    main()
