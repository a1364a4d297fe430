"""``paro-advise watch``: says when a running job becomes slower."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.watching.constants import POLL_S
from paro_advise.core.secrets import masked_command
from paro_advise.errors import InputError, OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.watching.job import Alarm
    from paro_advise.advisor.watching.recording import Recording
    from paro_advise.trace_parsers.logs.step_log import StepLog


@click.command("watch", short_help="Say when a running job becomes slower.")
@click.argument("folder", metavar="DIR")
@click.option("--once", is_flag=True, help="Judge what is there and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each alarm as a line of JSON.")
@click.option(
    "--interval", "interval_s", type=click.FloatRange(0.05, 3600), default=POLL_S, show_default=True, help="Seconds."
)
@click.option(
    "--record",
    type=click.Choice(["alarm", "now"]),
    help="Have the job record three steps of a few ranks, on an alarm or at once, and say what limits them.",
)
def command(*, folder: str, once: bool, as_json: bool, interval_s: float, record: str | None) -> None:
    """Follow the step logs that `capture` writes into DIR, and print a line when steps become slower and stay so.

    An alarm follows a change by seven steps. If steps come in any order with equal chance, a false one comes once in 24
    million steps; steps that are slow in bursts make it likelier. The job itself is left as it is; end the watch with
    Ctrl-C. With --once and --record it ends when the recording is there.

    \b
    Examples:
      paro-advise watch before/
      paro-advise watch before/ --once --json
      paro-advise watch before/ --record alarm
    """
    from paro_advise.advisor.watching.job import find_alarms

    if not Path(folder).is_dir():
        raise InputError("watch must follow a folder that `capture` writes into", where=folder)
    told: set[int] = set()
    known: dict[Path, tuple[int, StepLog]] = {}
    recording: Recording | None = None
    is_asked = False
    while True:
        logs = _logs(Path(folder), known)
        for alarm in find_alarms(logs):
            if alarm.since_step not in told:
                told.add(alarm.since_step)
                _print(alarm, as_json=as_json)
                if record == "alarm" and recording is None:
                    recording = _ask(folder, alarm.text, logs)
        if record == "now" and not is_asked and logs:
            recording, is_asked = _ask(folder, "asked for", logs), True
        if recording is not None and _is_told(recording, logs, as_json=as_json):
            recording = None
        if once and recording is None:
            if not logs:
                hint = "start the job with `capture -o DIR`"
                raise InputError("watch must find step logs, there are none", where=folder, hint=hint)
            return
        time.sleep(interval_s)


def _ask(folder: str, cause: str, logs: Sequence[StepLog]) -> Recording:
    from paro_advise.advisor.watching.recording import ask

    try:
        recording = ask(Path(folder), cause, logs)
    except OSError as error:
        raise OutputError(f"--record must write into the folder: {error.strerror or error}", where=folder) from error
    click.echo(f"asked the job to record, after step {recording.from_step}", err=True)
    return recording


def _is_told(recording: Recording, logs: Sequence[StepLog], *, as_json: bool) -> bool:
    """Say what a recording shows once it is there; tell whether nothing more is to come of it."""
    from paro_advise.advisor.watching.constants import MOST_WAITED_STEPS
    from paro_advise.advisor.watching.recording import is_over, newest_step

    if not is_over(recording, logs):
        if newest_step(logs) <= recording.from_step + MOST_WAITED_STEPS:
            return False
        click.echo(
            f"warning: the job recorded nothing in {MOST_WAITED_STEPS} steps; run it under `capture`",
            err=True,
        )
        return True
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.progress import Progress
    from paro_advise.advisor.wording.escaping import plain

    try:
        analysis, _ = load_analysis([str(recording.folder)], Options(), Progress(quiet=True))
    except InputError as error:
        click.echo("\n".join(plain(line) for line in error.lines()), err=True)
        return True
    if as_json:
        import msgspec

        told = {"recorded": str(recording.folder), "regime": analysis.verdict.regime, "verdict": analysis.verdict.text}
        click.echo(msgspec.json.encode(told, order="sorted"))
    else:
        click.echo(plain(analysis.verdict.text))
        click.echo(f"next: paro-advise recommend {masked_command([str(recording.folder)])} -o plan.json", err=True)
    return True


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
