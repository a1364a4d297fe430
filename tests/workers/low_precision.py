"""FSDP2 in bf16, in fp32 with gradients reduced in bf16, or with another divisor: "bf16", "reduced" or "divisor".

"fp32" names the parameters' own type. With "ahead" it gathers all units before each pass. With "edits" it decays weights by
hand by less than bf16 can tell, and keeps a mean of them.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples/frameworks"))
from common import batch, loss_of, make_model, parse_args


def main():
    word = sys.argv[1]
    sys.argv = sys.argv[:1]
    args = parse_args()
    dist.init_process_group("gloo")
    model = make_model(args)
    in_bf16 = {
        "edits": {"param_dtype": torch.bfloat16},
        "bf16": {"param_dtype": torch.bfloat16},
        "reduced": {"reduce_dtype": torch.bfloat16},
        "fp32": {"param_dtype": torch.float32},
    }
    settings = {"mp_policy": MixedPrecisionPolicy(**in_bf16[word])} if word in in_bf16 else {}
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, reshard_after_forward=True, **settings)
    for module in model.modules():
        if word == "divisor" and isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if word == "edits" else 0.05, momentum=0.9)
    means = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step in range(3):
        for micro in range(2):
            for module in [model, *model.blocks] if word == "ahead" else []:
                module.unshard()
            loss = loss_of(model, batch(args, step, micro, dist.get_rank()))
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if word == "edits":
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.mul_(1 - 1e-3)
                    means[name].lerp_(parameter, 0.5)
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"{step} {total.item():.9e} {norm.item():.9e}", flush=True)
    saved = {name: value.full_tensor() for name, value in model.state_dict().items()} if word == "bf16" else {}
    assert {value.dtype for value in saved.values()} <= {torch.float32}  # as plain FSDP2 saves
    if word == "edits":
        kept = [sum(value.full_tensor().double().square().sum() for value in part.values()).item() for part in
                (model.state_dict(), means)]  # fmt: skip
        if dist.get_rank() == 0:
            print(*(f"{value:.9e}" for value in kept), flush=True)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
