"""Scripts that keep FSDP2's parameters gathered behind backward passes, a small job each, one after the other.

Argument: "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

import io

import torch
from script_habits import STEPS, adamw, main, mean, values_of, whole
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Model(nn.Module):
    """Layers, and a head that may be called apart."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(2)])
        self.head = nn.Linear(16, 8)

    def forward(self, values, *, to_head=True):
        found = self.layers(values).tanh()
        return self.head(found) if to_head else found


def trained(backward_of, *, policy=None, after_step=lambda _: None):
    """Train with clipping; tell losses, norms and weights."""
    torch.manual_seed(0)
    model, settings = Model(), {"mp_policy": policy} if policy else {}
    for part in (*model.layers, model.head, model):
        fully_shard(part, **settings)
    optimizer, found = adamw(model.parameters()), []
    for step in range(STEPS):
        found.append(mean(backward_of(model, values_of(step, same=False))))
        found.append(float(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.05))))
        optimizer.step()
        after_step(model)
        optimizer.zero_grad()
    return [*found, *(float(whole(value).double().abs().sum()) for value in model.state_dict().values())]


def frees_by_hand(model, values):
    model.head.set_reshard_after_backward(False)
    loss = model(values).float().square().mean()
    loss.backward()
    model.head.reshard()
    return loss.item()


def goes_back_by_chunks(model, values):
    """The head stays gathered for all chunks of a batch, each of which goes back on its own."""
    hidden, head = model(values, to_head=False), model.head
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.chunk(2)]
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    total = 0.0
    for number, chunk in enumerate(chunks):
        head.set_requires_gradient_sync(number == len(chunks) - 1, recurse=False)
        loss = head(chunk).float().square().mean()
        loss.backward()
        total += loss.item()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.reshard()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks]).to(hidden.dtype))
    return total


def keeps_gathered(model, values):
    model.set_reshard_after_backward(False)
    loss = model(values).float().square().mean()
    loss.backward()
    return loss.item()


def keeps_until_the_last(model, values):
    """Of two micro-batches; the last one frees."""
    total = 0.0
    for number, part in enumerate(values.chunk(2)):
        model.set_requires_gradient_sync(number == 1)
        model.set_reshard_after_backward(number == 1)
        loss = model(part).square().mean()
        loss.backward()
        total += loss.item()
    return total


def saves_its_rows(model):
    """Each rank saves what it holds, and reads it again."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for name, value in torch.load(file, weights_only=False).items():
        assert torch.equal(value.to_local(), model.state_dict()[name].to_local())


def jobs(_):
    yield "frees by hand", lambda: trained(frees_by_hand)
    yield "goes back by chunks", lambda: trained(goes_back_by_chunks)
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    yield "goes back by chunks in bf16", lambda: trained(goes_back_by_chunks, policy=bf16)
    yield "keeps until the last", lambda: trained(keeps_until_the_last)
    yield "saves its rows", lambda: trained(frees_by_hand, after_step=saves_its_rows)
    yield "keeps gathered", lambda: trained(keeps_gathered)


if __name__ == "__main__":
    main(jobs)
