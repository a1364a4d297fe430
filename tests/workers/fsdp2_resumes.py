"""FSDP2 as its example writes it: from the meta device, filled after sharding, saved and resumed with DCP.

Arguments before those of ``common``: the folder of checkpoints, and words:
"two" has two optimizers; "tied" ties two layers that are wrapped together, as accelerate does; "seeded" fills by seeded draws into the shards, "ranks" has every rank draw a model of its own before it is sharded,
"resume" goes on from the checkpoint; "whole" saves and loads whole states by rank 0, "assigned" loads as the example
does, by assigning; "recomputed" checkpoints activations; "evaluate" runs a pass without gradients before the first step; "bf16" computes in bfloat16; "load_later" and
"in_place" load the checkpoint once more after the last step, the second into what ``state_dict()`` returns.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

SAVED_AFTER, STEPS = 2, 4


def made(args, words):
    """Return a sharded model, filled unless a checkpoint will fill it."""
    settings = {}
    if "bf16" in words:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "ranks" in words:
        model = make_model(args)
        torch.manual_seed(dist.get_rank())
        fill(model)
    else:
        with torch.device("meta"):
            model = make_model(args)
    if "recomputed" in words:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    for block in model.blocks:
        fully_shard(block, **settings)
    if "tied" in words:
        model.head.weight = model.embed.weight
        fully_shard([model.embed, model.head], **settings)
    fully_shard(model, **settings)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    if "ranks" not in words:
        assert all(parameter.is_meta for parameter in model.parameters())
    if "ranks" not in words and not ("resume" in words and "assigned" in words):
        model.to_empty(device="cpu")
        torch.manual_seed(7)
        fill(model)
    return model


def fill(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02)


def optimizers_of(model, words):
    """Return one optimizer, or two that share the parameters and take off their gradients one after the other."""
    settings = {"eps": 1e-3, "weight_decay": 0.1}
    if "two" not in words:
        return (torch.optim.AdamW(model.parameters(), lr=1e-3, **settings),)
    matrices = [value for value in model.blocks.parameters() if value.ndim == 2]
    others = [value for value in model.parameters() if not any(value is matrix for matrix in matrices)]
    return torch.optim.SGD(matrices, lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=1e-3, **settings)


def save(model, optimizers, folder, words):
    if "whole" in words or "assigned" in words:
        if "assigned" in words:
            whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
            states = get_optimizer_state_dict(model, optimizers, options=StateDictOptions(full_state_dict=True))
        else:
            whole, states = get_state_dict(
                model, optimizers, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
            )
        if dist.get_rank() == 0:
            torch.save({"model": whole, "optimizer": states}, folder / "whole.pt")
        dist.barrier()
        return
    weights, states = get_state_dict(model, optimizers)
    assert all(isinstance(value, DTensor) for value in weights.values())
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / "sharded")


def load(model, optimizers, folder, words):
    if "assigned" in words:
        saved = torch.load(folder / "whole.pt", weights_only=True, mmap=True)
        shards = {}
        for name, empty in model.state_dict().items():
            value = distribute_tensor(saved["model"][name], empty.device_mesh, empty.placements)
            shards[name] = torch.nn.Parameter(value)
        model.load_state_dict(shards, strict=False, assign=True)
        optimizers = optimizers_of(model, words)
        set_optimizer_state_dict(model, optimizers, saved["optimizer"], options=StateDictOptions(full_state_dict=True))
        return optimizers
    if "whole" in words:
        saved = torch.load(folder / "whole.pt", weights_only=True)
        set_state_dict(
            model,
            optimizers,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        return optimizers
    weights, states = get_state_dict(model, optimizers)
    found = {"model": weights, "optimizer": states}
    dcp.load(found, checkpoint_id=folder / "sharded")
    set_state_dict(model, optimizers, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    return optimizers


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = made(args, words)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    total = sum(parameter.numel() for parameter in model.parameters())
    assert held < total / dist.get_world_size() * 1.1, (held, total)
    optimizers = optimizers_of(model, words)
    first = 0
    if "resume" in words:
        optimizers = load(model, optimizers, folder, words)
        first = SAVED_AFTER
    if "evaluate" in words:
        report("before", evaluated(model, args))
    remembered = model.state_dict()  # follows the training, on which torchtitan's checkpoints rely
    for step in range(first, STEPS):
        loss = loss_of(model, batch(args, step, 0, rank))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        report(f"step {step} loss", mean_of(loss), "norm", norm)
        if step + 1 == SAVED_AFTER and "resume" not in words:
            save(model, optimizers, folder, words)
    report("end", sum_of(model.state_dict()), sum_of(remembered))
    if "load_later" in words:
        load(model, optimizers, folder, ["whole" if word == "assigned" else word for word in words])
        report("again", evaluated(model, args))
    if "in_place" in words:
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "sharded")
        report("again", evaluated(model, args))
    dist.barrier()
    del model, remembered, optimizer, optimizers, loss
    gc.collect()
    dist.destroy_process_group()


def evaluated(model, args):
    tokens = batch(args, 99, 0, dist.get_rank())
    with torch.no_grad():
        logits = model(tokens[:, :-1]).flatten(0, 1).double()
        return mean_of(torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def mean_of(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total


def sum_of(state):
    return sum(value.full_tensor().double().sum() for value in state.values())


def report(*parts):
    if dist.get_rank() == 0:
        print(*(f"{part.item():.9e}" if isinstance(part, torch.Tensor) else part for part in parts), flush=True)


if __name__ == "__main__":
    main()
