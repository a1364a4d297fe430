"""A DDP script that makes programs of its model when it has trained, and prints what each makes of one input.

    model_programs.py MAKER [penalty]

MAKER: script (TorchScript) or export (``torch.export``). Rank 0 makes it alone. With ``penalty`` the loss holds the
gradient of a convolution's output with respect to its input.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

SHAPE = (4, 2, 6)


Count = int


class Pair:
    def __init__(self, first: Count, second: int) -> None:
        self.first: int = first
        self.second: int = second


def program_of(maker, model, inputs):
    if maker == "script":
        return torch.jit.script(obj=model)
    return torch.export.export(mod=model, args=(inputs,)).module()


def main():
    maker, penalizes = sys.argv[1], "penalty" in sys.argv[2:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv1d(4, 1, 3, padding=1))
    job = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(job.parameters(), lr=1e-2)
    for step in range(3):
        inputs = torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        found = job(inputs)
        loss = found.square().mean()
        if penalizes:
            (slope,) = torch.autograd.grad(found.sum(), inputs, create_graph=True)
            loss = loss + slope.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    gradient = model[0].weight.grad.sum().item()
    first = torch.jit.script(Pair)(1, 2).first  # a class whose names are looked up where it is scripted
    assert first == 1
    if rank == 0:
        model.eval()
        inputs = torch.ones(SHAPE)
        program = program_of(maker, model, inputs)
        with torch.no_grad():
            print(f"{program(inputs).sum().item():.6f} {model(inputs).sum().item():.6f}", flush=True)
        # Parameters are shared, as torch shares them.
        if maker == "script":
            with torch.no_grad():
                model[2].bias.add_(1.0)
                print(f"{program(inputs).sum().item():.6f}", flush=True)
    dist.barrier()
    assert model[0].weight.grad.sum().item() == gradient
    sys.stdout.flush()
    os._exit(0)  # plain DDP hangs now and then where it is taken down after torch.jit.script


if __name__ == "__main__":
    main()
