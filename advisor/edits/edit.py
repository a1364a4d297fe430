"""What an edit of a file is, and which one fits a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from paro_advise.advisor.plan_text import as_run
from paro_advise.errors import StalePlanError, UsageError
from paro_advise.policies.exports import Target, export

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A file as it should be.

    Attributes:
        framework: whose file it is.
        text: the new content.
        caveats: what to know about it.
    """

    framework: str
    text: str
    caveats: tuple[str, ...]


def edited(plan: Plan, name: str, text: str, plan_name: str) -> Edit:
    """Return a file changed so that it runs a plan.

    Args:
        plan: what to run.
        name: of the file.
        text: its content.
        plan_name: how the file should name the plan, for scripts.

    Raises:
        UsageError: the file is of no known kind, or cannot express the plan.
        StalePlanError: the file is for another job than the plan.
    """
    if plan.verdict == "keep":
        return Edit(framework="any", text=text, caveats=("the plan keeps the run as it is",))
    kind = _kind(name, text)
    if kind == "python":
        from paro_advise.advisor.edits.script import edit_script

        return edit_script(text, plan_name)
    from paro_advise.advisor.edits.configs import EDITORS

    if not plan.preconditions.gpus_per_node or not plan.preconditions.world_size:
        raise UsageError("a plan must say how many ranks it is for", where=f"plan {plan.plan_id}")
    made = export(kind, target_of(plan))
    caveats = [f"{kind} {made.min_version} or later, {made.fidelity}", *made.caveats]
    caveats += as_run(plan, kind)
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    ending = "\r\n" if "\r\n" in text else "\n"
    plain = text.removeprefix(mark).replace("\r\n", "\n")
    try:
        new = EDITORS[kind](plain, plan)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise UsageError(
            f"the file must be a {kind} configuration: {type(error).__name__}: {error}", where=name
        ) from error
    return Edit(framework=kind, text=mark + new.replace("\n", ending), caveats=tuple(caveats))


def target_of(plan: Plan) -> Target:
    """Return what the chosen strategy asks of a framework."""
    facts = plan.preconditions
    return Target(
        triple=plan.chosen.triple,
        group_size=plan.chosen.group_size or facts.gpus_per_node,
        world_size=facts.world_size,
        micro_batches=facts.micro_batches,
        offload=plan.chosen.offload,
        variant=plan.chosen.variant,
    )


def check_fact(plan: Plan, name: str, planned: int, found: object) -> None:
    """Hold a number in a file against the plan's.

    Raises:
        StalePlanError: they differ.
    """
    if isinstance(found, int) and not isinstance(found, bool) and found != planned:
        raise StalePlanError(
            f"the plan must fit the file: made for {name} {planned}, the file says {found}",
            where=f"plan {plan.plan_id}",
            hint="capture the job as it is and recommend again",
        )


def _kind(name: str, text: str) -> str:
    suffix = PurePath(name).suffix.lower()
    if suffix == ".py":
        return "python"
    if suffix == ".json" and any(key in text for key in ('"zero_optimization"', '"train_micro_batch_size_per_gpu"',
                                                         '"train_batch_size"')):  # fmt: skip
        return "deepspeed"
    if suffix in (".yaml", ".yml") and "distributed_type" in text:
        return "accelerate"
    if (suffix == ".toml" and text.startswith("[parallelism]")) or "\n[parallelism]" in text:
        return "torchtitan"
    if suffix in (".sh", ".bash", ".slurm", ".sbatch") and "megatron" in text.lower() + name.lower():
        return "megatron"
    raise UsageError(
        "a target must be a DeepSpeed JSON, an accelerate YAML, a torchtitan TOML, a Megatron launch script or a "
        "Python training script, got none of them",
        where=name,
        hint="`recommend --export` writes a plan for a framework, `run --plan` runs any of their scripts",
    )
