"""The file into which ``watch`` writes what it sees, for Prometheus."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from paro_advise.advisor.commands.labels import labels_of, refuse_own_labels
from paro_advise.advisor.commands.output import refuse_overwrite, write_output
from paro_advise.advisor.metrics.prometheus import prometheus_text
from paro_advise.advisor.watching.job_measures import OWN_LABELS, measures_of_job
from paro_advise.advisor.wording.escaping import plain
from paro_advise.errors import ParoAdviseError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.advisor.watching.job import Alarm
    from paro_advise.trace_parsers.logs.step_log import LoggedSteps


class MetricsFile:
    """Replaced as a whole at each look.

    Args:
        target: its path.
        labels: NAME=VALUE, of all samples.
        force: may replace a file that is there.
        watched: the folder that is followed.

    Raises:
        UsageError: a label is wrong, or prometheus_client is not installed.
        WouldOverwriteError: there is such a file, and ``force`` is off, or it is one that is followed.
        OutputError: its folder cannot be written.
    """

    def __init__(self, target: str, labels: Sequence[str], *, force: bool, watched: str) -> None:
        if target in ("", "-"):
            hint = "it is written again at each look"
            raise UsageError(f"--prometheus of a watch must be a file, got {target!r}", hint=hint)
        self._labels = labels_of(labels)
        refuse_own_labels(OWN_LABELS, self._labels)
        prometheus_text((), self._labels)  # whether it can be made at all
        refuse_overwrite(target, force=force, inputs=[watched])
        self._target = target
        self._force = force
        self._num_alarms = 0
        self._last: Alarm | None = None
        self._said = ""

    def count(self, alarm: Alarm) -> None:
        """Take an alarm in."""
        self._num_alarms += 1
        self._last = alarm

    def begin_anew(self) -> None:
        """Forget the alarms: another job logs into the folder."""
        self._num_alarms, self._last = 0, None

    def write(self, logs: Sequence[LoggedSteps]) -> None:
        """Write what is known now; what goes wrong is said, once, and does not end the watch."""
        measures = measures_of_job(logs, self._num_alarms, self._last, time.time())
        try:
            write_output(self._target, prometheus_text(measures, self._labels), force=self._force)
        except ParoAdviseError as error:
            text = "\n".join(plain(line) for line in error.lines())
            if text != self._said:
                click.echo(text, err=True)
            self._said = text
        else:
            self._force, self._said = True, ""  # it is ours now
