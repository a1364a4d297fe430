"""torchtitan's TOML configuration: only the keys that say how states are sharded are changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.edits.result import check_fact, check_model_parallel, target_of
from paro_advise.errors import UsageError
from paro_advise.policies.frameworks.registry import as_written
from paro_advise.policies.frameworks.torchtitan import parallelism_settings

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan


def edit_torchtitan(text: str, plan: Plan) -> str:
    """Set the keys of the table ``parallelism``; comments and order stay.

    Raises:
        UsageError: not such a file, or tomlkit is not installed.
        StalePlanError: it uses other parallelism than the plan knows.
    """
    try:
        import tomlkit
        from tomlkit.exceptions import TOMLKitError
    except ImportError as error:
        raise UsageError(
            "editing a TOML file needs tomlkit, which is not installed",
            hint="pip install 'paro-advise[apply]'",
        ) from error
    try:
        document = tomlkit.parse(text)
    except TOMLKitError as error:
        raise UsageError(f"the file must be TOML: {error}") from error
    section = document.get("parallelism")
    if not isinstance(section, dict):
        raise UsageError("a torchtitan file must have one table named parallelism")
    check_fact(plan, "parallelism.expert_parallel_degree", 1, section.get("expert_parallel_degree"))
    degrees = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
    check_model_parallel(plan, degrees, section)
    for name, value in parallelism_settings(as_written(target_of(plan))).items():
        if section.get(name) != value:
            section[name] = value
    return tomlkit.dumps(document)
