"""FSDP1 (FullyShardedDataParallel) as code that wraps a model.

Source: PyTorch documentation, torch.distributed.fsdp.ShardingStrategy.
"""

from __future__ import annotations

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.fsdp2 import kept_for_backward_caveats
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework, Variant, fidelities

_STRATEGIES = {
    "NNN": "NO_SHARD",
    "NGG": "SHARD_GRAD_OP",
    "GGG": "FULL_SHARD",
    "III": "HYBRID_SHARD",
    "NII": "_HYBRID_SHARD_ZERO2",
}


_OWN_OPTIONS = "give apply the options of your own FSDP call, auto_wrap_policy and mixed_precision among them"


def render(target: Target) -> Rendered:
    """Return a function that wraps a model."""
    strategy = _STRATEGIES[target.triple]
    code = f'''from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def apply(model, device="cuda", **options):
    """Wrap a model; options go to FSDP."""
    mesh = {target.mesh}
    return FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=ShardingStrategy.{strategy}, **options
    )
'''
    caveats = (_OWN_OPTIONS, *kept_for_backward_caveats(target))
    if target.is_hybrid:
        caveats += (
            "gradients cross groups in every micro-batch; under no_sync() once, for the memory of whole gradients",
        )
    return Rendered(text=code, suffix=".py", min_version="2.2", caveats=caveats)


# What every wrapper of FSDP keeps whole for backward by its own settings.
KEPT_VARIANTS = frozenset({("GGG", Variant.KEPT), ("III", Variant.KEPT)})
FIDELITY = fidelities(exact="NNN III GGG", approximate="NII NGG")
FSDP1 = TrainingFramework(
    name="fsdp1",
    observed_as=Framework.FSDP1,
    trace_marks=("FullyShardedDataParallel.",),
    fidelity=FIDELITY,
    variants=KEPT_VARIANTS,
    render=render,
)
