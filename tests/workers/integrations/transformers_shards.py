"""Loads a small model with the exported DistributedConfig, trains two steps, and says how it is sharded."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

folder, exported = sys.argv[1:]
made: dict = {}
exec(Path(exported).read_text(), made)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=made["planned"], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(7)
for _ in range(2):
    tokens = torch.randint(0, 64, (2, 16), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
weights = list(model.parameters())
meshes = {
    (tuple(weight.device_mesh.shape), str(weight.placements)) for weight in weights if isinstance(weight, DTensor)
}
blocks = sum(isinstance(module, FSDPModule) for module in model.modules())
if dist.get_rank() == 0:
    print("SHARDED", all(isinstance(weight, DTensor) for weight in weights), blocks, sorted(meshes))
    print("LOSS", float(loss))
dist.destroy_process_group()
