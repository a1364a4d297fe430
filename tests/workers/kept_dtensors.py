"""An FSDP2 script clips gradients and puts a mean of weights in place that it keeps since before the first step.

Prints what the model's weights add up to, under the mean and after it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STEPS = 3


def weights_of(model):
    return [float(value.full_tensor().double().abs().sum()) for value in model.state_dict().values()]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mean = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found = []
    for step in range(STEPS):
        values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(values).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean[name].lerp_(parameter, 0.5)
    with torch.no_grad():
        kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.copy_(mean[name])
        found += weights_of(model)
        for name, parameter in model.named_parameters():
            parameter.copy_(kept[name])
            parameter.add_(mean[name], alpha=0.25)
        found += weights_of(model)
    if dist.get_rank() == 0:
        print("sums|" + " ".join(f"{value:.9e}" for value in found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
