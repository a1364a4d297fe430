"""Two models that train each other, as a GAN does, each with its optimizer; both saved by rank 0 alone with DDP.

Arguments: the folder of checkpoints, and words: "fsdp2" shards both with FSDP2 instead, "toggle" takes the gradients
of the one off while the other trains, "accumulate" makes two micro-batches a step, "resume" goes on from the
checkpoint, "shared" gives the second model a layer of the first.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

NOISE, WIDTH, DATA, BATCH, STEPS, SAVED_AFTER = 6, 24, 10, 4, 4, 2


def layers(first, last):
    return nn.Sequential(
        nn.Sequential(nn.Linear(first, WIDTH), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.2)),
        nn.Linear(WIDTH, last),
    )


def draw(number, width):
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(BATCH, width, generator=generator)


def says(critic, samples, *, real):
    found = critic(samples)
    return binary_cross_entropy_with_logits(found, torch.full_like(found, float(real)))


def wrapped(raw, words):
    if "fsdp2" not in words:
        return DistributedDataParallel(raw)
    for part in raw[:-1]:
        fully_shard(part)
    return fully_shard(raw)


def accumulating(model, *, last):
    if last:
        return contextlib.nullcontext()
    if hasattr(model, "no_sync"):
        return model.no_sync()

    @contextlib.contextmanager
    def unsynchronized():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    return unsynchronized()


def let_train(model, words, *, trains):
    if "toggle" in words:
        for parameter in model.parameters():
            parameter.requires_grad = trains


def train(generator, critic, optimizers, step, words):
    count = 2 if "accumulate" in words else 1
    total = torch.zeros(2)
    let_train(critic, words, trains=True)
    for micro in range(count):
        place = 10 * step + 2 * micro
        with torch.no_grad():
            made = generator(draw(place, NOISE))
        with accumulating(critic, last=micro == count - 1):
            loss = (says(critic, draw(place + 1, DATA), real=True) + says(critic, made, real=False)) / count
            loss.backward()
        total[0] += loss.detach()
    optimizers[1].step()
    optimizers[1].zero_grad()
    let_train(critic, words, trains=False)
    for micro in range(count):
        with accumulating(generator, last=micro == count - 1):
            loss = says(critic, generator(draw(10 * step + 2 * micro, NOISE)), real=True) / count
            loss.backward()
        total[1] += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(generator.parameters(), 0.5)
    optimizers[0].step()
    optimizers[0].zero_grad()
    critic.zero_grad()
    dist.all_reduce(total)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return [*total.tolist(), norm.item()]


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    raw = layers(NOISE, DATA), layers(DATA, 1)
    if "shared" in words:
        raw[1][1] = raw[0][1]
    first = 0
    if "resume" in words:
        first = SAVED_AFTER
        states = torch.load(folder / "both.pt")
    models = [wrapped(item, words) for item in raw]
    owned = [[*model.parameters()] for model in models]
    if "shared" in words:
        owned[0] = owned[0][:2]
    optimizers = [torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3) for parameters in owned]
    if "resume" in words:
        for item, state in zip([*models, *optimizers], states, strict=True):
            item.load_state_dict(state)
    for step in range(first, STEPS):
        numbers = train(*models, optimizers, step, words)
        if dist.get_rank() == 0:
            print(step, *(f"{number:.9e}" for number in numbers), flush=True)
        if step == SAVED_AFTER - 1 and "fsdp2" not in words and dist.get_rank() == 0:
            torch.save([item.state_dict() for item in [*models, *optimizers]], folder / "both.pt")
            with torch.no_grad():
                print(f"{models[1](models[0](draw(7, NOISE))).mean().item():.9e}", flush=True)
    # DDP's reducer, were it the last to hold the group, would wait for gloo's thread without letting go of the
    # interpreter's lock, for which that thread waits if it is still to free the tensor of the last all-reduce.
    del models
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
