"""Records the training steps of a small FSDP2 transformer on CPU: the raw material of the inputs.

What is kept of a recording is its shape: which operators and annotations ran, how they nest, and
their arguments. Times are drawn anew by ``gpu_rendering``, so that a seed decides them.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_STEPS = 3
_WORLD = 2
_LAYERS = 6
_WIDTH = 64
_VOCABULARY = 512
_TOKENS = 32


@dataclass(slots=True)
class HostNode:
    """A recorded operator or annotation of the main thread with what ran inside it."""

    name: str
    category: str
    args: dict[str, Any]
    children: list[HostNode] = field(default_factory=list)


def record(seed: int) -> list[HostNode]:
    """Run the training in two processes and return the first one's outermost rows, in order."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        mp.spawn(_train, args=(folder, str(path), seed), nprocs=_WORLD)
        events = json.loads(path.read_text())["traceEvents"]
    return _forest(events)


def _model() -> Any:
    import torch
    from torch import nn

    def scaled(x: Any, weight: Any) -> Any:
        """Root-mean-square norm as model code spells it out."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        """Rotary position embedding as model code spells it out."""
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    class Block(nn.Module):
        """A transformer block as people write it."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1 = nn.Parameter(torch.ones(_WIDTH))
            self.norm2 = nn.Parameter(torch.ones(_WIDTH))
            self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
            self.proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
            self.gate = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
            self.up = nn.Linear(_WIDTH, 4 * _WIDTH, bias=False)
            self.down = nn.Linear(4 * _WIDTH, _WIDTH, bias=False)
            self.drop = nn.Dropout(0.1)

        def forward(self, x: Any) -> Any:
            """Attend, then mix."""
            batch, length, width = x.shape
            q, k, v = (
                part.view(batch, length, 4, width // 4).transpose(1, 2)
                for part in self.qkv(scaled(x, self.norm1)).chunk(3, dim=-1)
            )
            angle = torch.arange(length, device=x.device)[:, None] * torch.ones(width // 4, device=x.device)
            cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            mixed = nn.functional.scaled_dot_product_attention(
                turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True
            )
            x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
            y = scaled(x, self.norm2)
            return x + self.drop(self.down(nn.functional.silu(self.gate(y)) * self.up(y)))

    return nn.Sequential(
        nn.Embedding(_VOCABULARY, _WIDTH),
        *[Block() for _ in range(_LAYERS)],
        nn.LayerNorm(_WIDTH),
        nn.Linear(_WIDTH, _VOCABULARY),
    )


def _train(rank: int, folder: str, path: str, seed: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.profiler import ProfilerActivity, profile, schedule

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_WORLD)
    model = _model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in list(model)[1 : 1 + _LAYERS]:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=NUM_STEPS),
        record_shapes=True,
        acc_events=True,
    ) as profiler:
        for _ in range(2 + NUM_STEPS):
            data = torch.randint(_VOCABULARY, (2, _TOKENS + 1))
            logits = model(data[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
            profiler.step()
    if rank == 0:
        profiler.export_chrome_trace(path)
    dist.barrier()
    dist.destroy_process_group()


def _forest(events: list[dict[str, Any]]) -> list[HostNode]:
    """Nest the rows of the thread that trains; the backend's worker threads are left out."""
    rows = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation")]
    thread = next(row["tid"] for row in rows if row["name"].startswith("ProfilerStep"))
    rows = sorted((row for row in rows if row["tid"] == thread), key=lambda row: (row["ts"], -row["dur"]))
    roots: list[HostNode] = []
    path: list[tuple[float, HostNode]] = []
    for row in rows:
        node = HostNode(row["name"], row["cat"], row.get("args", {}))
        while path and row["ts"] >= path[-1][0]:
            path.pop()
        (path[-1][1].children if path else roots).append(node)
        path.append((row["ts"] + row["dur"], node))
    return roots
