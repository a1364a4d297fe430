"""``paro-advise watch``: says when a running job becomes slower."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.watching.constants import POLL_S
from paro_advise.errors import InputError

if TYPE_CHECKING:
    from paro_advise.advisor.watching.job import Alarm
    from paro_advise.trace_parsers.logs.step_log import StepLog


@click.command("watch", short_help="Say when a running job becomes slower.")
@click.argument("folder", metavar="DIR")
@click.option("--once", is_flag=True, help="Judge what is there and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each alarm as a line of JSON.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.05, 3600), default=POLL_S, show_default=True, help="Seconds."
)
def command(*, folder: str, once: bool, as_json: bool, interval_s: float) -> None:
    """Follow the step logs that `capture` writes into DIR, and print a line when steps become slower and stay so.

    An alarm follows a change by seven steps. If steps come in any order with equal chance, a false one comes once in 24
    million steps; steps that are slow in bursts make it likelier. Nothing is changed; end it with Ctrl-C.

    \b
    Examples:
      paro-advise watch before/
      paro-advise watch before/ --once --json
    """
    from paro_advise.advisor.watching.job import find_alarms

    if not Path(folder).is_dir():
        raise InputError("watch must follow a folder that `capture` writes into", where=folder)
    told: set[int] = set()
    known: dict[Path, tuple[int, StepLog]] = {}
    while True:
        logs = _logs(Path(folder), known)
        for alarm in find_alarms(logs):
            if alarm.since_step not in told:
                told.add(alarm.since_step)
                _print(alarm, as_json=as_json)
        if once:
            if not logs:
                hint = "start the job with `capture -o DIR`"
                raise InputError("watch must find step logs, there are none", where=folder, hint=hint)
            return
        time.sleep(interval_s)


def _logs(folder: Path, known: dict[Path, tuple[int, StepLog]]) -> list[StepLog]:
    """Return all step logs of a folder, reading those that have grown; a line that is being written is left out."""
    from paro_advise.core.capture_files import STEP_LOG_PATTERN
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.logs.step_log import read_step_log

    for path in sorted(folder.glob(STEP_LOG_PATTERN)):
        size = path.stat().st_size
        if path in known and known[path][0] == size:
            continue
        try:
            known[path] = size, read_step_log(SourceRef(path=path))
        except InputError:
            continue  # its first line is being written
    return [log for _, log in known.values()]


def _print(alarm: Alarm, *, as_json: bool) -> None:
    from paro_advise.advisor.wording.escaping import plain

    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(alarm, order="sorted"))
    else:
        click.echo(plain(alarm.text))
