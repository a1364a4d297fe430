"""One small training job twice: on one process that sees all the data, and under a strategy on all ranks.

Operations of ``differential_operations`` are written once against ``Job``, as a user would write them.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

from paro_advise.runtime import shard

VOCABULARY, WIDTH, LENGTH, BATCH = 13, 6, 5, 2


class BrokenOffError(Exception):
    """What a script's own code raises in the middle of a pass."""


class _Breaking(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, hidden):
        del ctx
        return hidden.clone()

    @staticmethod
    def backward(ctx, *gradients):
        raise BrokenOffError


@dataclass
class Output:
    """An output that no tree of tensors shows."""

    loss: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.breaks_in = ""
        self.is_left_out = False

    def forward(self, hidden):
        if self.is_left_out:
            return hidden
        if self.breaks_in == "forward":
            raise BrokenOffError
        if self.breaks_in == "backward":
            hidden = _Breaking.apply(hidden)
        return hidden + self.down(gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.output = "logits"

    def forward(self, tokens):
        hidden = self.embed(tokens[:, :-1])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        if self.output == "logits":
            return logits
        loss = loss_of(logits, tokens)
        if self.output == "none":
            self.kept = loss
            return None
        return {"dataclass": Output(loss), "dict": {"loss": loss, "name": "x"}, "list": [loss, None, 3.0]}[self.output]


def loss_of(logits, tokens):
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def data(number, rank):
    generator = torch.Generator().manual_seed(1000 + 10 * number + rank)
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    # Large: else the order of additions decides on steps where gradients are near zero.
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=5e-3, eps=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, eps=1e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=2e-3, eps=1e-2, momentum=0.5),
}


def make_optimizer(kind, model):
    matrices = [item for item in model.parameters() if item.dim() > 1]
    rest = [item for item in model.parameters() if item.dim() == 1]
    return OPTIMIZERS[kind]([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])


class Job:
    """A model and its optimizer; ``kept`` is for what operations remember."""

    is_planned = False

    def __init__(self, kind):
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = make_optimizer(kind, self.model)
        self.number = 0
        self.kept = {}

    @property
    def ranks(self):
        """The ranks whose data this process sees."""
        return range(dist.get_world_size())

    def next_losses(self):
        """Forward passes over the next micro-batch; mean over all ranks where several are here."""
        self.number += 1
        return [self._loss(data(self.number, rank)) / len(self.ranks) for rank in self.ranks]

    def _loss(self, tokens):
        found = self.model(tokens)
        match self.model.output:
            case "logits":
                return loss_of(found, tokens)
            case "dataclass":
                return found.loss
            case "none":
                return self.model.kept
            case "dict":
                return found["loss"]
            case _:
                return found[0]

    def backward(self, losses, scale=1.0):
        for loss in losses:
            (loss * scale).backward()

    def no_sync(self):
        """One process has nothing to synchronise."""
        return contextlib.nullcontext()

    def switch(self, strategy):
        """Nothing changes for one process."""

    def mean(self, value):
        return value

    def whole(self):
        return {name: item.detach().clone() for name, item in self.model.named_parameters()}


class PlannedJob(Job):
    """The same under a strategy, each rank with its own data."""

    is_planned = True

    def __init__(self, kind, strategy, group_size, **options):
        super().__init__(kind)
        self.model, self.optimizer = shard(self.model, self.optimizer, strategy, group_size=group_size, **options)

    @property
    def ranks(self):
        return [dist.get_rank()]

    def no_sync(self):
        return self.model.no_sync()

    def switch(self, strategy):
        from paro_advise.runtime import switch

        switch(self.model, strategy)

    def mean(self, value):
        total = torch.tensor(float(value), dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def whole(self):
        return {name: whole_of(item) for name, item in self.model.named_parameters()}


def whole_of(tensor):
    found = tensor.detach()
    return (found.full_tensor() if hasattr(found, "full_tensor") else found).clone()


def copy_of(state):
    return copy.deepcopy(state)
