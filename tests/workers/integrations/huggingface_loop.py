"""Hugging Face's Trainer over DDP; MLflow is its tracker."""

from __future__ import annotations

from common import BATCH, STEPS, Data, leave, model, options, recording_of, tell
from transformers import Trainer, TrainerCallback, TrainingArguments


class Tell(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            tell(args.process_index, state.global_step, logs["loss"])


def main():
    args = options()
    callbacks = [Tell()]
    if args.folder:
        from paro_advise.runtime.integrations.huggingface import ParoCallback

        callbacks.append(ParoCallback(**recording_of(args)))
    settings = TrainingArguments(
        output_dir=f"{args.trackers}/trainer", max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
        learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1, save_strategy="no", disable_tqdm=True,
        report_to="mlflow" if args.folder else "none", seed=0, data_seed=0, dataloader_num_workers=0,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(model=model(), args=settings, train_dataset=Data(1_000), callbacks=callbacks)
    trainer.train()
    leave()


if __name__ == "__main__":
    main()
