"""Mixed precision of FSDP1 and FSDP2: casts, buffers, a pass before training, and what a plan refuses, by the first word."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH, STEPS = 16, 3
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
WAYS = {
    "plain": BF16,
    "buffers": {**BF16, "buffer_dtype": torch.bfloat16},
    "buffers in fp32": {**BF16, "buffer_dtype": torch.float32},
    "buffers alone": {"buffer_dtype": torch.bfloat16},
    "root in fp32": {**BF16, "cast_root_forward_inputs": False},
    "parts cast": {**BF16, "cast_forward_inputs": True},
    "small gradients": {**BF16, "keep_low_precision_grads": True},
    "norms": BF16,
    "parts unlike the whole": BF16,
}
WAYS_OF_FSDP2 = {
    "parts in parts": {},
    "the whole alone": {},
    "no inputs": {"cast_forward_inputs": False},
    "outputs": {"output_dtype": torch.bfloat16},
    "outputs of the whole alone": {"output_dtype": torch.float32},
    "outputs without inputs": {"output_dtype": torch.bfloat16, "cast_forward_inputs": False},
    "hooks": {"output_dtype": torch.float32},
}


@dataclass
class Given:
    """Inputs as some models take them: FSDP casts what dataclasses hold."""

    values: torch.Tensor


class Block(nn.Module):
    """Scales what it adds by a buffer and by what it is given; with "norms" it normalizes by batches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if sys.argv[1] == "norms" else nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.linspace(0.9, 1.1, WIDTH))

    def forward(self, values, scale):
        added = torch.relu(self.norm(self.linear(values.to(self.linear.weight.dtype)))) * self.scale
        return values + (added * scale).to(values.dtype)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 1)
        self.register_buffer("offset", torch.linspace(-0.1, 0.1, WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, given):
        self.count += 1
        values = given.values + self.offset.to(given.values.dtype)
        scale = torch.linspace(0.901, 1.101, WIDTH)  # rounded in bf16
        for block in self.blocks:
            values = block(values, scale)
        return self.head(values.to(self.head.weight.dtype)).float() * 1.003


def tell(*values):
    if dist.get_rank() == 0:
        print(*values, flush=True)


def sharded_by_fsdp1(way):
    if way == "parts unlike the whole":
        model, inner = Model(), MixedPrecision(**BF16, cast_forward_inputs=True)
        for place, block in enumerate(model.blocks):
            model.blocks[place] = FullyShardedDataParallel(
                block, mixed_precision=inner, use_orig_params=True, device_id=torch.device("cpu")
            )
        return FullyShardedDataParallel(
            model, mixed_precision=MixedPrecision(**BF16), use_orig_params=True, device_id=torch.device("cpu")
        )
    return FullyShardedDataParallel(
        Model(), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=MixedPrecision(**WAYS[way]),
        use_orig_params=True, device_id=torch.device("cpu"),
    )  # fmt: skip


def sharded_by_fsdp2(way):
    model = Model()
    policy = MixedPrecisionPolicy(**BF16, **WAYS_OF_FSDP2[way])
    of_parts = MixedPrecisionPolicy(**BF16) if way == "outputs of the whole alone" else policy
    if way == "hooks":
        watch(model.blocks[1], "registered before")
    if way != "the whole alone":
        for block in model.blocks:
            if way == "parts in parts":
                fully_shard(block.linear, mp_policy=policy)
            fully_shard(block, mp_policy=of_parts)
    fully_shard(model, mp_policy=policy)
    if way == "hooks":
        watch(model.blocks[1], "registered after")
    return model


def watch(block, when):
    """Tell what a script's hooks see, by whether they were registered before FSDP2's or after, and put first."""
    for first in (False, True):
        where = f"{when}, {'first' if first else 'last'}"
        block.register_forward_pre_hook(lambda _, args, at=where: tell("inputs", at, args[1].dtype), prepend=first)
        block.register_forward_hook(lambda _, __, output, at=where: tell("output", at, output.dtype), prepend=first)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = sharded_by_fsdp2(sys.argv[1]) if sys.argv[1] in WAYS_OF_FSDP2 else sharded_by_fsdp1(sys.argv[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    with torch.no_grad():
        before = model(Given(given))
    tell("before", before.dtype, f"{before.double().sum().item():.9e}")
    for step in range(STEPS):
        inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(Given(inputs)) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        tell("loss", f"{total.item():.9e}")
    for name, buffer in model.named_buffers():
        tell("buffer", name.replace("_fsdp_wrapped_module.", ""), buffer.dtype)
    for name, value in model.state_dict().items():
        tell("saved", name, value.dtype, f"{value.double().sum().item():.6e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
