"""Recordings of a running job that somebody asks for by a file in the capture's folder.

Rank 0 sees the file, chooses steps that are far enough ahead, and tells the others through the job's store; a rank that
sees them too late does not record.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from paro_advise.core.capture_files import REQUEST_FILE, STEPS_FILE, RecordingRequest, RecordingSteps, write_whole
from paro_advise.errors import UsageError
from paro_advise.runtime.capture.constants import (
    LEAD_STEPS,
    MAX_NAME,
    MAX_RECORDED_STEPS,
    MAX_REQUEST_BYTES,
    RECENT_STEPS,
    REQUEST_LOOK_S,
    STEPS_LEAD_S,
)
from paro_advise.runtime.capture.rank_choice import RankChoice
from paro_advise.runtime.store import job_store

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"steps-[A-Za-z0-9_-]+")


class OnDemand:
    """Looks for recordings that are asked for.

    Args:
        folder: of the capture.
        rank: this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._is_first = folder, rank == 0
        self._looked_s = time.monotonic()
        self._seen_ns = _date_ns(folder / REQUEST_FILE)
        self._num_told = 0
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)

    def look(self, coming: int, step_s: float) -> RecordingSteps | None:
        """Return what is to be recorded from now on, once; what cannot be read asks for nothing.

        Args:
            coming: number of the step that begins.
            step_s: duration of the last one.
        """
        self._recent_s.append(step_s)
        now = time.monotonic()
        if now - self._looked_s < REQUEST_LOOK_S:
            return None
        self._looked_s = now
        try:
            return self._decide(coming) if self._is_first else self._told(coming)
        except (OSError, RuntimeError, ValueError, msgspec.MsgspecError, UsageError):  # RuntimeError: the store is gone
            return None

    def _decide(self, coming: int) -> RecordingSteps | None:
        date_ns = _date_ns(self._folder / REQUEST_FILE)
        if date_ns in (0, self._seen_ns):
            return None
        self._seen_ns = date_ns
        wanted = msgspec.json.decode(_content(self._folder / REQUEST_FILE), type=RecordingRequest)
        ahead = max(LEAD_STEPS, math.ceil(STEPS_LEAD_S / max(median(self._recent_s), 1e-4)))
        decided = RecordingSteps(
            name=wanted.name, ranks=wanted.ranks, first=coming + ahead, last=coming + ahead + wanted.count
        )
        data = msgspec.json.encode(_check(decided))
        if dist.is_initialized():
            job_store().set(self._key(), data.decode())
            self._num_told += 1
        write_whole(self._folder / STEPS_FILE, data)
        return decided

    def _told(self, coming: int) -> RecordingSteps | None:
        if not dist.is_initialized() or not job_store().check([self._key()]):
            return None
        data = job_store().get(self._key())
        self._num_told += 1
        decided = _check(msgspec.json.decode(data, type=RecordingSteps))
        return decided if coming < decided.first else None

    def _key(self) -> str:
        return f"paro_record_{self._num_told}"


def _check(decided: RecordingSteps) -> RecordingSteps:
    """Return it where it is possible: its name becomes a folder's.

    Raises:
        ValueError: it is not.
    """
    if not (_NAME.fullmatch(decided.name) and len(decided.name) <= MAX_NAME):
        raise ValueError(decided.name)
    if not 0 < decided.first < decided.last <= decided.first + MAX_RECORDED_STEPS:
        raise ValueError(decided.first)
    RankChoice.of(decided.ranks)
    return decided


def _content(path: Path) -> bytes:
    """Return what a small file holds; whoever may write into the folder must not stop the job by what it is.

    Raises:
        OSError: it is no such file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(path)
        return file.read(MAX_REQUEST_BYTES)


def _date_ns(path: Path) -> int:
    """Return when a file was written (ns), 0 where there is none."""
    try:
        return path.lstat().st_mtime_ns
    except OSError:
        return 0
