"""Leads the frameworks' entry points to our runtime."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.errors import ParoAdviseError, UsageError
from paro_advise.runtime.job import JOB_VARIABLE, PLAN_VARIABLE
from paro_advise.runtime.messages import tell

if TYPE_CHECKING:
    from paro_advise.runtime.adapters.session import Session


def redirect(plan_path: str, job: str | None) -> Session | None:
    """Redirect FSDP2, FSDP1, DDP, ZeroRedundancyOptimizer and DeepSpeed to a plan.

    Args:
        plan_path: the plan's file.
        job: folder through which a running job takes new plans; None for none.

    Returns:
        The session, None if the plan keeps the run as it is.

    Raises:
        InputError: the plan cannot be read.
        UsageError: it wants what the runtime cannot do.
    """
    from paro_advise.policies.plan import Verdict, check_runnable, read_plan
    from paro_advise.runtime.adapters.session import Session

    plan = read_plan(plan_path)
    if plan.verdict == Verdict.KEEP:
        if job:
            tell("the plan keeps the run as it is, so that `paro-advise switch` cannot reach this job")
        return None
    check_runnable(plan)
    session = Session(plan, job)
    # Our runtime must have imported torch's originals before they are replaced.
    import paro_advise.runtime.sharding.shard  # noqa: F401
    from paro_advise.runtime.adapters import classic, fsdp2, hooks, lightning, raw_errors
    from paro_advise.runtime.adapters.deepspeed import initialize as deepspeed
    from paro_advise.runtime.dtensor_calls import let_dtensors_mix

    let_dtensors_mix()
    raw_errors.install(session)
    session.collectives.install()
    hooks.Hooks(session).install()
    fsdp2.install(session)
    classic.install(session)
    lightning.install(session)
    deepspeed.install(session)
    return session


def use_plan(plan: str, beside: str = "") -> None:
    """Let the rest of this script train under a plan; call it before the model is wrapped.

    Under ``paro-advise run``, which has redirected the process already, it does nothing. Ends the
    process with the reason if the plan cannot be read, or another one is in force.

    Args:
        plan: path of the plan's file.
        beside: a file from whose folder the path counts, as a rule ``__file__``.
    """
    path = Path(beside).resolve().parent / plan if beside else Path(plan)
    if PLAN_VARIABLE in os.environ:
        return
    try:
        if not _is_in_force(path):
            redirect(str(path), os.environ.get(JOB_VARIABLE))
    except ParoAdviseError as error:
        sys.exit("\n".join(error.lines()))


def _is_in_force(path: Path) -> bool:
    """Tell whether this process trains under the plan already.

    Raises:
        UsageError: it trains under another one.
    """
    from paro_advise.policies.plan import read_plan
    from paro_advise.runtime.adapters.session import Session

    if Session.of_process is None:
        return False
    running, asked = Session.of_process.plan.plan_id, read_plan(str(path)).plan_id
    if running != asked:
        raise UsageError(
            f"a process trains under one plan, got {asked} after {running}",
            where=str(path),
            hint="name the same file everywhere",
        )
    return True
