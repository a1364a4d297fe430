"""What every integration does: trains under a plan, records some steps, and reports at the end of training."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.runtime.adapters import use_plan
from paro_advise.runtime.capture.constants import DEFAULT_STEPS
from paro_advise.runtime.capture.deepspeed import watch
from paro_advise.runtime.capture.on_demand import job_store
from paro_advise.runtime.capture.recorder import Recorder
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.import_hooks import when_imported
from paro_advise.runtime.integrations.constants import POLL_S, WAIT_S
from paro_advise.runtime.integrations.report import report
from paro_advise.runtime.integrations.trackers import keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.integrations.trackers import Writer


class Recording:
    """Records steps of the training in this process, as ``paro-advise capture`` does, and reports what came of it.

    A plan takes effect when the object is made, which must be before the framework wraps the model. Where a plan cannot
    be kept, the job ends with the reason. Whatever goes wrong with recording and reporting is told on stderr, and
    training goes on. Inside ``paro-advise capture`` and ``run`` the process is recorded already, and this does nothing.

    Args:
        folder: for traces and step logs, the same for all ranks; None for what PARO_CAPTURE says, or nothing.
        steps: FIRST:END, counted from 0; the optimizer's step ends a step.
        plan: file of a plan to train under, None for none.
        before: folder of an earlier capture to compare this one with, None to analyze this one alone.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        steps: str = DEFAULT_STEPS,
        *,
        plan: str | Path | None = None,
        before: str | Path | None = None,
    ) -> None:
        if plan is not None:
            use_plan(str(plan))
        self._plan, self._before = plan, before
        self._recorder: Recorder | None = None
        self._request: CaptureRequest | None = None
        try:
            self._request = CaptureRequest.from_environment() if folder is None else CaptureRequest.of(folder, steps)
        except UsageError as error:
            print("\n".join(error.lines()), file=sys.stderr, flush=True)

    def start(self) -> None:
        """Begin to count steps."""
        if self._request is None or Recorder.of_process is not None:
            return
        recorder = Recorder(self._request)
        recorder.start()
        Recorder.of_process = self._recorder = recorder
        when_imported("deepspeed.runtime.engine", lambda module: watch(module, recorder.observer))

    def stop(self, writers: Sequence[Writer] = ()) -> None:
        """Write what has been recorded; on rank 0 also a report, which goes to the experiment trackers in use.

        Args:
            writers: called with the figures by name, for trackers that are not found by themselves.
        """
        recorder, self._recorder = self._recorder, None
        if recorder is None or self._request is None:
            return
        recorder.close()
        Recorder.of_process = None
        try:
            self._report(self._request.folder, writers)
        except Exception as error:  # noqa: BLE001 - a report must never end a training job
            print(f"paro-advise: no report was made: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _report(self, folder: Path, writers: Sequence[Writer]) -> None:
        if not _is_first_when_all_are_done(folder):
            return
        made = report(folder, self._plan, self._before)
        if made is None:
            return
        print(f"paro-advise: wrote {made.page}", file=sys.stderr, flush=True)
        files = [made.page, made.document, *([Path(self._plan)] if self._plan is not None else [])]
        kept = keep(files, made.figures, writers)
        if kept:
            print(f"paro-advise: kept the report in {' and '.join(kept)}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _is_first_when_all_are_done(folder: Path) -> bool:
    """Tell whether this is rank 0, once all ranks have written what they recorded; the others do not wait."""
    if not dist.is_initialized():
        return int(os.environ.get("RANK", "0")) == 0
    key = f"paro_recorded_{folder.absolute()}"
    done = job_store().add(key, 1)
    if dist.get_rank() != 0:
        return False
    until = time.monotonic() + WAIT_S
    while done < dist.get_world_size() and time.monotonic() < until:
        time.sleep(POLL_S)
        done = job_store().add(key, 0)
    if done < dist.get_world_size():
        text = f"{dist.get_world_size() - done} ranks had not written their traces after {WAIT_S:.0f} s"
        print(f"paro-advise: {text}; the report leaves them out", file=sys.stderr, flush=True)
    return True
