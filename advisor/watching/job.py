"""A job as its step logs show it: the time of each step over all ranks, and which rank's host works longer."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from paro_advise.advisor.watching.change import find_changes
from paro_advise.advisor.watching.constants import (
    BASELINE_STEPS,
    HOST_EXCESS,
    LEAST_BASELINE,
    RUN_STEPS,
    WATCH_WARM_UP_STEPS,
)
from paro_advise.advisor.wording.quantities import number_ranges, time_text
from paro_advise.core.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.watching.change import Slowdown
    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A change, and what may be behind it.

    Attributes:
        rank: whose host works longer since, None where none stands out.
        host: of that rank, "" when unknown.
        text: the alarm in a sentence.
    """

    step: int
    since_step: int
    before_us: float
    after_us: float
    rank: int | None
    host: str
    text: str


def job_steps(logs: Sequence[LoggedSteps]) -> list[tuple[int, float]]:
    """Return number and mean time over ranks (us) of the steps that all ranks have logged.

    The warm-up and profiled steps are left out, and of a host's time what the capture took of it.
    """
    by_step: dict[int, list[float]] = {}
    spoiled: set[int] = set()
    for log in logs:
        for row in log.rows:
            if row.profiled or row.pace_us is None:
                spoiled.add(row.step)
            else:
                of_host = row.overhead_us if row.device_us is None else 0.0
                by_step.setdefault(row.step, []).append(row.pace_us - of_host)
    return [
        (step, fmean(times))
        for step, times in sorted(by_step.items())
        if len(times) == len(logs) and step not in spoiled and step >= WATCH_WARM_UP_STEPS
    ]


def watched_text(logs: Sequence[LoggedSteps], *, is_alarmed: bool) -> str:
    """Say what a look at a job's logs rests on: how many steps of which ranks, and what could not be read.

    Args:
        logs: of all ranks that have one.
        is_alarmed: an alarm was told.
    """
    least = LEAST_BASELINE + RUN_STEPS
    steps = len(job_steps(logs))
    text = f"watched {plural(steps, 'step')} of {plural(len(logs), 'rank')}"
    if steps < least:
        text += f", too few to judge: {least} or more are needed after the first {WATCH_WARM_UP_STEPS}"
    elif not is_alarmed:
        text += ": no alarm"
    missing = sorted(set(range(max(log.world_size for log in logs))) - {log.rank for log in logs})
    if missing:
        text += f"; no log is there of rank{'s' * (len(missing) > 1)} {number_ranges(missing)}"
    if num_broken := sum(log.num_broken for log in logs):
        text += f"; {plural(num_broken, 'line')} could not be read"
    return text


def find_alarms(logs: Sequence[LoggedSteps], *, since_step: int = 0, judged_step: int = -1) -> list[Alarm]:
    """Return the changes of a job, in order; the steps are those of `find_changes`."""
    changes = find_changes(job_steps(logs), since_step=since_step, judged_step=judged_step)
    return [_alarm(change, logs) for change in changes]


def _alarm(change: Slowdown, logs: Sequence[LoggedSteps]) -> Alarm:
    log = _longer_host(change, logs)
    text = (
        f"step {change.step}: steps take {change.factor:.2f}x as long since step {change.since_step} "
        f"({time_text(change.before_us)} -> {time_text(change.after_us)})"
    )
    before, since = _micro_batches(change, logs)
    if before != since:
        text += f"; a step has {since:g} micro-batches since then, {before:g} before"
    if log is not None:
        text += f"; the host of rank {log.rank} works longer" + (f" ({log.host})" if log.host else "")
    elif before == since and any(row.cpu_us is not None for item in logs for row in item.rows):
        world = max(item.world_size for item in logs)
        if len(logs) < world:
            seen = f"{len(logs)} ranks of {world}" if len(logs) > 1 else f"one rank of {world}"
            text += f"; no host of the {seen} whose logs are here works longer: look at others, the network, devices"
        else:
            text += "; no rank's host works longer: look at the network and the devices"
    return Alarm(
        step=change.step,
        since_step=change.since_step,
        before_us=change.before_us,
        after_us=change.after_us,
        rank=log.rank if log else None,
        host=(log.host or "") if log else "",
        text=text,
    )


def _micro_batches(change: Slowdown, logs: Sequence[LoggedSteps]) -> tuple[float, float]:
    """Return the typical number of micro-batches in the baseline's steps and in those since the change."""
    rows = [row for log in logs for row in log.rows if not row.profiled]
    old = [row.micro_batches for row in rows if change.since_step - BASELINE_STEPS <= row.step < change.since_step]
    new = [row.micro_batches for row in rows if change.since_step <= row.step <= change.step]
    return (median(old), median(new)) if old and new else (1.0, 1.0)


def _longer_host(change: Slowdown, logs: Sequence[LoggedSteps]) -> LoggedSteps | None:
    """Return the rank whose training thread is on a core for longer since the change, alone among the ranks."""
    growth: list[tuple[float, LoggedSteps]] = []
    for log in logs:
        work = [(row.step, row.cpu_us) for row in log.rows if row.cpu_us is not None and not row.profiled]
        old = [us for step, us in work if change.since_step - BASELINE_STEPS <= step < change.since_step]
        new = [us for step, us in work if change.since_step <= step <= change.step]
        if old and new:
            growth.append((median(new) / median(old), log))
    if len(growth) < 2:
        return None
    most, log = max(growth, key=lambda item: item[0])
    others = median(factor for factor, item in growth if item is not log)
    return log if most > HOST_EXCESS * max(1.0, others) else None
