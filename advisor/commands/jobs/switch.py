"""``paro-advise switch``: gives a running job a new plan."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from paro_advise.advisor.commands.options import Number
from paro_advise.advisor.commands.output import REGRESSION
from paro_advise.advisor.comparison.constants import MIN_SAMPLES
from paro_advise.advisor.watching.constants import CANARY_STEPS, CANARY_TIMEOUT_S
from paro_advise.errors import InputError, SwitchError
from paro_advise.policies.plan import read_plan
from paro_advise.runtime.job import ANSWER, CURRENT, REQUEST, STATE

_POLL_S = 0.2  # seconds between two looks; a request is taken within two steps
_SETTLING_STEPS = 2  # steps after a switch that count for nothing: buffers are made anew in them


@click.command("switch", short_help="Give a running job a new plan at its next step.")
@click.argument("job", metavar="JOB")
@click.argument("plan_file", metavar="PLAN")
@click.option("--timeout", "timeout_s", type=Number(0), default=CANARY_TIMEOUT_S, show_default=True, help="Seconds.")
@click.option(
    "--canary", "logs", metavar="DIR", help="Go back unless steps become shorter; the folder of the job's step logs."
)
@click.option(
    "--canary-steps",
    type=click.IntRange(MIN_SAMPLES, 10_000),
    default=CANARY_STEPS,
    show_default=True,
    help="Steps to judge by.",
)
def command(*, job: str, plan_file: str, timeout_s: float, logs: str | None, canary_steps: int) -> int:
    """Let the job in folder JOB, started by `run --job JOB`, go on under PLAN from the next steps on.

    Parameters and optimizer states move exactly; nothing is saved or restarted. With --canary the job goes back to the
    plan that it had unless its steps become shorter for sure; the exit code is 5 then.

    \b
    Examples:
      paro-advise switch job/ plan2.json
      paro-advise switch job/ plan2.json --canary after/
    """
    from paro_advise.trace_parsers.remote.objects import refuse_remote_folder

    refuse_remote_folder(job, "JOB")
    read_plan(plan_file)
    folder = Path(job)
    if not (folder / STATE).is_file():
        raise InputError(
            "the job must have been started by `paro-advise run --job DIR` and have taken a step",
            where=job,
            hint=f"there is no {STATE} in this folder; a job whose plan keeps the run as it is writes none",
        )
    if logs is None:
        _switch(folder, Path(plan_file).read_bytes(), timeout_s)
        return 0
    return 0 if try_plan(folder, Path(plan_file).read_bytes(), Path(logs), canary_steps, timeout_s) else REGRESSION


def try_plan(job: Path, plan: bytes, logs: Path, num_steps: int, timeout_s: float, *, is_report: bool = True) -> bool:
    """Give a job a plan, and the old one again unless steps become shorter; tell whether it keeps the new one.

    Args:
        job: its folder.
        plan: the new one.
        logs: folder of its step logs.
        num_steps: to judge by, before and after.
        timeout_s: to wait for an answer, and for each step.
        is_report: what is said is the report itself, on standard output.

    Raises:
        InputError: too few steps are logged.
        SwitchError: the job does not answer, or takes no steps any more.
    """
    from paro_advise.advisor.watching.canary import judge
    from paro_advise.advisor.watching.follow import FollowedJob

    if not (job / CURRENT).is_file():
        raise InputError(
            f"a job must leave its plan in its folder to go back to, there is no {CURRENT}",
            where=str(job),
            hint="start it with `run --job DIR` of this version",
        )
    old = (job / CURRENT).read_bytes()
    followed = FollowedJob(logs)
    followed.wait_for_growth(timeout_s)
    before = [time_us for _, time_us in followed.steps()][-num_steps:]
    if len(before) < MIN_SAMPLES:
        raise InputError(
            f"a canary needs at least {MIN_SAMPLES} steps before the switch, the logs hold {len(before)}",
            where=str(logs),
            hint="start the job with `run --job JOB --capture DIR`, and let it take steps beyond the warm-up",
        )
    report = _switch(job, plan, timeout_s, is_report=is_report)
    is_kept = False
    try:
        after: list[float] = []
        while len(after) < num_steps:
            # On devices many steps are logged at once: those before the switch may still be on their way.
            after = [us for step, us in followed.steps() if step >= report.step + _SETTLING_STEPS][:num_steps]
            if len(after) < num_steps:
                followed.wait_for_growth(timeout_s)
        judgement = judge(before, after, report.seconds)
        click.echo(judgement.text, err=not is_report)
        is_kept = judgement.is_faster
    except BaseException:  # Ctrl-C too: nobody would judge the plan any more
        _ask(job, old)
        click.echo("the job was asked to go back to its old plan", err=True)
        raise
    if not is_kept:
        _ask(job, old)
        _report(_answer(job, timeout_s), job, is_report=is_report)
    return is_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    seconds: float
    step: int  # the first under the new plan


def _switch(job: Path, plan: bytes, timeout_s: float, *, is_report: bool = True) -> _Report:
    """Give a job a plan; return how long the switch took, and its first step.

    Raises:
        SwitchError: it does not take it, or does not answer.
    """
    _ask(job, plan)
    try:
        answer = _answer(job, timeout_s)
    except BaseException:
        (job / REQUEST).unlink(missing_ok=True)  # or the job would take it later, when nobody looks
        raise
    return _report(answer, job, is_report=is_report)


def _ask(job: Path, plan: bytes) -> None:
    (job / ANSWER).unlink(missing_ok=True)
    temporary = job / f"{REQUEST}.part"
    temporary.write_bytes(plan)
    temporary.replace(job / REQUEST)


def _report(answer: dict[str, Any], job: Path, *, is_report: bool) -> _Report:
    if "error" in answer:
        raise SwitchError(
            f"the job rejected the plan: {answer['error']}",
            where=str(job),
            hint="it keeps its old plan",
        )
    said = f"{answer['before']} -> {answer['after']} in {answer['seconds']:.2f} s (plan {answer['plan_id']})"
    click.echo(said, err=not is_report)
    if answer["peak_bytes"]:
        peak = f"the most memory in use meanwhile: {answer['peak_bytes'] / (1 << 30):.2f} GiB on rank 0"
        click.echo(peak, err=not is_report)
    return _Report(seconds=float(answer["seconds"]), step=int(answer["step"]))


def _answer(job: Path, timeout_s: float) -> dict[str, Any]:
    """Wait for the job's answer.

    Raises:
        SwitchError: none came.
    """
    path, end = job / ANSWER, time.monotonic() + timeout_s
    while time.monotonic() < end:
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        time.sleep(_POLL_S)
    raise SwitchError(
        f"no answer from the job within {timeout_s:g} s",
        where=str(job),
        hint="a request is taken within two steps; is the job still running?",
    )
