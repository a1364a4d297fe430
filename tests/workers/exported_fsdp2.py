"""Runs the exported FSDP2 code of every strategy that has some: gradients equal those of one process."""

from __future__ import annotations

import copy
import gc
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from paro_advise.policies.frameworks.model import Fidelity, Target
from paro_advise.policies.frameworks.registry import export, exports_of
from paro_advise.policies.strategy import KEPT

MICRO_BATCHES = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, values):
        for block in self.blocks:
            values = block(values)
        return self.head(values)


def inputs(rank, micro):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * rank + micro))


def expected(first):
    """Return the gradients of the mean over all ranks, as one process computes them."""
    model, world = copy.deepcopy(first), dist.get_world_size()
    for rank in range(world):
        for micro in range(MICRO_BATCHES):
            (model(inputs(rank, micro)).square().sum() / world).backward()
    return [parameter.grad for parameter in model.parameters()]


def check(triple, first):
    world = dist.get_world_size()
    made = export("fsdp2", Target(triple=triple, group_size=2, world_size=world, micro_batches=MICRO_BATCHES))
    module = {}
    exec(compile(made.text, "exported", "exec"), module)
    model = copy.deepcopy(first)
    shards = triple != "NNN"
    own = {"device": "cpu", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}
    model = module["apply"](model, model.blocks, **own) if shards else module["apply"](model)
    if "gather_by_copy_engines" in module:
        # NCCL's; here only that every sharded module is asked, in words that this torch knows.
        with mock.patch.object(FSDPModule, "set_symm_mem_for_comm", autospec=True) as asked:
            module["gather_by_copy_engines"](model)
        assert asked.call_count == len(model.blocks) + 1
    for micro in range(MICRO_BATCHES):
        is_last = micro == MICRO_BATCHES - 1
        for name in ("before_backward", "hold_gradients"):
            if name in module:
                module[name](model, is_last)
        output = model(inputs(dist.get_rank(), micro))
        assert output.dtype == (torch.float64 if shards else torch.float32)
        # As fully_shard leaves it by itself, and as predictions count: the root is not gathered again for backward.
        assert not isinstance(model.head.weight if shards else model.module.head.weight, DTensor)
        output.square().sum().backward()
    found = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    for gradient, wanted in zip(found, expected(first), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    first = Model()
    for strategy in KEPT:
        if exports_of(strategy, "native")["fsdp2"] == Fidelity.UNSUPPORTED:
            continue
        check(str(strategy), first)
        if dist.get_rank() == 0:
            print("trained", strategy, flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
