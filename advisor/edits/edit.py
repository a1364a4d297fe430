"""Finds out whose file it is, and lets that framework's edit change it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.accelerate import accelerate_caveats, edit_accelerate, edit_accelerate_deepspeed
from paro_advise.advisor.edits.deepspeed import deepspeed_caveats, edit_deepspeed, is_of_deepspeed
from paro_advise.advisor.edits.megatron import edit_megatron, is_of_megatron, megatron_caveats
from paro_advise.advisor.edits.result import Edit, framework_caveats, refuse_no_gain, target_of
from paro_advise.advisor.edits.script import edit_script
from paro_advise.advisor.edits.torchtitan import edit_torchtitan
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.registry import export
from paro_advise.policies.plan import Verdict, check_runnable

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.policies.plan import Plan

_EDITS: dict[str, Callable[[str, Plan], str]] = {
    "deepspeed": edit_deepspeed,
    "accelerate": edit_accelerate,
    "torchtitan": edit_torchtitan,
    "megatron": edit_megatron,
}

_CAVEATS: dict[str, Callable[[str, Plan], list[str]]] = {
    "deepspeed": deepspeed_caveats,
    "accelerate": accelerate_caveats,
    "megatron": megatron_caveats,
}
_DISTRIBUTED_TYPE = re.compile(r"(?m)^distributed_type[ \t]*:[ \t]*[\"']?(\w*)")


def edit_file(plan: Plan, name: str, text: str, plan_name: str, *, whatever_it_brings: bool = False) -> Edit:
    """Return a file changed so that it runs a plan.

    Args:
        plan: what to run.
        name: of the file.
        text: its content.
        plan_name: how the file should name the plan, for scripts.
        whatever_it_brings: do not ask whether the change is expected to make the run faster.

    Raises:
        NoGainError: the change is not expected to make the run faster.
        UsageError: the file is of no known kind, or cannot express the plan.
        StalePlanError: the file is for another job than the plan.
    """
    kind = _kind(name, text)
    if plan.verdict == Verdict.KEEP:
        return Edit(framework=kind, text=text, caveats=("the plan keeps the run as it is",))
    if not whatever_it_brings:
        refuse_no_gain(plan, kind)
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    if kind == "python":
        check_runnable(plan)
        edited = edit_script(text.removeprefix(mark), plan_name)
        return replace(edited, text=mark + edited.text)
    if not plan.preconditions.gpus_per_node or not plan.preconditions.world_size:
        raise UsageError("a plan must say how many ranks it is for", where=f"plan {plan.plan_id}")
    made = export(kind, target_of(plan))
    caveats = [made.claim, *made.caveats]
    caveats += framework_caveats(plan, kind)
    ending = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix(mark).replace("\r\n", "\n")
    is_deepspeed_yaml = kind == "deepspeed" and PurePath(name).suffix.lower() != ".json"
    try:
        if kind in _CAVEATS and not is_deepspeed_yaml:
            caveats += _CAVEATS[kind](plain, plan)
        new = edit_accelerate_deepspeed(plain, plan) if is_deepspeed_yaml else _EDITS[kind](plain, plan)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"the file must be a {kind} configuration: {type(error).__name__}: {error}", where=name
        ) from error
    return Edit(framework=kind, text=mark + new.replace("\n", ending), caveats=tuple(caveats))


def _kind(name: str, text: str) -> str:
    suffix = PurePath(name).suffix.lower()
    if suffix == ".py":
        return "python"
    if suffix == ".json" and is_of_deepspeed(text):
        return "deepspeed"
    if suffix in (".yaml", ".yml") and (named := _DISTRIBUTED_TYPE.search(text)):
        return "deepspeed" if named[1] == "DEEPSPEED" else "accelerate"
    if suffix == ".toml" and "\n[parallelism]" in f"\n{text}":
        return "torchtitan"
    if suffix in (".sh", ".bash", ".slurm", ".sbatch") and is_of_megatron(name, text):
        return "megatron"
    raise UsageError(
        "a target must be a DeepSpeed JSON, an accelerate YAML, a torchtitan TOML, a Megatron launch script or a "
        "Python training script, got none of them",
        where=name,
        hint="`recommend --export` writes a plan for a framework, `run --plan` runs any of their scripts",
    )
