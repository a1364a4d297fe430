"""What scripts do to models, gradients and optimizers by hand, under strategies and on one process."""

from __future__ import annotations

import copy
import gc
import io
import os
import shutil
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from sharding_worker import Keeper, Model, compare_parameters, data, fill, loss_of, whole_parameters
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import DivergedError, UsageError
from paro_advise.runtime import load_checkpoint, save_checkpoint, shard, stream_state_dict, switch

STRATEGIES = ("NNN", "NNI", "NNG", "NIG", "III", "IIG", "ING", "GIG", "GGG")


def fresh(tied=False):
    torch.manual_seed(0)
    return Model(tied=tied)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def one_pass(model, step):
    """Gradients of the mean over all ranks: on the plain model from all data, else from this rank's."""
    ranks = range(dist.get_world_size()) if type(model) is Model else [dist.get_rank()]
    for rank in ranks:
        (loss_of(model, data(step, 0, rank)) / len(ranks)).backward()


def both(do, make_optimizer=sgd, strategies=STRATEGIES, tolerance=1e-6, group_size=1, **options):
    """Run something on the plain model and under strategies; all parameters must be equal in the end."""
    plain = fresh()
    do(plain, make_optimizer(plain), plain.parameters)
    for strategy in strategies:
        model = fresh()
        remembered = list(model.parameters())
        model, optimizer = shard(model, make_optimizer(model), strategy, group_size=group_size, **options)
        do(model, optimizer, lambda kept=remembered: kept)
        compare_parameters(
            f"{do.__name__} {strategy}", whole_parameters(model), dict(plain.named_parameters()), tolerance
        )


def mean_of_weights(model, optimizer, remembered):
    """A mean over plain copies of the weights, kept from the start and put in their place, as DINO and DiT do."""
    mean = {name: value.clone() for name, value in fresh().named_parameters()}
    for step in range(3):
        one_pass(model, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean[name].mul_(0.9).add_(parameter.data, alpha=0.1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mean[name].detach())
    one_pass(model, 3)
    optimizer.step()


def remembered_parameters(model, optimizer, remembered):
    """Parameters that were listed before sharding: decay, clipping and clearing by hand."""
    parameters = list(remembered())
    for step in range(3):
        one_pass(model, step)
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad.add_(parameter, alpha=0.01)
            norm = sum(float(parameter.grad.norm()) ** 2 for parameter in parameters) ** 0.5
            for parameter in parameters:
                parameter.grad.mul_(min(1.0, 0.2 / norm))
        optimizer.step()
        for parameter in parameters:
            parameter.data.mul_(0.999)
            parameter.grad = None


def single_values(model, optimizer, remembered):
    """``.item()``, ``bool()``, ``max`` and ``torch.equal`` of gradients are those of the whole ones."""
    one_pass(model, 0)
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    total = sum(parameter.grad.double().sum().item() for parameter in model.parameters())
    if torch.stack([torch.isfinite(parameter.grad).all() for parameter in model.parameters()]).all() and total > -100:
        for parameter in model.parameters():
            parameter.grad.mul_(1.0 + largest + total)
    optimizer.step()


def own_gradients(model, optimizer, remembered):
    """Plain whole tensors are added to gradients and put in their place."""
    for step in range(2):
        one_pass(model, step)
        for parameter in model.parameters():
            noise = torch.full(parameter.shape, 0.01)
            parameter.grad.add_(noise)
            parameter.grad.data = parameter.grad.data * 0.5
        optimizer.step()
        optimizer.zero_grad()


def other_divisors(model, optimizer, remembered):
    """Sums of gradients divided by 4 instead of the number of ranks, block by block and in the root."""
    if type(model) is not Model:
        for module in (*model.blocks, model):
            module.set_gradient_divide_factor(4.0)
    for step in range(2):
        one_pass(model, step)
        if type(model) is Model:
            for parameter in model.parameters():
                parameter.grad.mul_(dist.get_world_size() / 4.0)
        optimizer.step()
        optimizer.zero_grad()


def own_methods(model, optimizer, remembered):
    """A loss through a method that is not ``forward``, in two backward passes that both are boundaries."""
    ranks = range(dist.get_world_size()) if type(model) is Model else [dist.get_rank()]
    for step in range(2):
        for micro in range(2):
            for rank in ranks:
                logits = Model.forward(model, data(step, micro, rank)[:, :-1])
                (logits.square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_and_validated(model, optimizer, remembered):
    """Blocks are compiled; a validation pass comes between backward and step, and gradients are there after it."""
    del remembered
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for step in range(2):
        one_pass(model, step)
        model.eval()
        with torch.no_grad():
            loss_of(model, data(step, 1, 0))
        model.train()
        assert all(parameter.grad is not None for parameter in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def given_state(model, optimizer, remembered):
    """See ``state_before``."""
    for step in range(2):
        one_pass(model, step)
        optimizer.step()
        optimizer.zero_grad()


def with_state(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    torch.manual_seed(3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.randn(parameter.shape) * 0.1,
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    return optimizer


def state_before():
    """An optimizer that was resumed before the model is sharded goes on from there."""
    both(given_state, with_state)


def other_optimizers():
    """Those that DTensor has no rule for."""
    for make in (
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        lambda model: torch.optim.Adagrad(model.parameters(), fused=True, eps=1e-3),
        lambda model: torch.optim.Rprop(model.parameters(), foreach=False),
    ):
        both(given_state, make, strategies=("NNG", "IIG", "GGG"))


def memory_formats():
    """Parameters that are not contiguous train as in DDP, under fused optimizers too; FSDP2 refuses them."""

    def images():
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 16, 6)
        model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        model[3].weight.data = model[3].weight.detach().t().contiguous().t()
        assert not any(layer.weight.is_contiguous() for layer in (model[0], model[3]))
        return model

    def train(model, optimizer, ranks):
        for step in range(3):
            for rank in ranks:
                generator = torch.Generator().manual_seed(10 * step + rank)
                seen = torch.randn(2, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
                (model(seen).pow(2).mean() / len(ranks)).backward()
            optimizer.step()
            optimizer.zero_grad()

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)

    plain = images()
    train(plain, adamw(plain), range(dist.get_world_size()))
    for strategy in STRATEGIES:
        model = images()
        model, optimizer = shard(model, adamw(model), strategy, group_size=1)
        train(model, optimizer, [dist.get_rank()])
        compare_parameters(f"formats {strategy}", whole_parameters(model), dict(plain.named_parameters()), 1e-6)


def made_whole():
    """Gradients and states of the optimizer that are sharded in groups and over all ranks, by torch's own means."""
    plain = fresh()
    rule = sgd(plain)
    one_pass(plain, 0)
    rule.step()
    expected = dict(plain.named_parameters())
    for strategy in ("NNG", "NIG", "IIG", "ING", "IGG", "GIG", "GGG"):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2)
        one_pass(model, 0)
        gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
        compare_parameters(f"{strategy} gradients", gradients, {n: p.grad for n, p in expected.items()}, 1e-6)
        optimizer.step()
        shards = optimizer.state_dict()["state"]
        momenta = {name: whole(shards[name]["momentum_buffer"]) for name in expected}
        compare_parameters(
            f"{strategy} states", momenta, {n: rule.state[p]["momentum_buffer"] for n, p in expected.items()}, 1e-6
        )


def reads_on_two_meshes():
    """Single values of tensors on meshes that hold the same ranks in other orders, each at a line of its own."""
    grouped, world = fresh(), fresh()
    grouped, _ = shard(grouped, sgd(grouped), "IIG", group_size=2)
    world, _ = shard(world, sgd(world), "GGG")
    for model in (grouped, world):
        one_pass(model, 0)
    first = grouped.embed.weight.grad.norm().item()
    second = world.embed.weight.grad.norm().item()
    assert abs(first - second) < 1e-6 * first


def gathered_ahead():
    """Updates under way are awaited by FSDP2's own prefetch too."""
    plain = fresh()
    given_state(plain, sgd(plain), None)
    for strategy in ("IIG", "ING", "GGG"):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=2, overlap_updates=True)
        if strategy != "GGG":
            model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1], model.blocks[2]])
        given_state(model, optimizer, None)
        compare_parameters(f"ahead {strategy}", whole_parameters(model), dict(plain.named_parameters()), 1e-6)


def native_collectives():
    """The backend's own collectives give what HO-Ring gives, with groups and without."""
    both(given_state, native_collectives=True)
    both(
        given_state,
        strategies=("NNG", "NIG", "III", "IIG", "IGG", "ING", "GIG", "GGG"),
        group_size=2,
        native_collectives=True,
    )


def edits_of_low_precision():
    """With masters of their own, edits to the model's bf16 parameters reach the masters, and no others move."""
    for strategy in ("NNN", "NNG", "III", "GGG"):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=1, param_dtype=torch.bfloat16)
        with torch.no_grad():
            model.norm.weight.fill_(3.0)
        before = {id(p): whole(p) for group in optimizer.param_groups for p in group["params"]}
        one_pass(model, 0)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        masters = [p for group in optimizer.param_groups for p in group["params"]]
        changed = [p for p in masters if not torch.equal(whole(p), before[id(p)])]
        assert not changed, strategy
        assert any(torch.equal(whole(p), torch.full((16,), 3.0)) for p in masters), strategy
        saved = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.01, 0.01)
        optimizer.step()
        assert all(whole(p).abs().max() <= 0.0101 for p in masters), strategy
        model.load_state_dict(saved)
        optimizer.step()
        assert any(torch.equal(whole(p), torch.full((16,), 3.0)) for p in masters), strategy


def checkpoints_of_low_precision():
    """Masters of their own are what is saved, and what a checkpoint is loaded into."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for strategy in ("NNG", "IIG", "GGG"):
        model = fresh()
        model, optimizer = shard(model, sgd(model), strategy, group_size=1, param_dtype=torch.bfloat16)
        given_state(model, optimizer, None)
        save_checkpoint(f"{folder[0]}/{strategy}", model)
        other = Model()
        other, its = shard(other, sgd(other), strategy, group_size=1, param_dtype=torch.bfloat16)
        load_checkpoint(f"{folder[0]}/{strategy}", other)
        for one, same in zip(optimizer.param_groups, its.param_groups, strict=True):
            for p, q in zip(one["params"], same["params"], strict=True):
                assert torch.equal(whole(p), whole(q)), strategy
        compare_parameters(strategy, whole_parameters(other), whole_parameters(model), 0.0)
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def tied_on_meta():
    """Parameters that are tied stay so when a model made without memory is filled."""

    for strategy in STRATEGIES:
        with torch.device("meta"):
            model = Model(tied=True)
        torch.manual_seed(1)
        model, optimizer = shard(model, sgd(model), strategy, group_size=1, init=fill)
        plain = fresh(tied=True)
        first = whole_parameters(model)
        assert "head.weight" not in first
        plain.load_state_dict({**first, "head.weight": first["embed.weight"], "scale": torch.full((1,), 0.5)})
        rule = sgd(plain)
        for step in range(2):
            for each, its in ((plain, rule), (model, optimizer)):
                one_pass(each, step)
                its.step()
                its.zero_grad()
        compare_parameters(f"tied {strategy}", whole_parameters(model), dict(plain.named_parameters()), 1e-6)


def streamed():
    """A whole state dict comes unit by unit, on rank 0 alone: with tied, frozen and shared values, as in plain torch."""
    plain, rule = fresh(tied=True), None
    for strategy in (None, *STRATEGIES):
        model = plain if strategy is None else fresh(tied=True)
        model.blocks[0].up.weight.requires_grad = False
        rule = sgd(model)
        if strategy is not None:
            shard(model, rule, strategy, group_size=1)
        one_pass(model, 0)
        rule.step()
        if strategy is None:
            continue
        found = dict(stream_state_dict(model))
        wanted = plain.state_dict() if dist.get_rank() == 0 else {}
        assert found.keys() == wanted.keys(), (strategy, found.keys() ^ wanted.keys())
        assert all(type(value) is torch.Tensor for value in found.values())
        compare_parameters(f"streamed {strategy}", found, wanted, 1e-6)


def copies():
    """A copy of a model that is whole is a plain one; states are saved as plain DTensors."""
    model = Keeper()
    model.load_state_dict(fresh().state_dict())
    model, optimizer = shard(model, with_state(model), "NNG", group_size=1)
    model.kept = optimizer
    one_pass(model, 0)
    optimizer.step()
    copied = copy.deepcopy(model)
    assert all(parameter.grad is None for parameter in copied.parameters())  # as of torch's own copies
    optimizer.zero_grad()
    assert type(copied) is Keeper
    assert copied.kept is None
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), model.parameters(), strict=True))
    one_pass(copied, 0)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert b"paro_advise" not in buffer.getvalue()


def refused(reason, do, kind=UsageError):
    try:
        do()
    except kind as error:
        assert reason in str(error), error
        return
    raise AssertionError(f"nothing was refused: {reason}")


def refusals():
    """What cannot be is refused before anything changes: the same model then trains under a strategy."""

    def try_it(model, optimizer, strategy="IIG", **options):
        return lambda: shard(model, optimizer, strategy, group_size=1, **options)

    half = fresh().half()
    refused("overflows", try_it(half, sgd(half)))
    model = fresh()
    model.head.to(torch.bfloat16)
    refused("must have one type", try_it(model, sgd(model)))
    model = fresh()
    handle = model.head.weight.register_hook(lambda gradient: gradient)
    refused("no hooks on its gradient", try_it(model, sgd(model), "GGG"))
    handle.remove()
    refused("each element by itself", try_it(model, torch.optim.Adafactor(model.parameters())))
    refused("LBFGS", try_it(model, torch.optim.LBFGS(model.parameters())))
    model.blocks[0].requires_grad_(False)
    model, optimizer = shard(model, sgd(model), "IIG", group_size=1)
    switch(model, "GGG")
    refused("whole model on every rank", lambda: copy.deepcopy(model))
    switch(model, "IIG")
    model.blocks[0].requires_grad_(True)
    with torch.no_grad():  # as adapters are that others are compared with
        loss_of(model, data(0, 0, dist.get_rank()))
    refused("wants one since then", lambda: one_pass(model, 0))
    model.blocks[0].requires_grad_(False)
    loss = loss_of(model, data(0, 0, dist.get_rank()))
    switch(model, "NNG")
    refused("from before a switch", loss.backward)
    optimizer.zero_grad()
    one_pass(model, 0)
    refused("gradients that wait", lambda: switch(model, "GGG"))
    optimizer.step()


def reads_at_different_lines():
    """Ranks that read at different lines would take each other's values: they are told so instead."""
    model = fresh()
    model, _ = shard(model, sgd(model), "IIG", group_size=1)
    one_pass(model, 0)
    gradient = model.head.weight.grad
    try:
        if dist.get_rank() == 0:
            gradient.norm().item()
        else:
            gradient.sum().item()
    except DivergedError as error:
        assert "sharding_by_hand.py" in str(error)
        told = 1
    except Exception:  # noqa: BLE001 - the other rank has met one that did not come
        told = 0
    # The rank that came first waits for the other, which ends the job in a script.
    print(f"told {told}", flush=True)
    os._exit(0)


CASES = {
    "mean_of_weights": lambda: both(mean_of_weights),
    "remembered_parameters": lambda: both(remembered_parameters),
    "single_values": lambda: both(single_values),
    "own_gradients": lambda: both(own_gradients),
    "other_divisors": lambda: both(other_divisors),
    "own_methods": lambda: both(own_methods, strategies=("NNN", "NNG")),
    "gathered_ahead": gathered_ahead,
    "state_before": state_before,
    "compiled_and_validated": lambda: both(compiled_and_validated, strategies=("NNN", "NNG", "NIG", "GGG")),
    "other_optimizers": other_optimizers,
    "edits_of_low_precision": edits_of_low_precision,
    "native_collectives": native_collectives,
    "tied_on_meta": tied_on_meta,
    "copies": copies,
    "streamed": streamed,
    "memory_formats": memory_formats,
    "made_whole": made_whole,
    "reads_on_two_meshes": reads_on_two_meshes,
    "checkpoints_of_low_precision": checkpoints_of_low_precision,
    "refusals": refusals,
    "reads_at_different_lines": reads_at_different_lines,
}


def main():
    # Where a rank reads alone, the timeout ends the wait; elsewhere it tells a hang from a machine that stalls.
    waits = sys.argv[1] == "reads_at_different_lines"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30 if waits else 300))
    torch.set_num_threads(1)
    for name in sys.argv[1].split(","):
        CASES[name]()
        if dist.get_rank() == 0:
            print("held", name, flush=True)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
