"""DeepSpeed's JSON configuration: only the keys that say how states are sharded are changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.json_text import remove_key, set_value, without_comments
from paro_advise.advisor.edits.result import check_fact, check_model_parallel, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.deepspeed import QUANTISING_KEYS, STRATEGY_KEYS, zero_settings
from paro_advise.policies.frameworks.model import Variant
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan

_OFFLOADS_PARAMETERS = 3  # the only stage that can


# Beside a batch size, what tells DeepSpeed's configuration from another file that has one.
_OWN_KEYS = {"gradient_accumulation_steps", "gradient_clipping", "optimizer", "bf16", "fp16", "steps_per_print"}


def is_of_deepspeed(text: str) -> bool:
    """Tell whether a JSON file is a configuration of DeepSpeed, by the keys of its outermost object."""
    try:
        table = json.loads(without_comments(text))
    except (ValueError, RecursionError):
        return '"zero_optimization"' in text  # whose edit says what is wrong with it
    if not isinstance(table, dict):
        return False
    is_sized = "train_batch_size" in table and bool(_OWN_KEYS & set(table))
    return "zero_optimization" in table or "train_micro_batch_size_per_gpu" in table or is_sized


def edit_deepspeed(text: str, plan: Plan) -> str:
    """Set the keys of ``zero_optimization``; every other character stays.

    Raises:
        UsageError: not such a file, or it asks for what the plan cannot have.
        StalePlanError: it is for another number of micro-batches.
    """
    table = json.loads(without_comments(text)) if text.strip() else {}
    table = table if isinstance(table, dict) else {}
    target = target_of(plan)
    check_fact(plan, "gradient_accumulation_steps", plan.preconditions.micro_batches, _passes(table, target.world_size))
    tensor = table.get("tensor_parallel")
    check_model_parallel(plan, ["autotp_size"], tensor if isinstance(tensor, dict) else {})
    wanted = zero_settings(as_written(target))
    zero = table.get("zero_optimization")
    if zero is not None and not isinstance(zero, dict):
        raise UsageError(
            f"zero_optimization must be an object, got {json.dumps(zero)[:40]}", hint='write {"stage": ...} there'
        )
    stage = int(str(wanted["stage"]))
    for key in ("offload_param", "offload_optimizer"):
        offload = (zero or {}).get(key) or {}
        if not isinstance(offload, dict):
            raise UsageError(f"zero_optimization.{key} must be an object, got {json.dumps(offload)[:40]}")
        refuse_offload(key, offload.get("device"), stage, f"zero_optimization.{key}")
    for key in STRATEGY_KEYS:
        if key not in wanted:
            text = remove_key(text, ("zero_optimization", key))
    for key, value in wanted.items():
        text = set_value(text, ("zero_optimization", key), value)
    return text


def _passes(table: dict[str, object], world_size: int) -> object:
    """Return the micro-batches of a step as DeepSpeed takes them, None where the configuration says too little."""
    passes = table.get("gradient_accumulation_steps")
    whole, micro = table.get("train_batch_size"), table.get("train_micro_batch_size_per_gpu")
    if isinstance(passes, int) or not isinstance(whole, int) or not isinstance(micro, int) or micro < 1:
        return passes
    return whole // (micro * world_size)


def refuse_offload(what: str, device: object, stage: int, place: str) -> None:
    """Make sure that a stage of ZeRO can offload what a file asks for.

    Raises:
        UsageError: it cannot.
    """
    least, needs = {
        "offload_param": (_OFFLOADS_PARAMETERS, "parameters can be offloaded in stage 3 only"),
        "offload_optimizer": (1, "DeepSpeed must shard the optimizer to offload it"),
    }[what]
    if stage < least and device not in (None, "none"):
        raise UsageError(f"{needs}, the plan wants stage {stage}", hint=f"remove {place} first")


def deepspeed_caveats(text: str, plan: Plan) -> list[str]:
    """Say what stays in a configuration that no prediction knows of."""
    table = json.loads(without_comments(text)) if text.strip() else {}
    zero = table.get("zero_optimization") if isinstance(table, dict) else None
    named = [key for key in QUANTISING_KEYS if isinstance(zero, dict) and zero.get(key)]
    if not named or plan.chosen.variant == Variant.QUANTISED:
        return []
    return [f"{' and '.join(named)} stay and round what is sent, which no prediction here does"]
