"""What happens in every process of a job that ``paro-advise capture`` or ``run`` started."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from paro_advise.errors import ParoAdviseError
from paro_advise.runtime.job import JOB_VARIABLE, PLAN_VARIABLE, mark_refused
from paro_advise.runtime.messages import tell

if TYPE_CHECKING:
    from paro_advise.runtime.capture.recorder import Recorder


def activate() -> None:
    """Start what the environment asks for; called right after torch was imported.

    A capture that cannot begin is reported and skipped; a plan that cannot be read ends the process.
    """
    from paro_advise.runtime.capture.request import CaptureRequest

    plan = os.environ.get(PLAN_VARIABLE)
    if plan:
        try:
            from paro_advise.runtime.adapters import redirect

            redirect(plan, os.environ.get(JOB_VARIABLE))
        except ParoAdviseError as error:
            mark_refused(error.exit_code)
            sys.exit("\n".join(error.lines()))
    try:
        request = CaptureRequest.from_environment()
        if request is not None:
            from paro_advise.runtime.capture.recorder import Recorder

            started = Recorder(request)
            started.start()
            Recorder.of_process = started
            _watch_deepspeed(started)
    except Exception as error:  # noqa: BLE001 - a capture must never end a training job
        tell(f"nothing is captured: {type(error).__name__}: {error}")


def _watch_deepspeed(started: Recorder) -> None:
    from paro_advise.runtime.capture.deepspeed import watch
    from paro_advise.runtime.import_hooks import when_imported

    when_imported("deepspeed.runtime.engine", lambda module: watch(module, started.observer))
