"""Recordings of a running job that somebody asks for by a file in the capture's folder.

Rank 0 sees the file and chooses steps that are far enough ahead for every rank to see them in time; a rank that sees
them too late does not record. Nothing is exchanged between ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from paro_advise.core.capture_files import DECIDED_FILE, WANTED_FILE, Decided, Wanted
from paro_advise.errors import UsageError
from paro_advise.runtime.capture.constants import LEAD_S, LEAD_STEPS, LOOK_S, MAX_NAME, MAX_RECORDED_STEPS
from paro_advise.runtime.capture.rank_choice import RankChoice

if TYPE_CHECKING:
    from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class OnDemand:
    """Looks for recordings that are asked for.

    Args:
        folder: of the capture.
        rank: this one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._is_first = folder, rank == 0
        self._looked_s = time.monotonic()
        self._seen_ns = {name: _date_ns(folder / name) for name in (WANTED_FILE, DECIDED_FILE)}

    def look(self, coming: int, step_s: float) -> Decided | None:
        """Return what is to be recorded from now on, once; what cannot be read asks for nothing.

        Args:
            coming: number of the step that begins.
            step_s: duration of the last one.
        """
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return None
        self._looked_s = now
        try:
            if not self._is_first:
                return self._decided(coming) if self._is_new(DECIDED_FILE) else None
            return self._decide(coming, step_s) if self._is_new(WANTED_FILE) else None
        except (OSError, ValueError, TypeError, KeyError, UsageError):
            return None

    def _is_new(self, name: str) -> bool:
        date_ns = _date_ns(self._folder / name)
        if date_ns in (0, self._seen_ns[name]):
            return False
        self._seen_ns[name] = date_ns
        return True

    def _decide(self, coming: int, step_s: float) -> Decided:
        wanted = Wanted(**json.loads((self._folder / WANTED_FILE).read_text()))
        if not 0 < wanted.count <= MAX_RECORDED_STEPS:
            raise ValueError(wanted.count)
        first = coming + max(LEAD_STEPS, math.ceil(LEAD_S / max(step_s, 1e-6)))
        decided = _checked(Decided(name=wanted.name, ranks=wanted.ranks, first=first, last=first + wanted.count))
        partial = self._folder / f"{DECIDED_FILE}.part"
        partial.write_text(json.dumps(asdict(decided)))
        os.replace(partial, self._folder / DECIDED_FILE)  # noqa: PTH105 - both names are ours
        return decided

    def _decided(self, coming: int) -> Decided | None:
        decided = _checked(Decided(**json.loads((self._folder / DECIDED_FILE).read_text())))
        return decided if coming < decided.first else None


def _checked(decided: Decided) -> Decided:
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


def _date_ns(path: Path) -> int:
    """Return when a file was written (ns), 0 where there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
