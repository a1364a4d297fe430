"""DeepSpeed's engine with ZeRO-1; its own monitor writes CSV files."""

from __future__ import annotations

import deepspeed
import deepspeed.comm
import torch.distributed as dist
from common import BATCH, STEPS, Data, leave, model, options, recording_of, tell


def main():
    args = options()
    recording = None
    if args.folder:
        from paro_advise.runtime.integrations.deepspeed_engine import monitor_writer
        from paro_advise.runtime.integrations.recording import Recording

        recording = Recording(**recording_of(args))
        recording.start()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "csv_monitor": {"enabled": bool(args.folder), "output_path": f"{args.trackers}/csv", "job_name": "run"},
    }
    deepspeed.init_distributed("gloo")
    data = Data(STEPS * BATCH * 2)
    engine, _, batches, _ = deepspeed.initialize(model=model(), config=config, training_data=data)
    for step, batch in enumerate(batches):
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        tell(dist.get_rank(), step, mean.item() / dist.get_world_size())
    if recording is not None:
        recording.stop([monitor_writer(engine)])
    leave()


if __name__ == "__main__":
    main()
