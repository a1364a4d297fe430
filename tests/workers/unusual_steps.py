"""FSDP2 steps in orders that few scripts have: where gradients are dropped, looked at or made twice."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args


class Container(torch.optim.Optimizer):
    """Optimizers that step together, as torchtitan keeps them: an optimizer itself, over all their parameters."""

    def __init__(self, optimizers, parameters):
        self.optimizers = optimizers
        super().__init__(parameters, {"lr": 1.0})

    def step(self, *args):
        for optimizer in self.optimizers:
            optimizer.step(*args)

    def zero_grad(self, *args):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args)


class Script:
    """A model, its optimizer, and the parameters as a script remembers them at its start."""

    def __init__(self, args):
        self.args = args
        self.model = make_model(args)
        for block in self.model.blocks:
            fully_shard(block)
        # Else FSDP2 computes with the root of before the step after a validation pass.
        fully_shard(self.model, reshard_after_forward=True)
        self.remembered = list(self.model.parameters())
        self.optimizer = Container([torch.optim.SGD(self.remembered, lr=0.05, momentum=0.9)], self.remembered)
        self.step = 0

    def loss(self, micro=0):
        return loss_of(self.model, batch(self.args, self.step, micro, dist.get_rank()))

    def usual(self):
        self.optimizer.zero_grad()
        for micro in range(2):
            self.loss(micro).backward()
        self.finish()

    def zero_grad_between_forward_and_backward(self):
        for micro in range(2):
            loss = self.loss(micro)
            if micro == 0:
                self.optimizer.zero_grad()
            loss.backward()
        self.finish()

    def validation_between_backward_and_step(self):
        self.optimizer.zero_grad()
        for micro in range(2):
            self.loss(micro).backward()
        self.model.eval()
        with torch.no_grad():
            self.loss(7)
        self.model.train()
        self.finish()

    def two_forwards_then_two_backwards(self):
        self.optimizer.zero_grad()
        first, second = self.loss(0), self.loss(1)
        first.backward()
        second.backward()
        self.finish()

    def only_the_blocks_are_told(self):
        """Inner passes are told to the blocks alone, since the root holds little."""
        self.optimizer.zero_grad()
        for micro in range(2):
            for block in self.model.blocks:
                block.set_requires_gradient_sync(micro == 1)
            self.loss(micro).backward()
        self.finish()

    def closure(self):
        def closure():
            self.optimizer.zero_grad()
            for micro in range(2):
                loss = self.loss(micro)
                loss.backward()
            return loss

        self.optimizer.step(closure)
        self.tell("without clipping")

    def skipped(self):
        """As when a loss is not a number: the gradients are dropped and no step is made."""
        self.loss().backward()
        self.optimizer.zero_grad()
        self.tell("skipped")

    def finish(self):
        norm = clip_grad_norm_(self.remembered, 0.5).full_tensor()
        self.optimizer.step()
        self.tell(f"{norm.item():.9e}")

    def tell(self, what):
        with torch.no_grad():
            loss = self.loss(9)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"{self.step} {what} {loss.item():.9e}", flush=True)
        self.step += 1


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    script = Script(args)
    for do in (
        script.usual,
        script.zero_grad_between_forward_and_backward,
        script.usual,
        script.validation_between_backward_and_step,
        script.two_forwards_then_two_backwards,
        script.skipped,
        script.usual,
        script.closure,
        script.only_the_blocks_are_told,
        script.usual,
    ):
        do()
    # Plain torch 2.13 with gloo aborts at exit in half of the runs where the model is still there.
    del script, do
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
