"""Slows one rank by stopping and continuing its process in short turns."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from paro_advise.runtime.lab.constants import SLOWING_PERIOD_S, SLOWING_SEARCH_S


class Slowing:
    """Stops the process of one rank for a part of every period, until ``stop``.

    Args:
        token: value of PARO_LAB_TOKEN in the environment of the lab's processes.
        rank: global rank, the value of RANK in its environment.
        factor: how many times longer the same work takes; 1.3 stops it for 0.3/1.3 of the time.
    """

    def __init__(self, token: str, rank: int, factor: float) -> None:
        self._marks = (f"PARO_LAB_TOKEN={token}".encode(), f"RANK={rank}".encode())
        self._stopped_share = 1 - 1 / factor
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._take_turns, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the turns; the process runs on."""
        self._ended.set()
        self._thread.join()

    def _take_turns(self) -> None:
        pid: int | None = None
        while not self._ended.wait(SLOWING_PERIOD_S * (1 - self._stopped_share)):
            pid = pid if pid is not None and Path(f"/proc/{pid}").exists() else self._find()
            if pid is None:
                self._ended.wait(SLOWING_SEARCH_S)
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
                self._ended.wait(SLOWING_PERIOD_S * self._stopped_share)
                os.kill(pid, signal.SIGCONT)

    def _find(self) -> int | None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                environment = set((entry / "environ").read_bytes().split(b"\0"))
                if all(mark in environment for mark in self._marks):
                    return int(entry.name)
        return None
