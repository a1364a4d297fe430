"""What an edit of a file is, and the checks that all edits share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import StalePlanError
from paro_advise.policies.frameworks.model import Target
from paro_advise.policies.plan import as_framework_runs, same_way
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.policies.strategy_name import short_choice_name

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
    """Compare a number in a file with the plan's.

    Raises:
        StalePlanError: they differ.
    """
    if isinstance(found, int) and not isinstance(found, bool) and found != planned:
        raise StalePlanError(
            f"the plan must fit the file: made for {name} {planned}, the file says {found}",
            where=f"plan {plan.plan_id}",
            hint="capture the job as it is and recommend again",
        )


def framework_caveats(plan: Plan, framework: str) -> list[str]:
    """Say what a framework's own settings make of a plan, and what that should bring."""
    real = as_framework_runs(plan, framework)
    if real is None:
        if plan.chosen.collectives != CollectiveBackend.HO_RING:
            return []
        return ["without HO-Ring, which `paro-advise run` brings: slower than the plan predicts"]
    if same_way(real, plan.chosen):
        return []
    one, other = real.predicted.speedup, plan.chosen.predicted.speedup
    ahead = f"{one.p50:.2f}x ({one.p10:.2f} to {one.p90:.2f})"
    runs = f"so {framework} runs {short_choice_name(real)}"
    return [f"{runs}: predicted {ahead}, not {other.p50:.2f}x as with `paro-advise run`"]
