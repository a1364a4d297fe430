"""Models in which layers, or weights of layers, stand in several places, a small job each, one after the other.

Arguments: "ddp", "fsdp1" or "fsdp2". Prints the name of each job with its numbers, or with what refused it.
"""

from __future__ import annotations

from script_habits import Blocks, main, train
from torch import nn


def one_block_many_times():
    """Return a model that runs one block three times, as ALBERT does."""
    return Blocks([nn.Linear(24, 24)] * 3)


def other_name():
    """Return a model in which a block has another name beside its place in the list."""
    model = Blocks()
    model.again = model.blocks[0]
    return model


class Inside(Blocks):
    """A model that runs a layer of one of its blocks by itself."""

    def __init__(self):
        super().__init__([nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2)])
        self.inner = self.blocks[0][0]

    def forward(self, values):
        return super().forward(values) + self.last(self.inner(self.first(values)))


def tied_blocks():
    """Return a model with two blocks that share a weight."""
    model = Blocks()
    model.blocks[1].weight = model.blocks[0].weight
    return model


def jobs(framework):
    models = {"runs a block thrice": one_block_many_times, "has a block by two names": other_name}
    if framework != "fsdp2":  # which shards layers that the test picks
        models |= {"runs a layer of a block": Inside, "ties blocks": tied_blocks}
    for name, model in models.items():
        yield name, lambda model=model: train(model(), framework)


if __name__ == "__main__":
    main(jobs)
