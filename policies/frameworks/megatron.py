"""Megatron-LM's distributed optimizer and Megatron-FSDP as command-line flags.

Source: Megatron-LM, megatron/training/arguments.py, and its Megatron-FSDP guide.
"""

from __future__ import annotations

from paro_advise.core.framework import Framework
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework, fidelities

# Flags that say how states are sharded, and how many values each takes: an edit takes out all of them.
FLAGS = {
    "--use-distributed-optimizer": 0,
    "--use-megatron-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--outer-dp-sharding-strategy": 1,
    "--num-distributed-optimizer-instances": 1,
    "--ckpt-format": 1,
    "--init-model-with-meta-device": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
    "--use-torch-fsdp2": 0,
    "--torch-fsdp2-no-reshard-after-forward": 0,
}
# Those without which Megatron-FSDP starts, and with which nothing else does.
FSDP_FLAGS = {"--fsdp-double-buffer": 0, "--fsdp-manual-registration": 0}
FSDP_CHECKPOINTS = "fsdp_dtensor"
_FSDP = (
    "--use-megatron-fsdp",
    *("--ckpt-format", FSDP_CHECKPOINTS),
    "--init-model-with-meta-device",
    "--data-parallel-sharding-strategy",
)
# megatron/training/arguments.py refuses to start else.
CONNECTIONS = "Megatron-FSDP starts only where CUDA_DEVICE_MAX_CONNECTIONS is not set, or above 1"
_OPTIMIZER = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def flags(target: Target) -> tuple[str, ...]:
    """Return the words that put a target on Megatron's command line."""
    instances = ("--num-distributed-optimizer-instances", str(target.num_groups))
    return {
        "NNN": ("--overlap-grad-reduce",),
        "NNG": _OPTIMIZER,
        "NNI": (*_OPTIMIZER, *instances),
        "NGG": (*_FSDP, "optim_grads"),
        "GGG": (*_FSDP, "optim_grads_params"),
        "III": (*_FSDP, "optim_grads_params", "--outer-dp-sharding-strategy", "no_shard", *instances),
        "IIG": (*_FSDP, "optim_grads_params", "--outer-dp-sharding-strategy", "optim", *instances),
    }[target.triple]


def render(target: Target) -> Rendered:
    """Return the flags as one line."""
    words = flags(target)
    caveats = (CONNECTIONS,) if _FSDP[0] in words else ()
    return Rendered(text=" ".join(words) + "\n", suffix=".txt", min_version="core 0.14", caveats=caveats)


MEGATRON = TrainingFramework(
    name="megatron",
    observed_as=Framework.MEGATRON,
    trace_marks=("DATA_PARALLEL_GROUP", "megatron"),
    fidelity=fidelities(exact="NNN NNI NNG NGG III IIG GGG"),
    render=render,
)
