"""``paro-advise run``: an unchanged training job under a plan."""

from __future__ import annotations

import os
import tempfile
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import StalePlanError, UsageError
from paro_advise.runtime.capture.constants import DEFAULT_STEPS
from paro_advise.runtime.job import (
    APPLIED_VARIABLE,
    DRIFT_VARIABLE,
    JOB_VARIABLE,
    PLAN_VARIABLE,
    applied_marks,
    job_environment,
    refused_marks,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SIGNALLED = 128  # exit codes from here on tell of a signal


@click.command("run", short_help="Run an unchanged training job under a plan.")
@click.option("--plan", "plan_file", required=True, metavar="FILE", help="The plan that `recommend` wrote.")
@click.option("--capture", "folder", metavar="DIR", help="Also record steps, as `capture -o DIR` does.")
@click.option("--steps", metavar="FIRST:END", help=f"Steps to record, from 0.  [default: {DEFAULT_STEPS}]")
@click.option(
    "--job", metavar="DIR", help="Folder through which `switch` reaches the running job; on all nodes or none."
)
@click.option(
    "--allow-drift",
    multiple=True,
    type=click.Choice(["world_size", "gpus_per_node", "parameter_count"]),
    help="Run although this fact differs from the plan's.",
)
@click.option("--force", is_flag=True, help="Replace the traces of an earlier capture.")
@click.argument("job_command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    *,
    plan_file: str,
    folder: str | None,
    steps: str | None,
    job: str | None,
    allow_drift: tuple[str, ...],
    force: bool,
    job_command: tuple[str, ...],
) -> int:
    """Run COMMAND under a plan; nothing in it needs to change.

    What the script asks of FSDP2, FSDP1, DDP, ZeroRedundancyOptimizer or DeepSpeed is done by the
    bundled runtime under the plan's strategy; losses and gradients stay those of the script. What
    cannot be mapped stops the job before its first step. The exit code is the job's, or the refusal's
    own where a rank refuses the plan: 4 if it is for another job.

    \b
    Examples:
      paro-advise run --plan plan.json -- torchrun --nproc-per-node 8 train.py
      paro-advise run --plan plan.json --capture after -- torchrun --nproc-per-node 8 train.py
    """
    from paro_advise.advisor.commands.jobs.capture import summary
    from paro_advise.advisor.commands.jobs.capture_folder import replacing_capture
    from paro_advise.policies.plan import Verdict, check_runnable, kept_text, read_plan
    from paro_advise.runtime.capture.request import CaptureRequest
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    for name, given in (("--capture", folder), ("--job", job)):
        refuse_remote_folder(given, name)
    if job is not None:
        refuse_empty(job, "the folder of --job")
    if folder is None and (steps or force):
        raise UsageError("--steps and --force need --capture")
    steps = steps or DEFAULT_STEPS
    _refuse_pipe(plan_file)
    plan = read_plan(plan_file)
    check_runnable(plan)
    if plan.verdict == Verdict.KEEP:
        click.echo(f"paro-advise: {kept_text(plan)}; the job runs unchanged", err=True)
    elif plan.verdict == Verdict.MEASURE_FIRST:
        click.echo(f"paro-advise: warning: the plan says: {plan.text}", err=True)
    changes = {PLAN_VARIABLE: str(Path(plan_file).absolute()), DRIFT_VARIABLE: ",".join(allow_drift)}
    if job:
        changes[JOB_VARIABLE] = str(Path(job).absolute())
    request = CaptureRequest.of(folder, steps) if folder is not None else None
    if request:
        changes |= request.to_environment()
    replacing = replacing_capture(request.folder, force=force) if request else nullcontext()
    with replacing:
        code, is_applied = _run_marked(job_command, changes)
    if request:
        summary(request, code, plan_file)
    if code == 0 and not is_applied and plan.verdict != Verdict.KEEP:
        raise StalePlanError(
            "the job ended without applying the plan",
            hint="its Python needs paro-advise, its launcher must pass PYTHONPATH and PARO_* on to the ranks, and "
            "its script must use FSDP2, FSDP1, DDP, ZeroRedundancyOptimizer or DeepSpeed. If it printed that it runs "
            "under the plan, its ranks could write neither to this node's temporary files nor beside the plan",
        )
    return code


def _refuse_pipe(plan_file: str) -> None:
    """Refuse what can be read once only.

    Raises:
        UsageError: the plan is no regular file.
    """
    if Path(plan_file).exists() and not Path(plan_file).is_file():
        raise UsageError(
            "--plan must be a file that every rank can read, got a folder or a pipe",
            where=plan_file,
            hint="write the plan to a file first",
        )


def _run_marked(job: Sequence[str], changes: Mapping[str, str]) -> tuple[int, bool]:
    """Run a job with such variables; return its exit code, and whether a rank said that its plan is applied.

    Where a rank has refused the plan, it is that refusal's code, whatever launchers made of it, unless a signal ended
    the job.
    """
    from paro_advise.advisor.commands.child_process import run_job

    with tempfile.TemporaryDirectory(prefix="paro-advise-") as folder:
        places = Path(folder) / "applied", Path(changes[PLAN_VARIABLE])
        applied, refused = applied_marks(*places), refused_marks(*places)
        try:
            code = run_job(job, job_environment(os.environ, {**changes, APPLIED_VARIABLE: str(applied[0])}))
            refusal = next(filter(None, map(_code_in, refused)), None)
            return refusal if refusal and code < _SIGNALLED else code, any(path.exists() for path in applied)
        finally:
            for path in (applied[1], refused[1]):
                with suppress(OSError):
                    path.unlink()


def _code_in(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
