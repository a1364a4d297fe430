"""Finds out whose file it is, and lets that framework's edit change it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING

from paro_advise.advisor.edits.accelerate import edit_accelerate
from paro_advise.advisor.edits.deepspeed import edit_deepspeed
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
    caveats = [f"{kind} {made.min_version} or later, {made.fidelity}", *made.caveats]
    caveats += framework_caveats(plan, kind)
    if kind == "megatron":
        caveats += megatron_caveats(text, plan)
    ending = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix(mark).replace("\r\n", "\n")
    try:
        new = _EDITS[kind](plain, plan)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"the file must be a {kind} configuration: {type(error).__name__}: {error}", where=name
        ) from error
    return Edit(framework=kind, text=mark + new.replace("\n", ending), caveats=tuple(caveats))


def _kind(name: str, text: str) -> str:
    suffix = PurePath(name).suffix.lower()
    if suffix == ".py":
        return "python"
    if suffix == ".json" and any(key in text for key in ('"zero_optimization"', '"train_micro_batch_size_per_gpu"',
                                                         '"train_batch_size"')):  # fmt: skip
        return "deepspeed"
    if suffix in (".yaml", ".yml") and "distributed_type" in text:
        return "accelerate"
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
