"""Whether a plan fits the training process that it is applied to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from paro_advise.errors import StalePlanError
from paro_advise.runtime.adapters.constants import SAME_COUNT
from paro_advise.runtime.job import DRIFT_VARIABLE
from paro_advise.runtime.sharding.agreement import agree

if TYPE_CHECKING:
    from paro_advise.policies.plan import Plan


def same_count(plan: Plan, num_parameters: int) -> bool:
    """Tell whether a model is as large as the one that a plan was made for, but for the padding of shards."""
    planned = plan.preconditions.parameter_count
    return abs(num_parameters - planned) <= SAME_COUNT * planned


def check_like(plan: Plan, before: Plan) -> None:
    """Check that a plan is for the job that another one trains.

    Args:
        plan: the new one.
        before: the one in force, which fits.

    Raises:
        StalePlanError: it is for another job, and the user did not allow that it drifts.
    """
    allowed = set(os.environ.get(DRIFT_VARIABLE, "").split(","))
    mine, theirs = before.preconditions, plan.preconditions
    differing = {
        "world_size": mine.world_size != theirs.world_size,
        "gpus_per_node": mine.gpus_per_node != theirs.gpus_per_node,
        "parameter_count": not same_count(plan, mine.parameter_count),
    }
    for name, differs in differing.items():
        if differs and name not in allowed:
            raise StalePlanError(
                f"the plan must fit the job: made for {name} {getattr(theirs, name)}, the plan in force for "
                f"{getattr(mine, name)}",
                where=f"plan {plan.plan_id}",
                hint=f"recommend from this job's traces, or start the job with --allow-drift {name}",
            )


def agree_on_plan(plan: Plan, *, may_switch: bool) -> None:
    """Make sure that all ranks run under one plan, and that a request to switch reaches all or none.

    Args:
        plan: this rank's.
        may_switch: this rank looks for requests.

    Raises:
        DivergedError: on every rank, if they do not.
        CommunicationError: a rank did not take part.
    """
    agree(
        {
            "plan": plan.plan_id,
            "use of --job": may_switch,
            "use of --allow-drift": sorted(filter(None, os.environ.get(DRIFT_VARIABLE, "").split(","))),
        },
        hint="start `paro-advise run` with one plan file and the same options on all nodes",
    )


def check_facts(plan: Plan, num_parameters: int, *other_counts: int) -> None:
    """Check the plan's preconditions against this job.

    Args:
        plan: the plan.
        num_parameters: of the model.
        other_counts: what a trace of it may show instead.

    Raises:
        StalePlanError: one does not hold, and the user did not allow that it drifts.
    """
    facts = plan.preconditions
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    allowed = set(os.environ.get(DRIFT_VARIABLE, "").split(","))
    now = {
        "world_size": (facts.world_size, dist.get_world_size()),
        "gpus_per_node": (facts.gpus_per_node, int(local) if local.isdecimal() else facts.gpus_per_node),
        "parameter_count": (facts.parameter_count, num_parameters),
    }
    for name, (planned, actual) in now.items():
        same = actual == planned
        if name == "parameter_count":
            same = any(same_count(plan, count) for count in (actual, *other_counts))
        if not same and name not in allowed:
            raise StalePlanError(
                f"the plan must fit the job: made for {name} {planned}, this job has {actual}",
                where=f"plan {plan.plan_id}",
                hint=f"capture this job and recommend again, or pass --allow-drift {name}",
            )
