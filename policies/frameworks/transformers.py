"""Hugging Face transformers' own sharding: ``DistributedConfig`` of ``from_pretrained``.

Source: transformers 5.24, ``distributed/configuration_utils.py`` (fsdp_size, dp_replicate_size) and
``distributed/fsdp.py``, which wraps each block by FSDP2 and reshards it after forward.
"""

from __future__ import annotations

from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework, fidelities


def render(target: Target) -> Rendered:
    """Return the configuration as a name to import."""
    replicas, shards = (target.num_groups, target.group_size) if target.is_hybrid else (1, target.world_size)
    lines = [
        "from transformers.distributed import DistributedConfig",
        "",
        "# AutoModelForCausalLM.from_pretrained(..., distributed_config=planned)",
        f"planned = DistributedConfig(fsdp_size={shards}, dp_replicate_size={replicas})",
    ]
    caveats: tuple[str, ...] = ()
    if target.micro_batches > 1 and target.is_hybrid:
        caveats = ("a loop of your own must call set_requires_all_reduce(False) in all micro-batches but the last",)
    elif target.micro_batches > 1:
        caveats = ("Trainer keeps whole gradients while it accumulates, which takes their memory",)
    return Rendered(text="\n".join(lines) + "\n", suffix=".py", min_version="5.24", caveats=caveats)


TRANSFORMERS = TrainingFramework(name="transformers", fidelity=fidelities(exact="GGG III"), render=render)
