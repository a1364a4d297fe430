"""``paro-advise watch``: says when a running job becomes slower."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.options import Number
from paro_advise.advisor.commands.output import write_output
from paro_advise.advisor.watching.constants import CANARY_STEPS, CANARY_TIMEOUT_S, ENDED_S, LOGS_POLL_S
from paro_advise.advisor.wording.escaping import plain
from paro_advise.advisor.wording.standard_streams import is_reader_gone
from paro_advise.core.secrets import masked_command
from paro_advise.errors import InputError, OutputError, ParoAdviseError, UsageError
from paro_advise.runtime.job import STATE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.watching.follow import FollowedJob
    from paro_advise.advisor.watching.recording import PendingRecording
    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


@click.command("watch", short_help="Say when a running job becomes slower.")
@click.argument("folder", metavar="DIR")
@click.option("--once", is_flag=True, help="Judge what is there and end.")
@click.option("--json", "as_json", is_flag=True, help="Print each alarm as a line of JSON.")
@click.option(
    "--interval", "interval_s", type=Number(0.05, 3600), default=LOGS_POLL_S, show_default=True, help="Seconds."
)
@click.option(
    "--record",
    type=click.Choice(["alarm", "now"]),
    help="Have the job record three steps of a few ranks, on an alarm or at once, and say what limits them.",
)
@click.option(
    "--apply",
    "apply_to",
    metavar="JOB",
    help="Also try the plan recommended for these steps on the job in this folder, and go back unless it is faster.",
)
@click.option("--prometheus", metavar="FILE", help="Write step time, host time and alarms at each look.")
@click.option("--label", "labels", multiple=True, metavar="NAME=VALUE", help="Add a label to every sample.")
@click.option("--force", is_flag=True, help="Replace a FILE that exists.")
def command(
    *,
    folder: str,
    once: bool,
    as_json: bool,
    interval_s: float,
    record: str | None,
    apply_to: str | None,
    prometheus: str | None,
    labels: tuple[str, ...],
    force: bool,
) -> None:
    """Follow the step logs that `capture` writes into DIR, and print a line when steps become slower and stay so.

    An alarm follows a change by seven steps, by ten or twenty where many steps pause. If steps come in any order with
    equal chance, a false one comes once in 22 million steps; steps that are slow in bursts make it likelier. A watch
    alone changes nothing; --record has the job profile three steps, and --apply tries another plan on the job that
    `run --job` has started. End the watch with Ctrl-C; with --once and --record it ends when the recording is there.

    \b
    Examples:
      paro-advise watch before/
      paro-advise watch before/ --once --json
      paro-advise watch before/ --prometheus job.prom --label run=llama
      paro-advise watch before/ --record alarm
      paro-advise watch after/ --record alarm --apply job/
    """
    from paro_advise.advisor.commands.jobs.metrics_file import MetricsFile
    from paro_advise.advisor.watching.constants import KEPT_STEPS
    from paro_advise.advisor.watching.follow import FollowedJob
    from paro_advise.advisor.watching.job import find_alarms
    from paro_advise.advisor.watching.recording import newest_step

    _check(folder, record, apply_to)
    if labels and prometheus is None:
        raise UsageError("--label must come with --prometheus, to whose samples it is added")
    metrics = None if prometheus is None else MetricsFile(prometheus, labels, force=force, watched=folder)
    judged, since, num_replaced = -1, 0, 0
    followed = FollowedJob(Path(folder), KEPT_STEPS)
    recording: PendingRecording | None = None
    is_asked, told = False, set[int]()
    while not is_reader_gone():
        logs = _growing_logs(followed, told)
        if followed.num_replaced > num_replaced:  # another job, whose steps begin anew
            judged, since, num_replaced = -1, 0, followed.num_replaced
            if metrics is not None:
                metrics.begin_anew()
        for alarm in find_alarms(logs, since_step=since, judged_step=judged):
            since = alarm.since_step
            if metrics is not None:
                metrics.count(alarm)
            _say(alarm.text, alarm, as_json=as_json)
            if record == "alarm" and recording is None:
                recording = _ask(folder, logs)
        judged = max(judged, newest_step(logs))
        if metrics is not None:
            metrics.write(logs)
        if record == "now" and not is_asked and logs:
            recording, is_asked = _ask(folder, logs), True
        if recording is not None and _is_told(recording, logs, as_json=as_json, job=apply_to):
            recording = None
        if once and recording is None:
            _conclude_look(folder, logs, is_alarmed=since > 0)
            return
        if once:
            followed.wait_for_growth(ENDED_S)  # a job that has ended records nothing
        else:
            time.sleep(interval_s)


def _conclude_look(folder: str, logs: Sequence[LoggedSteps], *, is_alarmed: bool) -> None:
    """Say what a single look rests on.

    Raises:
        InputError: on nothing.
    """
    from paro_advise.advisor.watching.job import watched_text

    if not logs:
        hint = "start the job with `capture -o DIR`"
        raise InputError("no step logs found", where=folder, hint=hint)
    click.echo(watched_text(logs, is_alarmed=is_alarmed), err=True)


def _growing_logs(followed: FollowedJob, told: set[int]) -> list[LoggedSteps]:
    """Return the logs; warn once of each rank whose log has stopped growing while others have not."""
    logs = followed.logs()
    for log in followed.standing:
        if log.rank not in told:
            ends = f"ends at step {log.rows[-1].step}" if log.rows else "holds no step"
            click.echo(
                f"warning: the log of rank {log.rank} {ends} while others go on: nothing is judged by it; can the rank "
                "still write there?",
                err=True,
            )
    told.clear()
    told.update(log.rank for log in followed.standing)
    return logs


def _check(folder: str, record: str | None, apply_to: str | None) -> None:
    """Refuse what cannot be followed, or tried.

    Raises:
        InputError: a folder is not what it should be.
        UsageError: options do not fit together.
    """
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    refuse_remote_folder(folder, "DIR")
    if not Path(folder).is_dir():
        raise InputError("watch must follow a folder that `capture` writes into", where=folder)
    if apply_to is not None and record is None:
        raise UsageError("--apply must come with --record, from whose steps the plan is made")
    if apply_to is not None and not (Path(apply_to) / STATE).is_file():
        hint = "start it with `run --job DIR --capture DIR`"
        raise InputError(
            f"--apply must name the folder of a running job, there is no {STATE}", where=apply_to, hint=hint
        )


def _ask(folder: str, logs: Sequence[LoggedSteps]) -> PendingRecording:
    from paro_advise.advisor.watching.recording import ask

    try:
        recording = ask(Path(folder), logs)
    except OSError as error:
        raise OutputError(f"--record must write into the folder: {error.strerror or error}", where=folder) from error
    click.echo(f"asked the job to record, after step {recording.from_step}", err=True)
    return recording


def _is_told(recording: PendingRecording, logs: Sequence[LoggedSteps], *, as_json: bool, job: str | None) -> bool:
    """Say what a recording shows once it is there; tell whether nothing more is to come of it."""
    from paro_advise.advisor.watching.recording import is_in_vain, is_over

    if not is_over(recording, logs):
        if not is_in_vain(recording, logs):
            return False
        click.echo("warning: the job recorded nothing; run it under `capture` of this version", err=True)
        return True
    try:
        _conclude(recording, as_json=as_json, job=job)
    except ParoAdviseError as error:  # what goes wrong with one alarm must not end the watch
        click.echo("\n".join(plain(line) for line in error.lines()), err=True)
    return True


def _conclude(recording: PendingRecording, *, as_json: bool, job: str | None) -> None:
    """Say what limits the recorded steps; where a job is given, try what is recommended for it."""
    from paro_advise.advisor.analysis.load import load_analysis
    from paro_advise.advisor.analysis.model import Options
    from paro_advise.advisor.commands.progress import Progress

    analysis, _ = load_analysis([str(recording.folder)], Options(), Progress(quiet=True))
    verdict = analysis.verdict
    told = {"recorded": str(recording.folder), "regime": verdict.regime, "verdict": verdict.text}
    _say(verdict.text, told, as_json=as_json)
    if job is None:
        click.echo(f"next: paro-advise recommend {masked_command([str(recording.folder)])} -o plan.json", err=True)
        return
    from paro_advise.advisor.commands.jobs.switch import try_plan
    from paro_advise.advisor.prediction.fitting.calibrate import calibrate
    from paro_advise.advisor.prediction.recommend import recommend
    from paro_advise.advisor.prediction.scoring import Limits
    from paro_advise.core.documents import to_json
    from paro_advise.policies.plan import Verdict

    plan = recommend(calibrate(analysis), Limits(device_memory_bytes=analysis.run.device_memory_bytes))
    write_output(str(recording.folder / "plan.json"), to_json(plan), force=True)
    _say(plan.text, {"plan_id": plan.plan_id, "plan": plan.verdict.value, "text": plan.text}, as_json=as_json)
    if plan.verdict == Verdict.CHANGE:
        kept = try_plan(
            Path(job), to_json(plan), recording.capture, CANARY_STEPS, CANARY_TIMEOUT_S, is_report=not as_json
        )
        text = "the job keeps the new plan" if kept else "the job is back on its old plan"
        _say(text, {"plan_id": plan.plan_id, "kept": kept}, as_json=as_json)


def _say(text: str, told: object, *, as_json: bool) -> None:
    """Print a sentence, or what it is made of as a line of JSON."""
    if as_json:
        import msgspec

        click.echo(msgspec.json.encode(told, order="sorted"))
    else:
        click.echo(plain(text))
