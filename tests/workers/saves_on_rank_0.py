"""DDP as most training scripts use it: compiled if asked, clipped, saved by rank 0 alone while the others go on.

Arguments before those of ``common``: the folder of checkpoints, whether to resume, compile or take a mean of
weights, by the words "resume", "compile", "mean".
"""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args

SAVED_AFTER, MICRO_BATCHES = 2, 2


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2].split(",")
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    raw = make_model(args)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.1)
    first = 0
    if "resume" in words:
        saved = torch.load(folder / "checkpoint.pt", weights_only=True)
        raw.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    mean = copy.deepcopy(raw) if "mean" in words else None
    inner = torch.compile(raw, backend="aot_eager") if "compile" in words else raw
    if "compile_blocks" in words:
        for block in raw.blocks:
            block.compile(backend="aot_eager")
    model = DistributedDataParallel(inner)
    if "compile_after" in words:
        model = torch.compile(model, backend="aot_eager")
    for step in range(first, 4):
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else getattr(model, "_orig_mod", model).no_sync():
                loss = loss_of(model, batch(args, step, micro, rank)) / MICRO_BATCHES
                loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if mean is not None:
            with torch.no_grad():
                for ours, theirs in zip(mean.parameters(), raw.parameters(), strict=True):
                    ours.data.lerp_(theirs.data, 0.5)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step} loss {total.item():.9e} norm {norm.item():.9e}", flush=True)
        if step + 1 == SAVED_AFTER and rank == 0 and "resume" not in words:
            state = {"model": raw.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, folder / "checkpoint.pt")
    if rank == 0:
        total = sum(float(value.double().sum()) for value in raw.state_dict().values())
        print(f"end {total:.9e}", flush=True)
        if mean is not None:
            print(f"mean {sum(float(value.detach().double().sum()) for value in mean.parameters()):.9e}", flush=True)
    # Plain torch 2.13 with gloo hangs or aborts at exit in some runs where the model is still there.
    del model, inner, raw, optimizer, loss
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
