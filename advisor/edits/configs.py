"""Configuration files of frameworks: only the keys that say how states are sharded are changed."""

from __future__ import annotations

import io
import json
import re
import shlex
from typing import TYPE_CHECKING, Any

from paro_advise.advisor.edits.edit import check_fact, target_of
from paro_advise.advisor.edits.json_text import remove_key, set_value
from paro_advise.errors import UsageError
from paro_advise.policies.exports import export

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.policies.plan import Plan

# Keys that another strategy would have set.
_DEEPSPEED_KEYS = ("mics_shard_size", "mics_hierarchical_params_gather", "zero_hpz_partition_size")
_TAKEN = "\0"
_MEGATRON_FLAGS = {
    "--use-distributed-optimizer": 0,
    "--use-megatron-fsdp": 0,
    "--data-parallel-sharding-strategy": 1,
    "--outer-dp-sharding-strategy": 1,
    "--num-distributed-optimizer-instances": 1,
    "--ckpt-format": 1,
    "--init-model-with-meta-device": 0,
    "--overlap-grad-reduce": 0,
    "--overlap-param-gather": 0,
}


# A plain word, a variable, or either in quotes; anything cleverer is refused rather than guessed.
_VALUE = r"""(?:[\w./-]+|\$\w+|\$\{\w+\}|"[\w./${}-]+"|'[\w./-]+')"""
_MEGATRON_PATTERN = re.compile(
    r"(?<![^\s\"'(=])(?:"
    + "|".join(re.escape(flag) + (rf"[ =]{_VALUE}" if takes else "") for flag, takes in _MEGATRON_FLAGS.items())
    + r")(?=[\s\\\"')]|$)"
)
_MEGATRON_NAMES = re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, _MEGATRON_FLAGS)) + r")(?![\w-])")


def _deepspeed(text: str, plan: Plan) -> str:
    table = json.loads(text) if text.strip() else {}
    passes = table.get("gradient_accumulation_steps") if isinstance(table, dict) else None
    check_fact(plan, "gradient_accumulation_steps", plan.preconditions.micro_batches, passes)
    wanted = json.loads(export("deepspeed", target_of(plan)).text)["zero_optimization"]
    zero = table.get("zero_optimization") if isinstance(table, dict) else None
    offload = (zero or {}).get("offload_param") or {}
    if wanted["stage"] < 3 and offload.get("device", "none") != "none":
        raise UsageError(
            f"parameters can be offloaded in stage 3 only, the plan wants stage {wanted['stage']}",
            hint="remove zero_optimization.offload_param first",
        )
    for key in _DEEPSPEED_KEYS:
        if key not in wanted:
            text = remove_key(text, ("zero_optimization", key))
    for key, value in wanted.items():
        text = set_value(text, ("zero_optimization", key), value)
    return text


def _yaml(text: str) -> tuple[Any, Any]:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError
    except ImportError as error:
        raise UsageError(
            "a YAML file can be changed with ruamel.yaml only, which is not installed",
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


def _accelerate(text: str, plan: Plan) -> str:
    yaml, table = _yaml(text)
    if not isinstance(table, dict):
        raise UsageError("an accelerate file must be a mapping")
    check_fact(plan, "num_processes", plan.preconditions.world_size, table.get("num_processes"))
    _, wanted = _yaml(export("accelerate", target_of(plan)).text)
    for key in ("fsdp_config", "parallelism_config"):
        if key in table and not isinstance(table[key], dict):
            if table[key] is not None:
                raise UsageError(f"{key} must be a mapping")
            del table[key]
    policy = table["fsdp_config"].get("fsdp_auto_wrap_policy") if table.get("fsdp_config") else None
    for key, value in wanted.items():
        if key in ("compute_environment", "num_processes"):
            continue
        if isinstance(value, dict):
            inner = table.setdefault(key, {})
            for name, item in value.items():
                if not (name == "fsdp_auto_wrap_policy" and policy):
                    _put(inner, name, item)
        else:
            _put(table, key, value)
    if "parallelism_config" not in wanted:
        table.pop("parallelism_config", None)
        table.pop("fsdp_config", None)
    out = io.StringIO()
    yaml.dump(table, out)
    return out.getvalue()


def _put(table: Any, key: str, value: Any) -> None:
    if table.get(key) != value:
        table[key] = value


def _torchtitan(text: str, plan: Plan) -> str:
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ImportError as error:
        raise UsageError(
            "a TOML file can be changed with tomlkit only, which is not installed",
            hint="pip install 'paro-advise[apply]'",
        ) from error
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UsageError(f"the file must be TOML: {error}") from error
    section: Any = document.get("parallelism")
    if not isinstance(section, dict):
        raise UsageError("a torchtitan file must have one table named parallelism")
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree"):
        check_fact(plan, f"parallelism.{name}", 1, section.get(name))
    code = export("torchtitan", target_of(plan)).text
    for name, value in re.findall(r'parallelism\.(\w+) = ("?\w+"?)', code):
        item: Any = json.loads(value)
        if section.get(name) != item:
            section[name] = item
    return tomlkit.dumps(document)


def _megatron(text: str, plan: Plan) -> str:
    """Change flags of a launch script: take those of sharding out, put the plan's where the first stood.

    Raises:
        UsageError: the script is cleverer than that.
    """
    wanted = shlex.split(export("megatron", target_of(plan)).text)
    hidden = re.sub(r"(?m)^[ \t]*#.*$", lambda line: " " * len(line.group()), text)  # comments, at equal places
    found = []
    for match in _MEGATRON_PATTERN.finditer(hidden):
        words = match.group(0).replace("=", " ").split()
        if words[0] != "--ckpt-format" or "--ckpt-format" in wanted:
            found.append((match.start(), match.end(), words))
    matched = {start for start, _, _ in found}
    names = [
        m.group() for m in _MEGATRON_NAMES.finditer(hidden) if m.start() not in matched and m.group() != "--ckpt-format"
    ]
    flags = [words[0] for _, _, words in found]
    if names or len(set(flags)) < len(flags):
        raise UsageError(
            f"a Megatron script must name each flag once and plainly, {(names or flags)[0]} is not",
            hint=f"change it by hand to: {' '.join(wanted) or '(none: plain data parallelism)'}",
        )
    if [word for _, _, words in found for word in words] == wanted:
        return text
    if not found:
        raise UsageError(
            "a Megatron script must name one of the flags that say how states are sharded, this one names none",
            hint=f"add to its arguments: {' '.join(wanted) or '(none: plain data parallelism)'}",
        )
    for number, (start, end, _) in reversed(list(enumerate(found))):
        text = text[:start] + (_TAKEN if number else " ".join(wanted) or _TAKEN) + text[end:]
    return _without_taken(text)


def _without_taken(text: str) -> str:
    """Remove the marks of flags that were taken out, and lines that held nothing else."""
    kept: list[str] = []
    for line in text.splitlines(keepends=True):
        if _TAKEN not in line:
            kept.append(line)
            continue
        rest = line.replace(f"{_TAKEN} ", "").replace(_TAKEN, "")
        if rest.strip() not in ("", "\\"):
            kept.append(rest)
        elif rest.strip() == "" and kept and kept[-1].rstrip().endswith("\\"):
            # It was the last of a continued command: the line before now is.
            kept[-1] = kept[-1].rstrip()[:-1].rstrip() + "\n"
    return "".join(kept)


EDITORS: dict[str, Callable[[str, Plan], str]] = {
    "deepspeed": _deepspeed,
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
