"""``paro-advise attach``: records traces of a job that runs already."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.jobs.capture_folder import old_files, refuse_to_replace
from paro_advise.advisor.commands.options import Number
from paro_advise.advisor.wording.escaping import plain
from paro_advise.core.plural import plural
from paro_advise.core.secrets import masked_command
from paro_advise.errors import InputError
from paro_advise.runtime.attach.constants import DEFAULT_SECONDS

if TYPE_CHECKING:
    from paro_advise.runtime.attach.recording import Attached

_HALF_A_DAY = datetime.timedelta(hours=12)
_NO_DAY = 1900  # year that strptime() gives a time without a day


@click.command("attach", short_help="Record traces of a job that runs already.")
@click.option("-o", "--output", "folder", required=True, metavar="DIR", help="Folder for traces; the job writes there.")
@click.option("--seconds", type=Number(), default=DEFAULT_SECONDS, show_default=True, help="Seconds to record.")
@click.option(
    "--at",
    type=click.DateTime(["%H:%M:%S", "%Y-%m-%dT%H:%M:%S"]),
    metavar="HH:MM:SS",
    help="When recording starts: the same on all nodes.  [default: when all ranks know]",
)
@click.option("--pid", type=click.IntRange(1), help="The job's launcher, if several jobs run here.")
@click.option("--job-id", type=click.IntRange(1), help="The Slurm job, if several run here.")
@click.option("--force", is_flag=True, help="Replace the traces of an earlier capture.")
@click.option("-q", "--quiet", is_flag=True, help="Say only what went wrong.")
def command(
    *,
    folder: str,
    seconds: float,
    at: datetime.datetime | None,
    pid: int | None,
    job_id: int | None,
    force: bool,
    quiet: bool,
) -> None:
    """Record all ranks of this node, of a job that was started with KINETO_USE_DAEMON=1 and not by this tool.

    The job needs nothing else, not even this package: torch itself asks every few seconds whether a trace is wanted,
    and writes it. A trace comes half a minute later; run this on every node, with the same --at, to record all.

    \b
    Examples:
      KINETO_USE_DAEMON=1 torchrun --nproc-per-node 8 train.py
      paro-advise attach -o now
      srun --jobid 17 --overlap paro-advise attach -o now --job-id 17 --at 14:30:00
    """
    from paro_advise.runtime.attach.listener import SOCKETS_VARIABLE, Listener
    from paro_advise.runtime.attach.recording import AttachRequest, record
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    refuse_remote_folder(folder, "-o")
    request = AttachRequest(
        folder=Path(folder),
        seconds=seconds,
        start_unix_s=None if at is None else unix_s(at, datetime.datetime.now().astimezone()),
        below=pid,
        job=job_id,
    )
    begun_s = time.time()
    if not force:
        refuse_to_replace(request.folder)

    def say(line: str) -> None:
        if not quiet:
            click.echo(f"paro-advise: {plain(line)}", err=True)

    with Listener(os.environ.get(SOCKETS_VARIABLE)) as listener:
        say("waiting for the job's processes, which ask every few seconds")
        attached = record(request, listener, say)
    for line in _missing(attached):
        click.echo(f"paro-advise: {plain(line)}", err=True)
    if not attached.written:
        raise InputError("no process wrote a trace", where=folder)
    for path in old_files(request.folder):
        if path.stat().st_mtime < begun_s:  # what other nodes write meanwhile stays
            path.unlink(missing_ok=True)
    count = len(attached.written)
    written = plural(count, "rank") if attached.are_ranks_known else plural(count, "process", "processes")
    say(f"traces of {written} in {folder}")
    if not quiet:
        click.echo(f"next: paro-advise analyze {masked_command([folder])}", err=True)


def _missing(attached: Attached) -> list[str]:
    """Return which ranks brought nothing, and why, for people."""
    lines = [f"{process.name} has no trace: {why}" for process, why in attached.missing.items()]
    if attached.num_unheard:
        lines.append(f"ranks of this node without a trace, since they never asked: {attached.num_unheard}")
    if attached.num_left_out:
        lines.append(f"left out for want of a step in their trace (launchers, data loaders): {attached.num_left_out}")
    if len(attached.written) > 1 and not attached.are_ranks_known:
        lines.append("which rank a trace is of is unknown (no RANK, or several processes with the same)")
    return lines


def unix_s(at: datetime.datetime, now: datetime.datetime) -> float:
    """Return a time of this node's zone in seconds; one without a day is the next, or one just past."""
    if at.year != _NO_DAY:
        return at.timestamp()
    found = now.replace(hour=at.hour, minute=at.minute, second=at.second, microsecond=0)
    if now - found >= _HALF_A_DAY:
        found += 2 * _HALF_A_DAY
    elif found - now > _HALF_A_DAY:
        found -= 2 * _HALF_A_DAY
    return found.timestamp()
