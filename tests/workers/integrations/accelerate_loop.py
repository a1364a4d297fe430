"""A loop of accelerate's over DDP; TensorBoard is its tracker, beside ours."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from common import leave, loader, model, options, recording_of, tell


def main():
    args = options()
    trackers = []
    if args.folder:
        from paro_advise.runtime.integrations.accelerator import ParoTracker

        trackers = [ParoTracker(**recording_of(args)), "tensorboard"]
    accelerator = Accelerator(cpu=True, log_with=trackers or None, project_dir=args.trackers)
    if trackers:
        accelerator.init_trackers("run")
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    network, optimizer, batches = accelerator.prepare(network, optimizer, loader(accelerator.num_processes))
    for step, batch in enumerate(batches):
        with accelerator.accumulate(network):
            loss = network(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.log({"loss": mean}, step=step)
        tell(accelerator.process_index, step, mean)
    accelerator.end_training()
    leave()


if __name__ == "__main__":
    main()
