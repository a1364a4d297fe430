"""The memory of this process, as Linux counts it."""

from __future__ import annotations

import contextlib
from pathlib import Path

_OF_PROCESS = Path("/proc/self")


def resident_bytes() -> int | None:
    """Return the resident memory now; None where the system does not report it."""
    return _field("VmRSS")


def peak_bytes() -> int | None:
    """Return the peak since forget_peak(), or since the start; None where the system does not report it."""
    return _field("VmHWM")


def forget_peak() -> None:
    """Measure the peak from now on; where the kernel forbids it, the peak remains that since the start."""
    with contextlib.suppress(OSError):
        (_OF_PROCESS / "clear_refs").write_text("5", encoding="ascii")


def _field(name: str) -> int | None:
    try:
        lines = (_OF_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
