"""Features of PyTorch under strategies, each against one process that sees all the data."""

from __future__ import annotations

import functools
import gc
import sys

import torch
import torch.distributed as dist
from sharding_worker import (
    Model,
    compare,
    compare_parameters,
    fill,
    optimizer_of,
    train_sharded,
    train_single,
    whole_parameters,
)
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from paro_advise.runtime import shard, switch

STEPS = range(4)
STRATEGIES = ("NNN", "NIG", "III", "IIG", "ING", "GIG", "GGG")


def plain():
    torch.manual_seed(0)
    return Model()


def checkpointed(selective=False, use_reentrant=False):
    model = plain()
    for block in model.blocks:
        inner = block.forward
        context = {}
        if selective:
            keep = [torch.ops.aten.addmm.default]
            context["context_fn"] = functools.partial(create_selective_checkpoint_contexts, keep)
        block.forward = functools.partial(checkpoint, inner, use_reentrant=use_reentrant, **context)
    return model


def compiled():
    model = plain()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def tied():
    torch.manual_seed(0)
    return Model(tied=True)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.a.t() @ self.b.t()


def lora():
    model = plain().requires_grad_(False)
    torch.manual_seed(1)
    for block in model.blocks:
        block.up, block.down = Lora(block.up), Lora(block.down)
    return model


class Conditional(Model):
    """Uses a parameter on some tokens only: on some ranks it often gets no gradient."""

    def __init__(self):
        super().__init__()
        self.blocks[0].extra = nn.Parameter(torch.ones(16))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for place, block in enumerate(self.blocks):
            block.use_extra = place == 0 and bool(tokens[0, 0] % 2)
            hidden = block(hidden)
        return self.head(self.norm(hidden)) * self.scale


def conditional():
    torch.manual_seed(0)
    model = Conditional()
    block = model.blocks[0]
    plain_forward = block.forward
    block.forward = lambda hidden: plain_forward(hidden) * (block.extra if block.use_extra else 1.0)
    return model


def check(label, make, kind="adamw", tolerance=1e-6, strategies=STRATEGIES, **options):
    reference = make()
    wanted = train_single(reference, kind, STEPS)
    for strategy in strategies:
        model = make()
        model, optimizer = shard(model, optimizer_of(kind, model), strategy, group_size=2, **options)
        compare(f"{label} {strategy}", train_sharded(model, optimizer, STEPS), wanted, tolerance)
        compare_parameters(f"{label} {strategy}", whole_parameters(model), dict(reference.named_parameters()), 1e-6)
        if dist.get_rank() == 0:
            print("equal", label, strategy, flush=True)


def mixed():
    """bf16 compute, fp32 masters and reduction: near the fp32 run, and equal among strategies."""
    wanted = train_single(plain(), "adamw", STEPS)
    found = {}
    for strategy in STRATEGIES:
        model = plain()
        model, optimizer = shard(
            model,
            optimizer_of("adamw", model),
            strategy,
            group_size=2,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
        found[strategy] = train_sharded(model, optimizer, STEPS)
        compare(f"mixed {strategy} near fp32", found[strategy], wanted, 2e-2)
        assert all(p.dtype == torch.bfloat16 for p in model.parameters())
        for group in optimizer.param_groups:
            assert all(p.dtype == torch.float32 for p in group["params"])
    for strategy, trace in found.items():
        compare(f"mixed {strategy} beside GGG", trace, found["GGG"], 2e-3)
    if dist.get_rank() == 0:
        print("equal mixed", flush=True)


def meta():
    """A model made without memory is filled unit by unit, alike on all ranks."""

    for strategy in STRATEGIES:
        with torch.device("meta"):
            model = Model()
        torch.manual_seed(7 + dist.get_rank())
        model, optimizer = shard(model, optimizer_of("adamw", model), strategy, group_size=2, init=fill)
        first = whole_parameters(model)
        for value in first.values():
            everyone = [torch.empty_like(value) for _ in range(dist.get_world_size())]
            dist.all_gather(everyone, value)
            assert all(torch.equal(value, other) for other in everyone)
            assert value.isfinite().all()
        reference = plain()
        reference.load_state_dict({**first, "scale": torch.full((1,), 0.5)})
        wanted = train_single(reference, "adamw", STEPS)
        compare(f"meta {strategy}", train_sharded(model, optimizer, STEPS), wanted, 1e-6)
    if dist.get_rank() == 0:
        print("equal meta", flush=True)


def scheduler_made_before():
    """A scheduler that was made before sharding still drives the optimizer."""
    wanted = train_single(plain(), "sgd", STEPS)
    for strategy in ("IIG", "NNG"):
        model = plain()
        optimizer = optimizer_of("sgd", model)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        model, same = shard(model, optimizer, strategy, group_size=2)
        assert same is optimizer
        compare(f"scheduler {strategy}", train_sharded(model, optimizer, STEPS, schedule), wanted, 1e-6)


def overlapped():
    """Updates that the next forward waits for change nothing."""
    wanted = train_single(plain(), "adamw", STEPS)
    for strategy in ("NIG", "NNI", "IIG", "NNG"):
        model = plain()
        model, optimizer = shard(model, optimizer_of("adamw", model), strategy, group_size=2, overlap_updates=True)
        compare(f"overlapped {strategy}", train_sharded(model, optimizer, STEPS), wanted, 1e-6)


def offloaded():
    """Optimizer states in the host's memory: the same numbers, also after a switch."""
    wanted = train_single(plain(), "adamw", range(6))
    for strategy, following in (("IIG", "NNG"), ("NNN", "GGG"), ("III", "NIG")):
        model = plain()
        model, optimizer = shard(model, optimizer_of("adamw", model), strategy, group_size=2, offload_optimizer=True)
        label = f"offloaded {strategy}"
        compare(label, train_sharded(model, optimizer, range(4)), wanted[:4], 1e-6)
        switch(model, following)
        compare(
            f"{label} {following}", train_sharded(model, optimizer, range(4, 6), constant(optimizer)), wanted[4:], 1e-6
        )
        for group in optimizer.param_groups:
            assert all(p.device.type == "cpu" and p.grad is None for p in group["params"])
        held = {storage_of(p).data_ptr() for p in model.parameters()}
        assert not held & {storage_of(p).data_ptr() for group in optimizer.param_groups for p in group["params"]}
    if dist.get_rank() == 0:
        print("equal offloaded", flush=True)


def constant(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0, total_iters=0)


def storage_of(parameter):
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).untyped_storage()


FEATURES = {
    "offloaded": offloaded,
    "checkpointed": lambda: check("checkpointed", checkpointed),
    "selective": lambda: check("selective", lambda: checkpointed(selective=True)),
    "compiled": lambda: check("compiled", compiled, strategies=("NNN", "NIG", "IIG", "GGG")),
    "tied": lambda: check("tied", tied),
    "lora": lambda: check("lora", lora),
    "fused": lambda: check("fused", plain, kind="fused"),
    "mixed": mixed,
    "meta": meta,
    "scheduler": scheduler_made_before,
    "overlapped": overlapped,
    "conditional": lambda: check("conditional", conditional),
}


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        FEATURES[name]()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
