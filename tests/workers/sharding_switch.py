"""Chains of live switches, and checkpoints between all pairs of strategies."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from sharding_worker import (
    Model,
    compare,
    compare_parameters,
    optimizer_of,
    train_sharded,
    train_single,
    whole_parameters,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from paro_advise.errors import NoInputError, UsageError, WouldOverwriteError
from paro_advise.policies.strategy import KEPT
from paro_advise.runtime import (
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
    save_checkpoint_async,
    shard,
    switch,
)

PAIRS = ("GGG", "III", "IIG", "NIG", "IGG", "NNG", "fsdp2")


def fresh():
    torch.manual_seed(0)
    return Model()


def chain(mixed=False):
    """All 14 strategies one after the other, with changing group sizes, in one run."""
    order = [str(strategy) for strategy in KEPT]
    order = [*order[::2], *order[1::2], "NNN", "GIG", "III", "GGG", "NIG"]
    steps = range(len(order))
    wanted = train_single(fresh(), "adamw", steps)
    options = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if mixed else {}
    model = fresh()
    model, optimizer = shard(model, optimizer_of("adamw", model), order[0], group_size=2, **options)
    reports = []

    def after(step):
        if step + 1 < len(order):
            size = 2 if step % 3 else [1, 2, dist.get_world_size()][step // 3 % 3]
            before = whole_parameters(model)
            reports.append(switch(model, order[step + 1], group_size=size))
            now = whole_parameters(model)
            assert all(torch.equal(before[name], now[name]) for name in before), "a switch changed a parameter"

    got = train_sharded(model, optimizer, steps, after_step=after)
    compare("chain", got, wanted, 2e-2 if mixed else 1e-6)
    assert all(report.seconds > 0 and report.peak_bytes for report in reports)
    if dist.get_rank() == 0:
        print("equal chain", "mixed" if mixed else "", [report.after for report in reports], flush=True)


def refusals():
    model = fresh()
    model, optimizer = shard(model, optimizer_of("adamw", model), "IIG", group_size=2)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    for wrong, kind in ((lambda: switch(model, "III"), UsageError), (lambda: switch(model, "GII"), UsageError)):
        try:
            wrong()
        except kind:
            continue
        raise AssertionError("a wrong switch was accepted")
    optimizer.zero_grad()
    assert switch(model, "III").after == "III in groups of 2"


def make(strategy, model):
    if strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, optimizer_of("adamw", model)
    return shard(model, optimizer_of("adamw", model), strategy, group_size=2)


def save(strategy, path, model, optimizer, schedule):
    if strategy != "fsdp2":
        save_checkpoint(path, model, extra={"schedule": schedule.state_dict()})
        return
    model_state, optimizer_state = get_state_dict(model, optimizer)
    contents = {"model": model_state, "optimizer": optimizer_state, "extra": {"schedule": schedule.state_dict()}}
    torch.distributed.checkpoint.save(contents, checkpoint_id=path)


def load(strategy, path, model, optimizer, schedule):
    if strategy != "fsdp2":
        loaded = load_checkpoint(path, model, extra={"schedule": schedule.state_dict()})
        schedule.load_state_dict(loaded["schedule"])
        return
    model_state, optimizer_state = get_state_dict(model, optimizer)
    contents = {"model": model_state, "optimizer": optimizer_state, "extra": {"schedule": schedule.state_dict()}}
    torch.distributed.checkpoint.load(contents, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=contents["model"], optim_state_dict=contents["optimizer"])
    schedule.load_state_dict(contents["extra"]["schedule"])


def pairs(folder):
    """Two steps, a checkpoint, two more steps under another strategy: as one process does four."""
    reference = fresh()
    wanted = train_single(reference, "adamw", range(4))
    for source in PAIRS:
        model, optimizer = make(source, fresh())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        compare(f"before {source}", train_with(source, model, optimizer, range(2), schedule), wanted[:2], 1e-6)
        save(source, folder / source, model, optimizer, schedule)
        for target in PAIRS:
            torch.manual_seed(99)
            model, optimizer = make(target, Model())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
            load(target, folder / source, model, optimizer, schedule)
            label = f"{source} to {target}"
            compare(label, train_with(target, model, optimizer, range(2, 4), schedule), wanted[2:], 1e-6)
            compare_parameters(label, whole_parameters(model), dict(reference.named_parameters()), 1e-6)
        if dist.get_rank() == 0:
            print("equal from", source, flush=True)


def train_with(strategy, model, optimizer, steps, schedule):
    return train_sharded(model, optimizer, steps, schedule)


def background(folder):
    """Training goes on while a checkpoint is written; what is written is of the moment of the call."""
    model, optimizer = make("IIG", fresh())
    train_sharded(model, optimizer, range(2))
    future = save_checkpoint_async(folder / "background", model)
    then = {name: value.clone() for name, value in whole_parameters(model).items()}
    train_sharded(model, optimizer, range(2, 4))
    future.result()
    dist.barrier()
    assert latest_checkpoint(folder) == folder / "background"
    other, _ = make("NNG", fresh())
    load_checkpoint(folder / "background", other)
    compare_parameters("background", whole_parameters(other), then, 0.0)
    for wrong, kind in (
        (lambda: save_checkpoint(folder / "background", model), WouldOverwriteError),
        (lambda: load_checkpoint(folder / "nothing", model), NoInputError),
    ):
        try:
            wrong()
        except kind:
            continue
        raise AssertionError("a wrong call was accepted")
    before_any_step, _ = make("III", fresh())
    save_checkpoint(folder / "new", before_any_step)
    load_checkpoint(folder / "new", model)


def resize(folder, phase):
    """Saved by some ranks, loaded by another number of them."""
    if phase == "save":
        model, optimizer = make("IIG", fresh())
        train_sharded(model, optimizer, range(2))
        save_checkpoint(folder / "resize", model, extra={"whole": whole_parameters(model)})
        return
    model, optimizer = make("NIG", fresh())
    extra = load_checkpoint(
        folder / "resize", model, extra={"whole": {k: torch.empty_like(v) for k, v in whole_parameters(model).items()}}
    )
    compare_parameters("resize", whole_parameters(model), extra["whole"], 0.0)
    train_sharded(model, optimizer, range(2, 3))


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    what, folder = sys.argv[1], Path(sys.argv[2])
    {
        "chain": lambda: chain(),
        "mixed": lambda: chain(mixed=True),
        "refusals": refusals,
        "pairs": lambda: pairs(folder),
        "background": lambda: background(folder),
        "save": lambda: resize(folder, "save"),
        "load": lambda: resize(folder, "load"),
    }[what]()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
