"""FSDP1 with its own state dicts: whole ones of rank 0, sharded ones, the optimizer's, and whole parameters.

Arguments before those of ``common``: the folder of checkpoints, and words: "resume" goes on from the whole checkpoint,
"resume_shards" from the sharded one; "nested" wraps by hand; "meta" starts on the meta device; "rank0" has rank 0
alone hold whole states, for which plain FSDP1 needs a GPU; "flat" keeps FSDP1's default of one parameter a unit;
"recomputed" sets activation checkpoints on what is wrapped.
"""

from __future__ import annotations

import gc
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 - as everybody calls it
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args
from train import Block

SAVED_AFTER, STEPS = 2, 4


def made(args, words):
    settings = {
        "device_id": torch.device("cpu"),
        "use_orig_params": "flat" not in words,
        "device_mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
    }
    if "meta" in words:
        settings["param_init_fn"] = fill
        with torch.device("meta"):
            model = make_model(args)
    else:
        model = make_model(args)
    if "nested" in words:
        for place, block in enumerate(model.blocks):
            model.blocks[place] = FSDP(block, **settings)
    else:
        settings["auto_wrap_policy"] = partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    model = FSDP(model, **settings)
    if "recomputed" in words:
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda part: isinstance(part, Block)
        )
    return model


def fill(part):
    part.to_empty(device="cpu", recurse=False)
    torch.manual_seed(sum(value.numel() for value in part.parameters(recurse=False)))
    with torch.no_grad():
        for value in part.parameters(recurse=False):
            value.normal_(0.0, 0.05)


class Prepared(torch.optim.Optimizer):
    """An optimizer behind another one, as accelerate hands it out."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)


def whole(model, words):
    settings = {"offload_to_cpu": "rank0" in words, "rank0_only": "rank0" in words}
    return FSDP.state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(**settings),
        FullOptimStateDictConfig(**settings),
    )


def save(model, optimizer, folder, words):
    with whole(model, words):
        weights, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    if "rank0" in words:
        assert bool(weights) == bool(states) == (dist.get_rank() == 0)
    if dist.get_rank() == 0:
        torch.save({"model": weights, "optimizer": states}, folder / "whole.pt")
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(found, checkpoint_id=folder / "sharded")
    return states, found["optimizer"]


def steps_of(states):
    return {float(values["step"]) for values in states.get("state", {}).values()}


def load(model, optimizer, folder, words):
    if "resume" in words:
        saved = torch.load(folder / "whole.pt", weights_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(saved["model"])
        if "flat" not in words:  # of flat parameters plain FSDP1 cannot tell names
            by_place = FSDP.rekey_optim_state_dict(
                saved["optimizer"], OptimStateKeyType.PARAM_ID, model, optim=optimizer
            )
            assert set(by_place["state"]) == set(range(len(by_place["state"])))
            saved["optimizer"] = FSDP.rekey_optim_state_dict(
                by_place, OptimStateKeyType.PARAM_NAME, model, optim=optimizer
            )
        with whole(model, words):
            states = saved["optimizer"] if dist.get_rank() == 0 or "rank0" not in words else {}
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        return
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes the states that are loaded into
        found = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(found, checkpoint_id=folder / "sharded")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"]))
        optimizer.zero_grad()


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = made(args, words)
    assert (model.rank, model.world_size) == (rank, dist.get_world_size())
    assert dist.get_world_size(model.process_group) == model.world_size
    assert (model.sharding_strategy, model.mixed_precision) == (ShardingStrategy.FULL_SHARD, MixedPrecision())
    optimizer = Prepared(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1))
    first, kept = 0, ()
    if "resume" in words or "resume_shards" in words:
        load(model, optimizer, folder, words)
        first = SAVED_AFTER
    for step in range(first, STEPS):
        loss = loss_of(model, batch(args, step, 0, rank))
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(f"step {step} loss", mean_of(loss), "norm", norm)
        if step + 1 == SAVED_AFTER and not first:
            kept = save(model, optimizer, folder, words)
        if step + 1 == SAVED_AFTER + 1:
            with FSDP.summon_full_params(model):
                shapes = {tuple(value.shape) for value in model.parameters()}
                report("shapes", torch.tensor(float(sum(len(shape) == 2 for shape in shapes))))
                with torch.no_grad():
                    for value in model.parameters():
                        value.mul_(0.9)
            with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
                next(iter(model.parameters())).zero_()
                for block in (model, next(iter(model.module.children()))):
                    names = sorted(name for name, _ in (*block.named_parameters(), *block.named_buffers()))
                    if rank == 0:
                        print("summoned", *names, flush=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = model.state_dict()
    assert all(steps_of(states) <= {SAVED_AFTER} for states in kept)  # no step after it changes what was saved
    report("end", sum(value.double().sum() for value in found.values()))
    if rank == 0:
        print(",".join(sorted(found)), flush=True)
    del model, optimizer, loss, found
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def mean_of(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def report(*parts):
    if dist.get_rank() == 0:
        print(*(f"{part.item():.9e}" if isinstance(part, torch.Tensor) else part for part in parts), flush=True)


if __name__ == "__main__":
    main()
