"""accelerate's YAML configuration: only the keys that say how states are sharded are changed."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.edits.deepspeed import refuse_offload
from paro_advise.advisor.edits.result import check_fact, check_model_parallel, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.accelerate import settings
from paro_advise.policies.frameworks.deepspeed import zero_settings
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan

# accelerate's own conversion (`accelerate to-fsdp2`) leaves these out.
_FSDP1_KEYS = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)


def edit_accelerate(text: str, plan: Plan) -> str:
    """Set the keys that say how states are sharded; comments and order stay.

    Raises:
        UsageError: not such a file, or ruamel.yaml is not installed.
        StalePlanError: it is for another number of ranks.
    """
    yaml, table = _yaml(text)
    if not isinstance(table, dict):
        raise UsageError("an accelerate file must be a mapping")
    check_fact(plan, "num_processes", plan.preconditions.world_size, table.get("num_processes"))
    _refuse_other_parallelism(table, plan)
    wanted = settings(as_written(target_of(plan)))
    tables = {"fsdp_config": wanted.fsdp_config, "parallelism_config": wanted.parallelism_config}
    for key in tables:
        if key in table and not isinstance(table[key], dict):
            if table[key] is not None:
                raise UsageError(f"{key} must be a mapping")
            del table[key]
    for name in _gone_with_fsdp1(table) if wanted.fsdp_config else ():
        del table["fsdp_config"][name]
    policy = table["fsdp_config"].get("fsdp_auto_wrap_policy") if table.get("fsdp_config") else None
    _put(table, "distributed_type", wanted.distributed_type)
    for key, inner in tables.items():
        if inner is None:
            table.pop(key, None)
            continue
        found = table.setdefault(key, {})
        for name, value in inner.items():
            if not (name == "fsdp_auto_wrap_policy" and policy):
                _put(found, name, value)
    return _written(yaml, table)


def edit_accelerate_deepspeed(text: str, plan: Plan) -> str:
    """Set the stage of ZeRO in a file by which accelerate starts DeepSpeed.

    Raises:
        UsageError: not such a file, or it cannot say what the plan asks for.
        StalePlanError: it is for other numbers of ranks or micro-batches.
    """
    yaml, table = _yaml(text)
    found = table.get("deepspeed_config") if isinstance(table, dict) else None
    if not isinstance(found, dict):
        raise UsageError("an accelerate file for DeepSpeed must have a mapping deepspeed_config")
    if found.get("deepspeed_config_file"):
        raise UsageError(
            "what DeepSpeed does stands in another file",
            where=str(found["deepspeed_config_file"])[:200],
            hint="apply the plan to that one",
        )
    check_fact(plan, "num_processes", plan.preconditions.world_size, table.get("num_processes"))
    passes = found.get("gradient_accumulation_steps")
    check_fact(plan, "gradient_accumulation_steps", plan.preconditions.micro_batches, passes)
    wanted = zero_settings(as_written(target_of(plan)))
    stage = int(str(wanted.pop("stage")))
    wanted.pop("overlap_comm", None)
    if offloads := [key for key in ("offload_optimizer", "offload_param") if wanted.pop(key, None)]:
        wanted |= {f"{key}_device": "cpu" for key in offloads}
    if others := [key for key in wanted if not key.endswith("_device")]:
        raise UsageError(
            f"accelerate must read {others[0]} from a DeepSpeed JSON",
            hint="write one by `recommend --export deepspeed=ds.json`, name it as deepspeed_config_file",
        )
    for key in ("offload_param", "offload_optimizer"):
        refuse_offload(key, found.get(f"{key}_device"), stage, f"deepspeed_config.{key}_device")
    for key, value in {"zero_stage": stage, **wanted}.items():
        _put(found, key, value)
    return _written(yaml, table)


def accelerate_caveats(text: str, plan: Plan) -> list[str]:
    """Say that a file for FSDP1 becomes one for FSDP2."""
    _, table = _yaml(text)
    if not isinstance(table, dict) or settings(as_written(target_of(plan))).fsdp_config is None:
        return []
    gone = _gone_with_fsdp1(table)
    if not gone:
        return []
    return [
        f"the file is for FSDP1 and becomes one for FSDP2, without {', '.join(gone)}, as `accelerate to-fsdp2` makes it"
    ]


def _gone_with_fsdp1(table: dict[str, object]) -> list[str]:
    """Return the keys of a file that FSDP2 does not have."""
    found = table.get("fsdp_config")
    return [key for key in _FSDP1_KEYS if key in found] if isinstance(found, dict) else []


def _refuse_other_parallelism(table: dict[str, object], plan: Plan) -> None:
    """Refuse a file whose model is cut in other ways too, of whose ranks a plan's are only a part.

    Raises:
        UsageError: another library than FSDP cuts the model.
        StalePlanError: tensor, context or sequence parallelism.
    """
    if table.get("distributed_type") == "MEGATRON_LM" or table.get("megatron_lm_config"):
        raise UsageError(
            "an accelerate file must shard by FSDP or DeepSpeed, or replicate, this one names Megatron-LM",
            hint="apply the plan to the flags of a Megatron launch script",
        )
    found = table.get("parallelism_config")
    sizes = [f"parallelism_config_{name}_size" for name in ("tp", "cp", "sp")]
    check_model_parallel(plan, sizes, found if isinstance(found, dict) else {})


def _yaml(text: str) -> tuple[Any, Any]:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError as error:
        raise UsageError(
            "editing a YAML file needs ruamel.yaml, which is not installed",
            hint="pip install 'paro-advise[apply]'",
        ) from error
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 1 << 16
    inner = re.search(r"^[\w-]+:[ \t]*(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*( {1,16})[\w-]+:", text, re.MULTILINE)
    width = len(inner.group(1)) if inner else 2
    yaml.indent(mapping=width)
    listed = re.search(r"^( *)[\w-]+:[^\n]*\n( *)- ", text, re.MULTILINE)
    if listed and len(listed.group(2)) > len(listed.group(1)):  # lists indented below their key
        yaml.indent(mapping=width, sequence=4, offset=2)
    try:
        return yaml, yaml.load(text)
    except YAMLError as error:
        raise UsageError(f"the file must be YAML: {error}") from error


def _written(yaml: Any, table: object) -> str:
    out = io.StringIO()
    yaml.dump(table, out)
    return out.getvalue()


def _put(table: dict[str, object], key: str, value: object) -> None:
    if table.get(key) != value:
        table[key] = value
