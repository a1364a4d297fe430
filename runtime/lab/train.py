"""A small transformer trained with unmodified FSDP2: what a user's own script looks like.

Run it with `torchrun --nproc-per-node 4 examples/train.py --traces DIR`. Nothing in here knows
paro-advise: the traces are what torch.profiler writes.
"""

from __future__ import annotations

import argparse
import gc
import os
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - PyTorch's own convention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, schedule


class Block(nn.Module):
    """A transformer block: attention and MLP with residuals."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence, width) to the same shape."""
        batch, sequence, width = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden)).view(batch, sequence, 3, self.heads, -1)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(mixed.transpose(1, 2).reshape(batch, sequence, width))
        output: torch.Tensor = hidden + self.mlp(self.norm_mlp(hidden))
        return output


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, sequence) tokens to (batch, sequence, vocabulary) logits."""
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder for the profiler's traces; none are written without it")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace, device: torch.device
) -> float:
    """Run one step of several micro-batches; return the mean loss of this rank."""
    total = 0.0
    for _ in range(args.micro_batches):
        tokens = torch.randint(0, args.vocabulary, (args.batch, args.sequence + 1)).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / args.micro_batches
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def make_recorder(args: argparse.Namespace, rank: int) -> profile:
    """Return a profiler that writes the last three steps but one to the traces folder."""
    args.traces.mkdir(parents=True, exist_ok=True)
    target = str(args.traces / f"rank{rank}.json.gz")
    devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return profile(
        activities=[ProfilerActivity.CPU, *devices],
        schedule=schedule(wait=max(0, args.steps - 5), warmup=1, active=3, repeat=1),
        record_shapes=True,
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(target),
    )


def pick_device() -> torch.device:
    """Return this rank's GPU, which torch uses from now on, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    """Train and, if asked, record three steps."""
    args = parse_args()
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    model = Transformer(args.vocabulary, args.width, args.layers, heads=4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(rank)
    recorder = make_recorder(args, rank) if args.traces else None
    with recorder or nullcontext():
        for step in range(args.steps):
            loss = train_step(model, optimizer, args, device)
            if recorder:
                recorder.step()
            if rank == 0:
                print(f"step {step}: loss {loss:.4f}", flush=True)
    # torch 2.13 on gloo can abort at exit when sharded parameters outlive their process group.
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
