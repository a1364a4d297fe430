"""``paro-advise switch``: gives a running job a new plan."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import click

from paro_advise.errors import InputError, SwitchError

_POLL_S = 0.2


@click.command("switch", short_help="Give a running job a new plan at its next step.")
@click.argument("job", metavar="JOB")
@click.argument("plan_file", metavar="PLAN")
@click.option("--timeout", "timeout_s", type=click.FloatRange(0), default=600.0, show_default=True, help="Seconds.")
def command(*, job: str, plan_file: str, timeout_s: float) -> None:
    """Let the job in folder JOB, started by `run --job JOB`, go on under PLAN from the next steps on.

    Parameters and optimizer states move exactly; nothing is saved or restarted.

    \b
    Example:
      paro-advise switch job/ plan2.json
    """
    from paro_advise.policies.plan import read_plan
    from paro_advise.runtime.job import ANSWER, REQUEST, STATE

    plan = read_plan(plan_file)
    folder = Path(job)
    if not (folder / STATE).is_file():
        raise InputError(
            "the job must have been started by `paro-advise run --job DIR` and have taken a step",
            where=job,
            hint=f"there is no {STATE} in this folder",
        )
    (folder / ANSWER).unlink(missing_ok=True)
    temporary = folder / f"{REQUEST}.part"
    shutil.copyfile(plan_file, temporary)
    temporary.replace(folder / REQUEST)
    answer = _answer(folder / ANSWER, timeout_s)
    if "error" in answer:
        raise SwitchError(
            f"the job must be able to take the plan, it answered: {answer['error']}",
            where=job,
            hint="it goes on under its old plan",
        )
    click.echo(f"{answer['before']} -> {answer['after']} in {answer['seconds']:.2f} s (plan {plan.plan_id})")
    if answer["peak_bytes"]:
        click.echo(f"the most memory in use meanwhile: {answer['peak_bytes'] / (1 << 30):.2f} GiB on rank 0")


def _answer(path: Path, timeout_s: float) -> dict[str, Any]:
    """Wait for the job's answer.

    Raises:
        SwitchError: none came.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        time.sleep(_POLL_S)
    raise SwitchError(
        f"the job must answer within {timeout_s:g} s, it did not",
        where=str(path.parent),
        hint="a request is taken within two steps; is the job still running?",
    )
