"""Reads inputs by a Slurm job array: its tasks write results into a folder that all nodes share.

Partition, account and time limit are Slurm's own variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT).
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.advisor.facts.constants import JOB_POLL_S, MAX_ARRAY, QUEUE_POLL_S, SHARED_FILES_S
from paro_advise.advisor.facts.reading import slurm_task
from paro_advise.advisor.facts.reading.packing import packed_refs, unpacked
from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paro_advise.advisor.facts.reading.engine import Result
    from paro_advise.trace_parsers.bytes.blocks import SourceRef

_LOG_CHARACTERS = 200  # of the last line of a task's log that a message shows; a terminal's line or two


class SlurmEngine:
    """A Slurm cluster.

    Args:
        max_array: tasks of an array at most; None for 1,000.
    """

    def __init__(self, max_array: int | None) -> None:
        self._max_array = max_array or MAX_ARRAY

    def read(
        self,
        refs: Sequence[SourceRef],
        cache: str | None,
        done: Callable[[int, Result], None],
        *,
        alone: bool,  # noqa: ARG002 - each input has a task of its own, as far as the array's size allows
    ) -> dict[int, str]:
        """Read inputs; each task of the array takes every so many-th."""
        num_tasks = min(len(refs), self._max_array)
        with tempfile.TemporaryDirectory(prefix=".paro-advise-", dir=Path.cwd(), ignore_cleanup_errors=True) as name:
            folder = Path(name)
            slurm_task.write_work(folder, packed_refs(refs), cache, num_tasks)
            job = _submit(folder, num_tasks)
            try:
                missing = _collect(folder, job, set(range(len(refs))), done)
            except BaseException:
                with suppress(OSError):
                    subprocess.run(["scancel", job], check=False, capture_output=True)
                raise
            return {place: _end_of(folder, place % num_tasks) for place in missing}


def _submit(folder: Path, num_tasks: int) -> str:
    """Submit the array; return its job id.

    Raises:
        UsageError: there is no Slurm, or it refuses.
    """
    task = shlex.join([sys.executable, "-m", slurm_task.__name__, str(folder)])
    script = f'#!/bin/bash\nexec {task} "$SLURM_ARRAY_TASK_ID"\n'
    words = [
        "sbatch", "--parsable", "--job-name=paro-advise", f"--array=0-{num_tasks - 1}", "--ntasks=1",
        "--cpus-per-task=1", f"--output={folder}/%a.log", f"--chdir={folder}",
    ]  # fmt: skip
    try:
        answer = subprocess.run(words, input=script, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(
            "--engine slurm needs sbatch, which this machine does not have",
            hint="run it where jobs are submitted, or choose another engine",
        ) from error
    job = answer.stdout.strip().partition(";")[0]
    if answer.returncode or not job:
        reason = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(
            f"Slurm must take a job array of {num_tasks} tasks, it refused: {reason}",
            hint="set SBATCH_PARTITION and SBATCH_ACCOUNT as your jobs do, or lower --max-array",
        )
    return job


def _collect(folder: Path, job: str, missing: set[int], done: Callable[[int, Result], None]) -> set[int]:
    """Hand on results as they come; return the places of those that never came."""
    asked, ended = time.monotonic(), None
    while missing:
        for place, data in slurm_task.results(folder, missing):
            missing.discard(place)
            done(place, unpacked(data))
        now = time.monotonic()
        if ended is not None and now - ended > SHARED_FILES_S:
            break
        if ended is None and now - asked > QUEUE_POLL_S:
            asked = now
            ended = None if _is_queued(job) else now
        if missing:
            time.sleep(JOB_POLL_S)
    return missing


def _is_queued(job: str) -> bool:
    """Tell whether any task of a job waits or runs; where the controller does not answer, it may."""
    try:
        answer = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True, check=False)
    except OSError:
        return True
    if answer.returncode:
        return "Invalid job id" not in answer.stderr
    return bool(answer.stdout.strip())


def _end_of(folder: Path, task: int) -> str:
    """Return the last line that a task wrote."""
    try:
        lines = (folder / f"{task}.log").read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1][:_LOG_CHARACTERS] if lines else f"task {task} of the array left no log"
