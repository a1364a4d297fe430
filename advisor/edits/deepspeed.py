"""DeepSpeed's JSON configuration: only the keys that say how states are sharded are changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.json_text import remove_key, set_value, without_comments
from paro_advise.advisor.edits.result import check_fact, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.deepspeed import STRATEGY_KEYS, zero_settings
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan

_OFFLOADS_PARAMETERS = 3  # the only stage that can


def edit_deepspeed(text: str, plan: Plan) -> str:
    """Set the keys of ``zero_optimization``; every other character stays.

    Raises:
        UsageError: not such a file, or it asks for what the plan cannot have.
        StalePlanError: it is for another number of micro-batches.
    """
    table = json.loads(without_comments(text)) if text.strip() else {}
    passes = table.get("gradient_accumulation_steps") if isinstance(table, dict) else None
    check_fact(plan, "gradient_accumulation_steps", plan.preconditions.micro_batches, passes)
    wanted = zero_settings(as_written(target_of(plan)))
    zero = table.get("zero_optimization") if isinstance(table, dict) else None
    if zero is not None and not isinstance(zero, dict):
        raise UsageError(
            f"zero_optimization must be an object, got {json.dumps(zero)[:40]}", hint='write {"stage": ...} there'
        )
    offload = (zero or {}).get("offload_param") or {}
    if not isinstance(offload, dict):
        raise UsageError(f"zero_optimization.offload_param must be an object, got {json.dumps(offload)[:40]}")
    if wanted["stage"] != _OFFLOADS_PARAMETERS and offload.get("device", "none") != "none":
        raise UsageError(
            f"parameters can be offloaded in stage 3 only, the plan wants stage {wanted['stage']}",
            hint="remove zero_optimization.offload_param first",
        )
    for key in STRATEGY_KEYS:
        if key not in wanted:
            text = remove_key(text, ("zero_optimization", key))
    for key, value in wanted.items():
        text = set_value(text, ("zero_optimization", key), value)
    return text
