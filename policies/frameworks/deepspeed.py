"""DeepSpeed's ZeRO stages as settings of its JSON configuration.

Source: deepspeed.ai, "DeepSpeed Configuration JSON" and "ZeRO++"; ZeRO-Offload (arXiv 2101.06840).
"""

from __future__ import annotations

import json

from paro_advise.core.framework import Framework
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.model import Rendered, Target, TrainingFramework, Variant, fidelities

_STAGES = {"NNN": 0, "NNG": 1, "NGG": 2, "GGG": 3, "III": 3, "IGG": 3}
_WHOLE_STAGE = 3  # shards the parameters, too
# Keys that only some strategies set: an edit removes those of another one.
STRATEGY_KEYS = ("mics_shard_size", "mics_hierarchical_params_gather", "zero_hpz_partition_size")

# Of ZeRO++: they round what is sent.
QUANTISING_KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def zero_settings(target: Target) -> dict[str, object]:
    """Return the keys of ``zero_optimization``.

    Raises:
        UsageError: the stage of the target cannot offload what it asks for.
    """
    stage = _STAGES[target.triple]
    zero: dict[str, object] = {"stage": stage}
    if target.triple == "III":
        zero |= {"mics_shard_size": target.group_size, "mics_hierarchical_params_gather": False}
    if target.triple == "IGG":
        zero |= {"zero_hpz_partition_size": target.group_size}
    if stage == _WHOLE_STAGE:
        zero["overlap_comm"] = True
    if target.offload:
        if not stage:
            raise UsageError("DeepSpeed cannot offload the optimizer at stage 0, which the plan wants")
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if target.offload.moves_parameters:
        if stage != _WHOLE_STAGE:
            raise UsageError(f"DeepSpeed offloads parameters at stage 3 only, the plan wants stage {stage}")
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def render(target: Target) -> Rendered:
    """Return a configuration file."""
    caveats: tuple[str, ...] = ()
    if target.triple == "III":
        caveats = (
            "MiCS was removed in DeepSpeed 0.19.8, which refuses this file",
            "sharded initialisation needs deepspeed.zero.MiCS_Init",
        )
    if target.triple == "IGG":
        caveats = (
            "hpZ keeps a second copy of the parameters in each group; the first gather of a step is over all ranks",
        )
    body = {"gradient_accumulation_steps": target.micro_batches, "zero_optimization": zero_settings(target)}
    return Rendered(
        text=json.dumps(body, indent=2) + "\n",
        suffix=".json",
        min_version="0.10" if target.triple == "IGG" else "0.9",
        caveats=caveats,
    )


DEEPSPEED = TrainingFramework(
    name="deepspeed",
    observed_as=Framework.DEEPSPEED,
    trace_marks=("deepspeed", "PreBackwardFunctionForModule", "PostBackwardFunctionModule", "ZeroStage3"),
    fidelity=fidelities(exact="NNN NNG NGG III GGG", approximate="IGG"),
    variants=frozenset({("GGG", Variant.HPZ), ("GGG", Variant.QUANTISED)}),
    render=render,
)
