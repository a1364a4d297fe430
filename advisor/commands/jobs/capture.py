"""``paro-advise capture``: records traces of an unchanged training job."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from paro_advise.core.capture_files import STEP_LOG_PATTERN, TRACE_PATTERN
from paro_advise.core.plural import plural
from paro_advise.errors import ParoAdviseError
from paro_advise.runtime.capture.constants import DEFAULT_MAX_MB, DEFAULT_STEPS
from paro_advise.runtime.capture.rank_choice import ALL

if TYPE_CHECKING:
    from paro_advise.advisor.facts.capture_log import Captured
    from paro_advise.runtime.capture.request import CaptureRequest


@click.command("capture", short_help="Record traces of an unchanged training job.")
@click.option("-o", "--output", "folder", required=True, metavar="DIR", help="Folder for traces and step logs.")
@click.option(
    "--steps", default=DEFAULT_STEPS, show_default=True, metavar="FIRST:END", help="Steps to profile, from 0."
)
@click.option(
    "--ranks",
    default=ALL,
    show_default=True,
    metavar="all|auto|LIST",
    help="Ranks that write traces: a list such as 0-7,64, or few that show every node and group.",
)
@click.option(
    "--max-trace-mb",
    type=click.IntRange(1),
    default=DEFAULT_MAX_MB,
    show_default=True,
    help="Limit of one rank's plain trace.",
)
@click.option("--force", is_flag=True, help="Replace the traces of an earlier capture.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing beside the job's own output.")
@click.argument("job", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    *, folder: str, steps: str, ranks: str, max_trace_mb: int, force: bool, quiet: bool, job: tuple[str, ...]
) -> int:
    """Run COMMAND and record the chosen steps on every rank; nothing in it needs to change.

    A step ends with the script's first optimizer (or DeepSpeed's engine). Whatever goes wrong with
    the recording, the job goes on; the exit code is the job's.

    \b
    Examples:
      paro-advise capture -o before -- torchrun --nproc-per-node 8 train.py
      paro-advise capture -o before --ranks auto -- srun python train.py
      paro-advise capture -o before --steps 20:23 -- deepspeed train.py --deepspeed_config ds.json
    """
    from paro_advise.advisor.commands.child_process import run_job
    from paro_advise.advisor.commands.jobs.capture_folder import replacing_capture
    from paro_advise.runtime.capture.request import CaptureRequest
    from paro_advise.runtime.job import job_environment
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    refuse_remote_folder(folder, "-o")
    request = CaptureRequest.of(folder, steps, max_trace_mb, ranks)
    with replacing_capture(request.folder, force=force):
        code = run_job(job, job_environment(os.environ, request.to_environment()))
    if not quiet:
        summary(request, code)
    return code


def summary(request: CaptureRequest, code: int, plan_file: str = "") -> None:
    """Say on stderr what a capture brought; a job's exit code must not depend on it.

    Args:
        request: what was to be captured.
        code: the job's.
        plan_file: that it ran under, "" for none.
    """
    try:
        _say(request, code, plan_file)
    except (ParoAdviseError, OSError) as error:
        click.echo(f"paro-advise: the capture cannot be read: {error}", err=True)


def _say(request: CaptureRequest, code: int, plan_file: str) -> None:
    from paro_advise.advisor.facts.capture_log import captured_of
    from paro_advise.trace_parsers.discover import find_inputs
    from paro_advise.trace_parsers.logs.step_log import read_step_logs

    folder = request.folder
    traces = sorted(folder.glob(TRACE_PATTERN)) if folder.is_dir() else []
    logs = sorted(folder.glob(STEP_LOG_PATTERN)) if folder.is_dir() else []
    captured = captured_of(read_step_logs(find_inputs([str(path) for path in logs])[0])[0]) if logs else None
    for line in _lines(request, code, len(traces), captured):
        click.echo(line, err=True)
    if traces and captured is not None:
        from paro_advise.core.secrets import masked_command

        words = f"recommend {masked_command([str(folder)])} -o plan.json"
        if captured.world_size == 1:  # it communicates with nobody
            words = f"analyze {masked_command([str(folder)])} -o report.html"
        if plan_file:
            words = f"compare BEFORE {masked_command([str(folder), '--plan', plan_file])} -o report.html"
        click.echo(f"next: paro-advise {words}", err=True)


def _lines(request: CaptureRequest, code: int, num_traces: int, captured: Captured | None) -> list[str]:
    """Return what a capture brought, for people."""
    if captured is None and code:
        why = f"the job ended with exit code {code} before a step was logged; what it printed says why"
        return [f"paro-advise: nothing was captured in {request.folder}: {why}"]
    if captured is None:
        return [
            f"paro-advise: nothing was captured in {request.folder}: no process took a step with a torch optimizer",
            "  help: the job's Python needs paro-advise and must take PYTHONPATH from its environment",
            "  help: or use `from paro_advise.runtime.capture import capture` in the script",
        ]
    steps_seen, ranks = plural(len(captured.steps), "step"), plural(captured.world_size, "rank")
    lines = [f"paro-advise: {steps_seen} seen, traces of {num_traces} of {ranks}"]
    steps = f"{request.first}:{request.last}"
    if not num_traces and captured.steps and captured.steps[-1].step >= request.last - 1:
        whom = "no rank" if request.ranks.text == ALL else f"none of the ranks {request.ranks.text}"
        lines.append(f"  the steps {steps} ran, but {whom} wrote a trace of them")
    elif not num_traces:
        lines.append(f"  the job ended before the steps {steps} were over; capture again with earlier --steps")
    if captured.overhead_share is not None:
        lines[0] += f"; the capture took {captured.overhead_share:.1%} of a step"
    if captured.profiler_slowdown is not None:
        lines[0] += f", profiled steps {captured.profiler_slowdown:.2f}x the time of others"
    return lines
