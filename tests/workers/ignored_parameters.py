"""A model with an expert of its own on each rank, which the framework is told to leave alone.

Arguments: the folder of states, one file a rank, and words: "ddp", "fsdp1", "fsdp2", or "shard", where the script calls
``shard`` itself, switches after the second step and cannot save a checkpoint; "save" saves, "resume" goes on from the
states; "two" gives the experts an optimizer of their own; "together" clips what all share and what each rank has by
one norm; "foreach" updates all at once.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

from paro_advise.errors import UsageError
from paro_advise.runtime import save_checkpoint, shard, switch

SAVED_AFTER, MICRO_BATCHES = 2, 2


class WithExpert(nn.Module):
    """A block, and what this rank alone adds to it."""

    def __init__(self, block, width, rank):
        super().__init__()
        self.block = block
        self.expert = nn.Linear(width, width)
        self.register_buffer("seen", torch.full((1,), float(rank)))
        self.scale = nn.Parameter(torch.tensor(0.1 + 0.1 * rank))  # of no dimension: no strategy could cut it

    def forward(self, hidden):
        self.seen += 1
        return self.block(hidden) + self.scale * self.expert(hidden)


def model_of(args, rank):
    model = make_model(args)
    torch.manual_seed(rank)
    model.blocks = nn.ModuleList(WithExpert(block, args.width, rank) for block in model.blocks)
    return model


def own_names(model):
    return [name for name, _ in model.named_parameters() if "expert" in name or "scale" in name]


def wrapped(raw, words):
    own = [parameter for name, parameter in raw.named_parameters() if name in own_names(raw)]
    if "fsdp2" in words:
        for block in raw.blocks:
            fully_shard(block, ignored_params=set(own))
        return fully_shard(raw, ignored_params=set(own))
    if "fsdp1" in words:
        return FullyShardedDataParallel(raw, use_orig_params=True, ignored_states=own, device_id=torch.device("cpu"))
    buffers = [name for name, _ in raw.named_buffers() if "seen" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(raw, [*own_names(raw), *buffers])
    return DistributedDataParallel(raw)


def optimizers_of(model, words):
    settings = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1, "foreach": True if "foreach" in words else None}
    parts = [[], []]
    for name, parameter in model.named_parameters():
        parts["expert" in name or "scale" in name].append(parameter)
    if "two" in words:
        return [torch.optim.AdamW(part, **settings) for part in parts]
    mixed = [{"params": [*parts[1], *parts[0][:5]], "weight_decay": 0.0}, {"params": parts[0][5:]}]
    return [torch.optim.AdamW(mixed, **settings)]


def clip(model, words):
    """Clip what all share, then what each rank has for itself, whose norms all add up."""
    parts = [[], []]
    for name, parameter in model.named_parameters():
        parts["expert" in name or "scale" in name].append(parameter)
    clipped = parts[0] + parts[1] if "together" in words else parts[0]
    # FSDP1's users clip by its own method, which takes all parameters together.
    norm = torch.zeros(()) if "fsdp1" in words else torch.nn.utils.clip_grad_norm_(clipped, 1.0)
    squares = sum(parameter.grad.square().sum() for parameter in parts[1])
    dist.all_reduce(squares)
    for parameter in parts[1]:
        parameter.grad /= squares.sqrt()
    return (norm.full_tensor() if "fsdp2" in words else norm) + squares


def end_of(raw):
    own = [value for name, value in raw.state_dict().items() if "expert" in name or "scale" in name or "seen" in name]
    return sum(float(value.double().sum()) for value in own)


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    raw = model_of(args, rank)
    model = raw if "shard" in words else wrapped(raw, words)
    optimizers = optimizers_of(model, words)
    if "shard" in words:
        own = [parameter for name, parameter in raw.named_parameters() if name in own_names(raw)]
        shard(raw, optimizers, "NNG", group_size=2, ignored_params=own)
    first = 0
    path = folder / f"rank{rank}.pt"
    if "resume" in words:
        saved = torch.load(path, weights_only="fsdp2" not in words)
        raw.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        first = SAVED_AFTER
    for step in range(first, 4):
        for micro in range(MICRO_BATCHES):
            loss = loss_of(model, batch(args, step, micro, rank)) / MICRO_BATCHES
            loss.backward()
        norm = clip(model, words)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        values = torch.tensor([loss.item(), norm.item(), end_of(raw)], dtype=torch.float64)
        everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, values)
        if rank == 0:
            print(f"step {step}", *(f"{value:.9e}" for found in everyone for value in found.tolist()), flush=True)
        if step + 1 == SAVED_AFTER and "shard" in words:
            switch(raw, "IIG")
            try:
                save_checkpoint(folder / "checkpoint", raw)
            except UsageError as error:
                print("refused:", error, flush=True)
        elif step + 1 == SAVED_AFTER and "save" in words:
            state = {"model": raw.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
            torch.save(state, path)
    # Plain torch 2.13 with gloo hangs or aborts at exit in some runs where the model is still there.
    del model, raw, optimizers, optimizer, loss
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
