"""accelerate's YAML configuration: only the keys that say how states are sharded are changed."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.edits.result import check_fact, check_model_parallel, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.accelerate import settings
from paro_advise.policies.frameworks.registry import as_written

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan


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
    out = io.StringIO()
    yaml.dump(table, out)
    return out.getvalue()


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
    listed = re.search(r"^( *)[\w-]+:[^\n]*\n( *)- ", text, re.MULTILINE)
    if listed and len(listed.group(2)) > len(listed.group(1)):  # lists indented below their key
        yaml.indent(mapping=2, sequence=4, offset=2)
    try:
        return yaml, yaml.load(text)
    except YAMLError as error:
        raise UsageError(f"the file must be YAML: {error}") from error


def _put(table: dict[str, object], key: str, value: object) -> None:
    if table.get(key) != value:
        table[key] = value
