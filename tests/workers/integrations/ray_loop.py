"""Ray Train's TorchTrainer with two workers over DDP."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import ray
import ray.train
from common import options, recording_of
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).parent)


def train(config):
    import torch
    import torch.distributed as dist

    sys.path.insert(0, HERE)
    from common import loader, model

    network = ray.train.torch.prepare_model(model())
    optimizer = torch.optim.AdamW(network.parameters(), lr=config["rate"])
    sampler = torch.utils.data.DistributedSampler(loader(2).dataset, shuffle=False)
    batches = torch.utils.data.DataLoader(sampler.dataset, batch_size=loader(2).batch_size, sampler=sampler)
    losses = []
    for batch in batches:
        loss = network(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main():
    args = options()
    function = train
    if args.folder:
        from paro_advise.runtime.integrations.ray_train import recorded

        function = recorded(partial(train), **recording_of(args))
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level=40, log_to_driver=False)
    result = TorchTrainer(
        function,
        train_loop_config={"rate": 1e-2},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="run", storage_path=args.trackers),
    ).fit()
    for step, loss in enumerate(result.return_value):
        print(f"LOSS {step} {loss!r}")
    ray.shutdown()


if __name__ == "__main__":
    main()
