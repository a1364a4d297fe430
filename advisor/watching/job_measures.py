"""A job that runs, by its step logs, as metrics (pure). What is not known has no sample."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from paro_advise.advisor.metrics.measures import measure_of
from paro_advise.advisor.watching.constants import SHOWN_STEPS
from paro_advise.advisor.watching.job import job_steps
from paro_advise.advisor.watching.recording import newest_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.metrics.measures import Measure
    from paro_advise.advisor.watching.job import Alarm
    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


OWN_LABELS = ("rank", "host")


def measures_of_job(
    logs: Sequence[LoggedSteps], num_alarms: int, last: Alarm | None, looked_s: float
) -> tuple[Measure, ...]:
    """Return step time, host time by rank, the newest step and alarms; those without a value are left out.

    Args:
        logs: of all ranks.
        num_alarms: of this job.
        last: the last one.
        looked_s: when the logs were read, since the epoch.
    """
    steps = job_steps(logs)
    newest = [time_us for _, time_us in steps][-SHOWN_STEPS:]
    step_us = median(newest) if newest else None
    since = [time_us for step, time_us in steps if last is not None and step >= last.since_step][-SHOWN_STEPS:]
    hosts = [(log, _host_us(log)) for log in logs]
    found = (
        measure_of(
            "job_step_seconds",
            f"Median of the newest {SHOWN_STEPS} steps, each the mean of all ranks.",
            "s",
            (step_us / 1e6 if step_us is not None else None, {}),
        ),
        measure_of(
            "job_host_seconds",
            f"What a rank's training thread is on a core for, median of its newest {SHOWN_STEPS} steps.",
            "s",
            *[(us / 1e6, _who(log)) for log, us in hosts if us is not None],
        ),
        measure_of(
            "job_newest_step",
            "The newest step that all ranks have logged whose logs are there.",
            "1",
            (newest_step(logs) if logs else None, {}),
        ),
        measure_of("job_alarms", "Changes to slower steps of this job.", "1", (num_alarms, {})),
        measure_of(
            "job_slowdown_ratio",
            "The newest steps since the last change over those before it; 1 where the job is as quick as then.",
            "1",
            (median(since) / last.before_us if last is not None and since else None, {}),
        ),
        measure_of("job_looked_timestamp_seconds", "When the logs were read.", "s", (looked_s, {})),
    )
    return tuple(measure for measure in found if measure.samples)


def _host_us(log: LoggedSteps) -> float | None:
    known = [row.cpu_us for row in log.rows if row.cpu_us is not None and not row.profiled]
    return median(known[-SHOWN_STEPS:]) if known else None


def _who(log: LoggedSteps) -> dict[str, str]:
    return {"rank": str(log.rank), "host": log.host or ""}
