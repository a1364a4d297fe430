"""What an edit of a file is, and the checks that all edits share."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from paro_advise.errors import NoGainError, StalePlanError
from paro_advise.policies.frameworks.model import Target
from paro_advise.policies.plan import Verdict, as_framework_runs, same_way
from paro_advise.policies.strategy import CollectiveBackend
from paro_advise.policies.strategy_name import short_choice_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    facts, origin = plan.preconditions, plan.origin
    return Target(
        triple=plan.chosen.triple,
        group_size=plan.chosen.group_size or facts.gpus_per_node,
        world_size=origin.data_parallel_ranks if origin else facts.world_size,
        model_parallel_ranks=origin.model_parallel_ranks if origin else 1,
        micro_batches=facts.micro_batches,
        offload=plan.chosen.offload,
        variant=plan.chosen.variant,
    )


def refuse_no_gain(plan: Plan, framework: str) -> None:
    """Make sure that what a framework makes of a plan is expected to be faster than the run as it is.

    Raises:
        NoGainError: it is not, or nothing is known well enough to say so.
    """
    where = f"plan {plan.plan_id}"
    if plan.verdict in (Verdict.KEEP, Verdict.MEASURE_FIRST):
        keeps = plan.verdict == Verdict.KEEP
        raise NoGainError(
            f"a plan must recommend a change, this one says to {'keep the run as it is' if keeps else 'measure first'}",
            where=where,
            hint="pass --force to write it all the same"
            if keeps
            else "measure what it asks for and recommend again, or pass --force",
        )
    real = plan.chosen if framework == "python" else as_framework_runs(plan, framework) or plan.chosen
    speedup = real.predicted.speedup
    if speedup.p50 <= 1.0:
        what = "a plan" if framework == "python" else f"what {framework} makes of a plan"
        raise NoGainError(
            f"{what} must be predicted faster than the run as it is, "
            f"got {speedup.p50:.2f}x ({speedup.p10:.2f} to {speedup.p90:.2f}) for {short_choice_name(real)}",
            where=where,
            hint="`paro-advise run --plan` runs the plan itself; pass --force to write it all the same",
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


def check_model_parallel(plan: Plan, names: Sequence[str], table: Mapping[str, object]) -> None:
    """Compare how many ranks of a file hold a model together with the plan's.

    Args:
        plan: to apply.
        names: of the settings whose product that is; 1 where one is not set.
        table: of the file.

    Raises:
        StalePlanError: they differ.
    """
    sizes = [table.get(name) for name in names]
    told = prod(size for size in sizes if isinstance(size, int) and not isinstance(size, bool))
    check_fact(plan, "model-parallel ranks", plan.origin.model_parallel_ranks if plan.origin else 1, told)


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
