"""FSDP2 (torch.distributed.fsdp.fully_shard) as code that shards a model; DDP where nothing is sharded.

Source: PyTorch documentation, torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework, Variant, fidelities

_KEPT_WHOLE = "parameters are sharded between steps and gathered once per micro-batch, not once per step"
_OWN_SETTINGS = (
    "give apply the mp_policy and offload_policy of your own fully_shard calls, or types and offloading are lost"
)
_TYPES_OF_DDP = "DDP takes no mp_policy: keep the types of your own by torch.autocast or DDP's mixed_precision"
_DDP = '''from torch.nn.parallel import DistributedDataParallel


def apply(model):
    """Wrap a model."""
    return DistributedDataParallel(model)
'''
_BEFORE_BACKWARD = '''

def before_backward(model, is_last_micro_batch):
    """Add gradients up across groups at the accumulation boundary only."""
    model.set_requires_all_reduce(is_last_micro_batch)
'''
_HOLD_GRADIENTS = '''

def hold_gradients(model, is_last_micro_batch):
    """Keep whole gradients until the boundary."""
    model.set_requires_gradient_sync(is_last_micro_batch)
'''

# Source: torch 2.13, FSDPModule.set_symm_mem_for_comm; NCCL's documentation, NCCL_CTA_POLICY.
_COPY_ENGINES = '''

def gather_by_copy_engines(model):
    """Leave the GPU's cores to computing while parameters are gathered inside a node; call it after apply.

    An option that the prediction leaves out, never run on GPUs by us. It asks for torch 2.13 and NCCL 2.28, for groups
    that lie inside one node, and for a job started with NCCL_CTA_POLICY=2.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_symm_mem_for_comm()
'''


def reshard_after_forward(target: Target) -> bool | int:
    """Return FSDP2's setting: free parameters, keep them for backward, or keep a copy in groups of a size."""
    if target.triple == "IGG":
        return target.group_size
    return target.triple in ("GGG", "III")


def kept_for_backward_caveats(target: Target) -> tuple[str, ...]:
    """Return what a framework that keeps gathered parameters for backward really does."""
    return (_KEPT_WHOLE,) if target.triple in ("NGG", "NII") else ()


def render(target: Target) -> Rendered:
    """Return functions that shard a model."""
    if target.triple == "NNN":
        of_ddp = ("put all micro-batches but the last under model.no_sync()", _TYPES_OF_DDP)
        return Rendered(text=_DDP, suffix=".py", min_version="2.0", caveats=of_ddp)
    reshard = reshard_after_forward(target)
    imported = "FSDPModule, fully_shard" if target.is_hybrid else "fully_shard"
    code = f'''import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import {imported}


def apply(model, blocks, device="cuda", **settings):
    """Shard a model; blocks are its repeated layers, settings what else your own calls of fully_shard get.

    What lies outside of the blocks stays whole from forward to backward, as fully_shard leaves the root by itself.
    """
    mesh = {target.mesh}
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward={reshard}, **settings)
    return fully_shard(model, mesh=mesh, **settings)
'''
    caveats: tuple[str, ...] = (_OWN_SETTINGS,)
    if target.is_hybrid:
        code += _BEFORE_BACKWARD + _COPY_ENGINES
        caveats += ("call before_backward in every micro-batch, or gradients cross groups each time",)
    if target.triple in ("NGG", "NII", "NNG", "NNI"):
        caveats += (_KEPT_WHOLE,)
    if target.triple in ("NNG", "NNI"):
        code += _HOLD_GRADIENTS
        caveats += ("call hold_gradients in every micro-batch",)
    if target.triple == "IGG":
        caveats += ("only the gather in backward stays inside the group; the one in forward is over all ranks",)
    return Rendered(text=code, suffix=".py", min_version="2.6", caveats=caveats)


FIDELITY = fidelities(exact="NNN III GGG", approximate="NNI NNG NII NGG IGG")
VARIANTS = frozenset(
    {
        ("GGG", Variant.KEPT),
        ("III", Variant.KEPT),
        ("GNG", Variant.KEPT),
        ("INI", Variant.KEPT),
        ("GGG", Variant.SECOND_COPY),
    }
)
FSDP2 = TrainingFramework(
    name="fsdp2",
    observed_as=Framework.FSDP2,
    trace_marks=("FSDP::",),
    fidelity=FIDELITY,
    variants=VARIANTS,
    render=render,
)
