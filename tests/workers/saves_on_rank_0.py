"""DDP as most training scripts use it: compiled if asked, clipped, saved by rank 0 alone while the others go on.

Arguments before those of ``common``: the folder of checkpoints, and words: "resume" goes on from the checkpoint,
"compile" compiles, "mean" takes a mean of weights, "zero" wraps the optimizer in ZeroRedundancyOptimizer, "teacher"
learns from a frozen copy in a DDP of its own, "evaluate" lets rank 0 evaluate alone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

SAVED_AFTER, MICRO_BATCHES = 2, 2


def optimizer_of(raw, words):
    settings = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.1}
    if "zero" not in words:
        return torch.optim.AdamW(raw.parameters(), **settings)
    optimizer = ZeroRedundancyOptimizer(raw.parameters(), optimizer_class=torch.optim.AdamW, **settings)
    assert isinstance(optimizer, ZeroRedundancyOptimizer)
    return optimizer


def wrapped(raw, words):
    inner = torch.compile(raw, backend="aot_eager") if "compile" in words else raw
    if "compile_blocks" in words:
        for block in raw.blocks:
            block.compile(backend="aot_eager")
    model = DistributedDataParallel(inner)
    return torch.compile(model, backend="aot_eager") if "compile_after" in words else model


def frozen(args):
    teacher = DistributedDataParallel(make_model(args))
    # What Lightning asks of DDP.
    assert not (teacher.static_graph or teacher.find_unused_parameters)
    assert not teacher._get_ddp_logging_data().get("can_set_static_graph")
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    return teacher


def pass_forward(model, teacher, tokens):
    loss = loss_of(model, tokens) / MICRO_BATCHES
    return loss if teacher is None else loss + loss_of(teacher, tokens) * loss


def evaluate(model, args, step):
    with torch.no_grad():
        found = [loss_of(model, batch(args, 50 + step, place, 0)).item() for place in range(2)]
    print(f"evaluated {found[0]:.9e} {found[1]:.9e}", flush=True)


def follow(mean, raw):
    with torch.no_grad():
        for ours, theirs in zip(mean.parameters(), raw.parameters(), strict=True):
            ours.data.lerp_(theirs.data, 0.5)


def save(raw, optimizer, folder, words):
    if "zero" in words:
        optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": SAVED_AFTER}
        torch.save(state, folder / "checkpoint.pt")


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    raw = make_model(args)
    raw.blocks[0].norm_mlp.weight.requires_grad = False
    optimizer = optimizer_of(raw, words)
    first = 0
    if "resume" in words:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
        assert all(type(value) is torch.Tensor for value in saved["model"].values())
    mean = copy.deepcopy(raw) if "mean" in words else None
    model = wrapped(raw, words)
    teacher = frozen(args) if "teacher" in words else None
    for step in range(first, 4):
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else getattr(model, "_orig_mod", model).no_sync():
                loss = pass_forward(model, teacher, batch(args, step, micro, rank))
                loss.backward()
        if step < SAVED_AFTER:
            raw.blocks[1].norm_mlp.bias.grad = None  # as DINO keeps its last layer for a while: it has no state yet
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if mean is not None:
            follow(mean, raw)
        if "evaluate" in words and rank == 0 and step < 3:
            evaluate(model, args, step)
        total = loss.detach().clone()
        dist.all_reduce(total, group=dist.group.WORLD)
        if rank == 0:
            print(f"step {step} loss {total.item():.9e} norm {norm.item():.9e}", flush=True)
        if step + 1 == SAVED_AFTER and "resume" not in words:
            save(raw, optimizer, folder, words)
    if rank == 0:
        total = sum(float(value.double().sum()) for value in raw.state_dict().values())
        print(f"end {total:.9e}", flush=True)
        if mean is not None:
            print(f"mean {sum(float(value.detach().double().sum()) for value in mean.parameters()):.9e}", flush=True)
    # Plain torch 2.13 with gloo hangs or aborts at exit in some runs where the model is still there.
    del model, teacher, raw, optimizer, loss
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
