"""What every integration does: trains under a plan, records some steps, and reports at the end of training."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch.distributed as dist

from paro_advise.core.capture_files import step_log_file, trace_file
from paro_advise.errors import UsageError
from paro_advise.runtime.adapters import use_plan
from paro_advise.runtime.capture.deepspeed import watch
from paro_advise.runtime.capture.recorder import Recorder
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.import_hooks import when_imported
from paro_advise.runtime.integrations.constants import RANKS_POLL_S, RANKS_WAIT_S
from paro_advise.runtime.integrations.report import report
from paro_advise.runtime.integrations.trackers import keep
from paro_advise.runtime.job import PLAN_VARIABLE
from paro_advise.runtime.messages import tell, write_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.integrations.trackers import Writer


class Recording:
    """Records steps of the training in this process, as ``paro-advise capture`` does, and reports what came of it.

    A plan takes effect when the object is made, which must be before the framework wraps the model. Where a plan cannot
    be kept, the job ends with the reason. Whatever goes wrong with recording and reporting is told on stderr, and
    training goes on. Where ``paro-advise capture`` or ``run`` records the process already, nothing is recorded twice;
    the plan of ``run`` holds, whatever is named here.

    Args:
        folder: for traces and step logs, the same for all ranks; None for what PARO_CAPTURE says, or nothing.
        steps: FIRST:END, counted from 0; the optimizer's step ends a step.
        plan: file of a plan to train under, None for none.
        before: folder of an earlier capture to compare this one with, None to analyze this one alone.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        steps: str | None = None,
        *,
        plan: str | Path | None = None,
        before: str | Path | None = None,
    ) -> None:
        if plan is not None:
            use_plan(str(plan))
        self._plan, self._before = os.environ.get(PLAN_VARIABLE) or plan, before
        self._recorder: Recorder | None = None
        self._request: CaptureRequest | None = None
        try:
            self._request = CaptureRequest.chosen(folder, steps)
        except UsageError as error:
            write_lines(*error.lines())

    def __setstate__(self, state: dict[str, object]) -> None:
        """Become what another process had made, before its training began; the plan takes effect here too."""
        self.__dict__.update(state)
        if self._plan is not None:
            use_plan(str(self._plan))

    def start(self) -> None:
        """Begin to count steps; what an earlier run left of this rank is removed, so that no report mixes the two."""
        if self._request is None or Recorder.of_process is not None:
            return
        _forget(self._request.folder)
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
            tell(f"no report was made: {type(error).__name__}: {error}")

    def _close(self) -> int:
        """Write what this rank has recorded, and say so in the folder; return the rank."""
        recorder, self._recorder = self._recorder, None
        atexit.unregister(self._close)
        if recorder is None or self._request is None:
            return -1
        recorder.close()
        Recorder.of_process = None
        rank, _ = _rank_and_world()
        with contextlib.suppress(OSError):
            _marker(self._request.folder, rank).touch()
        return rank

    def _report(self, folder: Path, writers: Sequence[Writer]) -> None:
        if not (folder / trace_file(0)).exists():
            return  # too few steps, or a trace that was too large, which has been told
        _wait_for_all(folder)
        made = report(folder, self._plan, self._before)
        if made is None:
            return
        tell(f"wrote {made.page}")
        files = [made.page, made.document, *([Path(self._plan)] if self._plan is not None else [])]
        kept = keep(files, made.figures, writers)
        if kept:
            tell(f"kept the report in {' and '.join(kept)}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:  # nothing holds up an exception
            self._close()


def _marker(folder: Path, rank: int) -> Path:
    return folder / f".done.rank{rank}"


def _rank_and_world() -> tuple[int, int]:
    """Return this rank and how many there are, as the process group says, or else the launcher."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _forget(folder: Path) -> None:
    """Remove what an earlier run into the same folder left of this rank, on rank 0 also of ranks that are no more."""
    mine, world = _rank_and_world()
    old = [mine]
    if mine == 0:
        found = (re.fullmatch(r"steps\.rank(\d+)\.jsonl", path.name) for path in folder.glob("steps.rank*.jsonl"))
        old += [int(match[1]) for match in found if match and int(match[1]) >= world]
    for rank in old:
        for path in (folder / trace_file(rank), folder / step_log_file(rank), _marker(folder, rank)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _has_written(folder: Path, rank: int) -> bool:
    """Tell whether a rank has ended its recording, or written its trace: it may wait for this rank before it ends."""
    return _marker(folder, rank).exists() or (folder / trace_file(rank)).exists()


def _wait_for_all(folder: Path) -> None:
    """Wait until all ranks have written what they recorded; not for ever, and not through the job's own backend."""
    _, world = _rank_and_world()
    until = time.monotonic() + RANKS_WAIT_S
    missing = list(range(world))
    while missing and time.monotonic() < until:
        missing = [rank for rank in missing if not _has_written(folder, rank)]
        if missing:
            time.sleep(RANKS_POLL_S)
    for rank in range(world):
        with contextlib.suppress(OSError):
            _marker(folder, rank).unlink(missing_ok=True)
    if missing:
        text = f"of {world} ranks {len(missing)} had not written what they recorded after {RANKS_WAIT_S:.0f} s"
        tell(f"{text}: the report may lack them")
