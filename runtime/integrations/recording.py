"""What every integration does: trains under a plan, records some steps, and reports at the end of training."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from paro_advise.core.capture_files import RUN_FILE, trace_file
from paro_advise.errors import UsageError
from paro_advise.runtime.adapters import use_plan
from paro_advise.runtime.capture.constants import DEFAULT_STEPS
from paro_advise.runtime.capture.deepspeed import watch
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
        atexit.register(self._close)

    def stop(self, writers: Sequence[Writer] = ()) -> None:
        """Write what has been recorded; on rank 0 also a report, which goes to the experiment trackers in use.

        Args:
            writers: called with the figures by name, for trackers that are not found by themselves.
        """
        if self._recorder is None or self._request is None:
            return
        try:
            if self._close() == 0:
                self._report(self._request.folder, writers)
        except Exception as error:  # noqa: BLE001 - a report must never end a training job
            print(f"paro-advise: no report was made: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _close(self) -> int:
        """Write what this rank has recorded, and say so in the folder; return the rank."""
        recorder, self._recorder = self._recorder, None
        atexit.unregister(self._close)
        if recorder is None or self._request is None:
            return -1
        recorder.close()
        Recorder.of_process = None
        with contextlib.suppress(OSError):
            _marker(self._request.folder, recorder.rank).touch()
        return recorder.rank

    def _report(self, folder: Path, writers: Sequence[Writer]) -> None:
        _wait_for_all(folder)
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


def _marker(folder: Path, rank: int) -> Path:
    return folder / f".done.rank{rank}"


def _has_written(folder: Path, rank: int) -> bool:
    """Tell whether a rank has ended its recording, or written its trace: it may wait for this rank before it ends."""
    if _marker(folder, rank).exists():
        return True
    try:
        # Rank 0 wrote run.json after its first step; an older trace is of an earlier run.
        return (folder / trace_file(rank)).stat().st_mtime >= (folder / RUN_FILE).stat().st_mtime
    except OSError:
        return False


def _wait_for_all(folder: Path) -> None:
    """Wait until all ranks have written what they recorded; not for ever, and not through the job's own backend."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    until = time.monotonic() + WAIT_S
    missing = list(range(world))
    while missing and time.monotonic() < until:
        missing = [rank for rank in missing if not _has_written(folder, rank)]
        if missing:
            time.sleep(POLL_S)
    for rank in range(world):
        with contextlib.suppress(OSError):
            _marker(folder, rank).unlink(missing_ok=True)
    if missing:
        text = f"of {world} ranks {len(missing)} had not written what they recorded after {WAIT_S:.0f} s"
        print(f"paro-advise: {text}: the report may lack them", file=sys.stderr, flush=True)
