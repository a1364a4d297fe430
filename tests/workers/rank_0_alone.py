"""What DDP scripts do on rank 0 alone, since every rank holds everything there.

Argument: "save" saves a part of the model, parameters and gradients, and keeps a mean of the weights, "read" reads a norm on rank 0, "read_1" on rank 1,
"swap" puts other weights into the model on rank 0, saves it and puts the old ones back. "resend" makes the ranks' weights equal by
broadcasts and means, "spread" after rank 0 has changed its own, "load" after rank 0 has loaded a state dict. "part" runs
a part of the model, "forgets" the whole model without no_grad, "forgets_ddp" by DDP; "saliency" runs backward as well,
"stays" leaves the model in eval mode; "before" runs the
whole model before the others train. "amid_saves", "amid_evaluates" and "amid_both" look at the model between forward
and backward, "amid_part" runs a block, "amid_looks" counts parameters, "amid_frozen_looks" with a frozen root;
"broken_saves" and "broken_evaluates" after a forward pass that broke off on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import barrier
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args


class Open(DistributedDataParallel):
    """As scripts write it that ask the wrapper for what the model has."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def total(tensors):
    return sum(float(tensor.detach().double().sum()) for tensor in tensors)


def saved(value):
    """Save and load as rank 0 does; nothing of ours is needed to read it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert b"paro_advise" not in buffer.getvalue()
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    assert all(type(item) in (torch.Tensor, torch.nn.Parameter) for item in found.values())
    return found


def evaluate(word, raw, model, tokens):
    """Let rank 0 evaluate between two steps; print what it sees."""
    raw.eval()
    if word == "part":
        with torch.no_grad():
            hidden = torch.ones(1, 4, raw.head.in_features)
            for block in raw.blocks:
                hidden = block(hidden)
            print(f"hidden {float(hidden.norm()):.9e}", flush=True)
    elif word in ("forgets", "forgets_ddp", "saliency"):
        loss = loss_of(model if word == "forgets_ddp" else raw, tokens)
        print(f"evaluated {float(loss.detach()):.9e}", flush=True)
        if word == "saliency":
            loss.backward()
    if word != "stays":
        raw.train()


def look_at(word, raw, tokens):
    """Look at the model between forward and backward of a step, or after a forward pass that broke off."""
    if word.endswith(("_saves", "_both")):
        print(f"amid {total(raw.state_dict().values()):.9e}", flush=True)
    if word.endswith("_part"):
        with torch.no_grad():
            print(f"amid {float(raw.blocks[1](torch.ones(1, 4, raw.head.in_features)).norm()):.9e}", flush=True)
    if word.endswith("_looks"):
        print(f"amid {float(sum(parameter.numel() for parameter in raw.parameters())):.9e}", flush=True)
    if word.endswith(("_evaluates", "_both")):
        with torch.no_grad():
            print(f"amid {float(loss_of(raw, tokens)):.9e}", flush=True)


def break_off(model, raw, tokens):
    """Begin a pass that ends in the middle of the model, as one that runs out of memory."""

    def fail(*_):
        raise MemoryError

    handle = raw.blocks[1].register_forward_hook(fail)
    with contextlib.suppress(MemoryError):
        loss_of(model, tokens)
    handle.remove()


def summarize(word, model, args):
    """Run the model on rank 0, with gradients, as what counts its operations does."""
    if not word.startswith("before"):
        return
    alone = dist.new_group([0])
    for _ in range(3):  # on rank 1 nothing: the group is not its own
        dist.all_reduce(torch.ones(1), group=alone)
    for place in range(2 if dist.get_rank() == 0 else 0):
        print(f"before {float(loss_of(model, batch(args, 50, place, 0)).detach()):.9e}", flush=True)
    if word == "before_and_trains" and dist.get_rank() == 0:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model, batch(args, 50, 0, 0)).backward()
        optimizer.step()
    barrier()


def main():
    word = sys.argv[1]
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    raw = make_model(args)
    if word == "amid_frozen_looks":  # the root holds nothing that trains
        trained = {id(parameter) for block in raw.blocks for parameter in block.parameters()}
        for parameter in raw.parameters():
            parameter.requires_grad_(id(parameter) in trained)
    mean = copy.deepcopy(raw) if word == "save" and rank == 0 else None
    other = [parameter.detach() * 2 for parameter in raw.parameters()]
    kept = list(raw.parameters())
    model = Open(raw) if word == "part" else DistributedDataParallel(raw)
    assert word != "part" or model.blocks is raw.blocks
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
    summarize(word, model, args)
    for step in range(4):
        if word.startswith("broken") and step:
            break_off(model, raw, batch(args, step, 0, rank))
            if rank == 0:
                look_at(word, raw, batch(args, 50, step, 0))
        loss = loss_of(model, batch(args, step, 0, rank))
        if word.startswith("amid") and rank == 0 and step != 2:
            look_at(word, raw, batch(args, 50, step, 0))
        loss.backward()
        if word == "save" and step == 2:
            if rank == 0:
                print(f"kept {total(saved(dict(enumerate(kept))).values()):.9e}", flush=True)
                held = optimizer.param_groups[0]["params"]
                print(f"optimizer {total(saved(dict(enumerate(held))).values()):.9e}", flush=True)
                print(f"part {total(saved(raw.blocks[1].state_dict()).values()):.9e}", flush=True)
            print(f"all {total(saved(dict(model.named_parameters())).values()):.9e}", flush=True)
            print(f"gradients {total(saved({n: p.grad for n, p in raw.named_parameters()}).values()):.9e}", flush=True)
        if word in ("read", "read_1") and step == 2 and rank == len(word) // 6:
            print(f"norm {float(raw.blocks[0].norm_mlp.weight.norm()):.9e}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            evaluate(word, raw, model, batch(args, 50, step, 0))
        for ours, theirs in zip(mean.parameters(), raw.parameters(), strict=True) if mean is not None else ():
            ours.data.lerp_(theirs.data, 0.5)
    change_weights(word, args, raw, other)
    if mean is not None:
        print(f"mean {total(mean.parameters()):.9e}", flush=True)
    if rank == 0:
        print(f"end {total(raw.state_dict().values()):.9e}", flush=True)
    del model, raw, optimizer
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def change_weights(word, args, raw, other):
    """Put other weights into the model after training, on rank 0 alone, and bring them to the others."""
    rank = dist.get_rank()
    if word == "late":
        dist.barrier()
        dist.destroy_process_group()
        if rank == 0:
            print(f"late {total(raw.state_dict().values()):.9e}", flush=True)
        os._exit(0)
    if word == "swap_evaluates":
        with torch.no_grad():
            if rank == 0:
                torch._foreach_copy_([parameter.data for parameter in raw.parameters()], other)
                print(f"swapped {float(loss_of(raw, batch(args, 50, 0, 0))):.9e}", flush=True)
        dist.barrier()
    if word == "swap" and rank == 0:
        before = [parameter.detach().clone() for parameter in raw.parameters()]
        with torch.no_grad():
            torch._foreach_copy_([parameter.data for parameter in raw.parameters()], other)
        print(f"swapped {total(raw.state_dict().values()):.9e}", flush=True)
        for parameter, old in zip(raw.parameters(), before, strict=True):
            parameter.data.copy_(old)
    if word in ("spread", "load") and rank == 0:
        with torch.no_grad():
            torch._foreach_mul_(list(raw.parameters()), 0.5)
        if word == "load":
            raw.load_state_dict(make_model(args).state_dict())
    for parameter in raw.parameters() if word in ("resend", "spread", "load") else ():
        dist.broadcast(parameter.data, 0)
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


if __name__ == "__main__":
    main()
