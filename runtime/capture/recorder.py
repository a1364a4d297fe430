"""One capture on one rank: follows the steps, profiles some of them, writes the result."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import os
import shutil
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from paro_advise.core.capture_files import RUN, RUN_FILE, StepRecord, recordings_folder, trace_file
from paro_advise.core.secrets import masked_command
from paro_advise.runtime.capture.constants import BYTES_PER_EVENT, COMPRESSION_LEVEL, COPY_BYTES
from paro_advise.runtime.capture.observer import Observer
from paro_advise.runtime.capture.on_demand import OnDemand
from paro_advise.runtime.capture.rank_choice import RankChoice
from paro_advise.runtime.capture.request import CAPTURE_VARIABLE, CaptureRequest
from paro_advise.runtime.capture.script_profilers import ScriptProfilers
from paro_advise.runtime.capture.step_log import (
    PendingStep,
    StepLog,
    facts_of_process,
    mark_on_device,
    peak_memory_bytes,
)
from paro_advise.runtime.messages import tell
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch._C._profiler import _ExperimentalConfig

    # What signal.signal() returns: a function, one of signal's own numbers, or None.
    SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


class Recorder:
    """Captures this process.

    Whatever goes wrong in here is reported once on stderr; training goes on.

    Args:
        request: what to capture.
        explicit: the script marks the end of each step by ``step()``.
    """

    of_process: ClassVar[Recorder | None] = None  # that captures this process as a whole

    def __init__(self, request: CaptureRequest, *, explicit: bool = False) -> None:
        self._request = request
        self._explicit = explicit
        self.observer = Observer(None if explicit else self._end_step, self._give_up)
        self._others = ScriptProfilers(self._give_way)
        self._first, self._last = request.first, request.last
        self._has_postponed = False
        self._log: StepLog | None = None
        self._number = 0
        self._last_end: float | None = None
        self._last_cpu, self._last_thread = 0.0, 0
        self._last_mark: torch.cuda.Event | None = None  # on the device, of the end of the last step
        self._profiler: profile | None = None
        self._profiled_until = -1
        self._old_handler: SignalHandler = None
        self._failed = False
        self._rank = 0
        self._records = True  # known when the first step has ended
        self._target = request.folder
        self._on_demand: OnDemand | None = None

    def start(self) -> None:
        """Start watching; traces are written when their steps are over, or when the process ends."""
        self.observer.install()
        self._others.install()
        atexit.register(self.close)

    def step(self) -> None:
        """Mark the end of a step."""
        if self._failed:
            return
        try:
            self._end_step()
        except Exception as error:  # noqa: BLE001 - a capture must never end a training job
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            self.observer.remove()
            self._others.remove()
            with contextlib.suppress(Exception):
                self._drop_profile()
            tell(f"the capture of this rank ended, training goes on: {type(error).__name__}: {error}")

    def _end_step(self) -> None:
        now, cpu_now, mark = time.perf_counter(), time.thread_time(), mark_on_device()
        observer = self.observer
        if self._log is None:
            self._log = self._begin_log()
        number = self._number
        self._number += 1
        self._log.add(self._pending_step(number, now, cpu_now, mark))
        if self._explicit:
            observer.begin()
        self._look_for_another(self._number, 0.0 if self._last_end is None else now - self._last_end)
        self._profile(self._number)
        # Time spent here counts as overhead of the next step, which waits for it.
        self._last_end, self._last_cpu, self._last_thread = now, cpu_now, threading.get_ident()
        self._last_mark = mark
        spent_us = (time.perf_counter() - now) * 1e6
        # The observer adds the time of the call that led here.
        observer.busy_us = spent_us if self._explicit else 0.0
        if self._profiled_until == self._number:  # writing a trace belongs to no step
            self._last_end, self._last_cpu = time.perf_counter(), time.thread_time()
            self._last_mark = mark_on_device()
            observer.busy_us -= spent_us

    def _begin_log(self) -> StepLog:
        """Write the first lines, after the first step has shown the model's inputs."""
        request, observer = self._request, self.observer
        facts = {"inputs": observer.inputs, "autocast": observer.autocast, "steps": [request.first, request.last]}
        log = StepLog(request.folder, facts)
        if Recorder.of_process is self:
            # What this process starts from now on, an evaluation say, is another run with the same ranks.
            os.environ.pop(CAPTURE_VARIABLE, None)
        facts_here = facts_of_process()
        self._rank = facts_here["rank"]
        self._records = request.ranks.records(self._rank, facts_here["local_world_size"], _groups())
        self._on_demand = OnDemand(request.folder, self._rank)
        self._write_run()
        return log

    def _pending_step(self, number: int, now: float, cpu_now: float, mark: torch.cuda.Event | None) -> PendingStep:
        """Return what is known of the step that ends now; times in seconds."""
        observer = self.observer
        return PendingStep(
            loss=observer.loss(),
            gradient_norm_squared=observer.gradient_norm_squared,
            marks=None if self._last_mark is None or mark is None else (self._last_mark, mark),
            record=StepRecord(
                step=number,
                step_us=None if self._last_end is None else (now - self._last_end) * 1e6,
                overhead_us=observer.busy_us,
                cpu_us=(cpu_now - self._last_cpu) * 1e6 if self._last_thread == threading.get_ident() else None,
                profiled=self._is_slowed(number),
                micro_batches=observer.backward_passes,
                loss=None,
                gradient_norm_squared=None,
                peak_memory_bytes=peak_memory_bytes(),
            ),
        )

    def _is_slowed(self, number: int) -> bool:
        """Tell whether a profiler slows a step, on this rank or on those that it waits for."""
        if self._profiler is not None or number <= self._profiled_until or self._others.are_recording:
            return True
        return not self._records and self._first - 1 <= number <= self._last

    # ---- the profiler -------------------------------------------------------------------------

    def _look_for_another(self, coming: int, step_s: float) -> None:
        """Take up a recording that is asked for while none is due."""
        if self._on_demand is None or self._profiler is not None or coming <= self._last:
            return
        decided = self._on_demand.look(coming, step_s)
        if decided is not None:
            facts = facts_of_process()
            self._first, self._last = decided.first, decided.last
            self._records = RankChoice.of(decided.ranks).records(self._rank, facts["local_world_size"], _groups())
            self._target = recordings_folder(self._request.folder) / decided.name
            self._write_run()

    def _profile(self, coming: int) -> None:
        if coming == self._first - 1:
            if not self._records:
                return
            if self._others.are_busy_for(self._last - coming):
                self._postpone(is_cause=True)
            else:
                self._begin_profile(coming)
        elif coming == self._first and self._is_postponed_elsewhere():
            self._drop_profile()
            self._postpone(is_cause=False)
        elif self._profiler is not None and coming >= self._last:
            self._end_profile()
        elif self._profiler is not None:
            self._profiler.step()

    # All ranks record the same steps. The one that cannot says so in the job's store; no other rank can end the
    # coming step, at whose end it looks, before that one has passed its gradients on.

    def _postpone(self, *, is_cause: bool) -> None:
        """Record later steps, since the script's own profiler is at work on some rank."""
        before, count = self._first, self._last - self._first
        if is_cause and dist.is_initialized():
            job_store().set(_postponement_of(before), str(self._rank))
        if is_cause and not self._has_postponed:
            tell(
                f"this script's own profiler is at work around step {before}: rank {self._rank} leaves "
                f"it alone and records later steps"
            )
        self._has_postponed = True
        self._first, self._last = before + count + 1, self._last + count + 1
        self._write_run()

    def _is_postponed_elsewhere(self) -> bool:
        return dist.is_initialized() and bool(job_store().check([_postponement_of(self._first)]))

    def _give_way(self) -> None:
        """Stop before a profiler of the script's begins that no schedule has announced."""
        if self._profiler is not None:
            self._drop_profile()
            tell(
                f"this script's own profiler began in step {self._number}: rank {self._rank} leaves it "
                "alone and writes no trace; choose other steps with --steps"
            )

    def _drop_profile(self) -> None:
        recorder, self._profiler = self._profiler, None
        if recorder is not None:
            recorder.on_trace_ready = None
            recorder.stop()
            self._restore_handler()

    def _begin_profile(self, coming: int) -> None:
        first = self._first

        def schedule(number: int) -> ProfilerAction:
            if number < first:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profiler = profile(
            activities=activities, schedule=schedule, record_shapes=True, experimental_config=_profiler_settings()
        )
        # Steps in the trace have the numbers of the run.
        self._profiler.step_num = coming
        self._profiler.current_action = schedule(coming)  # type: ignore[assignment]  # torch declares four of its values
        with self._others.own():
            self._profiler.start()
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        old = self._old_handler
        with contextlib.suppress(Exception):
            self._end_profile()
        if callable(old):
            old(number, frame)
        elif old is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _end_profile(self) -> None:
        recorder, self._profiler = self._profiler, None
        if recorder is None:
            return
        # Other ranks may take longer to write, and this one waits for them in the coming step.
        self._profiled_until = self._number
        recorder.stop()
        self._export(recorder)
        self._restore_handler()

    def _restore_handler(self) -> None:
        if self._old_handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None

    def _export(self, recorder: profile) -> None:
        size = BYTES_PER_EVENT * _num_events(recorder)
        if size > self._request.max_trace_mb * 1e6:
            tell(
                f"no trace of this rank was written: about {size / 1e6:.0f} MB, "
                f"the limit is {self._request.max_trace_mb} MB; record fewer steps"
            )
            return
        folder = self._target
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / trace_file(self._rank)
        plain, packed = target.with_suffix(".part"), target.with_suffix(".gz.part")
        try:
            recorder.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=COMPRESSION_LEVEL) as sink:
                shutil.copyfileobj(source, sink, COPY_BYTES)
            packed.replace(target)
        finally:
            plain.unlink(missing_ok=True)
            packed.unlink(missing_ok=True)

    def _write_run(self) -> None:
        facts = facts_of_process()
        if facts["rank"] != 0:
            return
        self._target.mkdir(parents=True, exist_ok=True)
        run = {
            "format": RUN.name,
            "format_version": RUN.version,
            "steps": [self._first, self._last],
            "command": masked_command(sys.argv),
            **{key: value for key, value in facts.items() if key not in ("rank", "host")},
        }
        temporary = self._target / f"{RUN_FILE}.part"
        temporary.write_text(json.dumps(run, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(self._target / RUN_FILE)

    def close(self) -> None:
        """Write what has been recorded."""
        atexit.unregister(self.close)
        self.observer.remove()
        self._others.remove()
        try:
            if self._records and self._has_postponed and self._profiled_until < 0 and self._profiler is None:
                tell(
                    f"rank {self._rank} wrote no trace: this script's own profiler was at work until the "
                    "end; train more steps, or leave its profiler out"
                )
            self._end_profile()
            if self._log is not None:
                self._log.close()
        except Exception as error:  # noqa: BLE001 - a capture must never end a training job
            self._give_up(error)


def _profiler_settings() -> _ExperimentalConfig | None:
    """Return a setting that also records the threads of our own runtime, which torch did not start."""
    if "paro_advise.runtime.sharding.engine" not in sys.modules:
        return None
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # noqa: SLF001 - has no public name


def _groups() -> list[list[int]]:
    """Return the global ranks of each process group that this rank is of."""
    if not dist.is_initialized():
        return []
    return [sorted(ranks) for ranks in dist.distributed_c10d._world.pg_group_ranks.values()]  # noqa: SLF001 - no public name


def _postponement_of(first: int) -> str:
    return f"paro_capture_{first}"


def _num_events(recorder: profile) -> int:
    with contextlib.suppress(AttributeError, AssertionError, RuntimeError):
        assert recorder.profiler is not None
        assert recorder.profiler.kineto_results is not None
        return len(recorder.profiler.kineto_results.events())
    return 0
