"""The folder of a capture: an earlier one in it is replaced once a new one has begun, and not before."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.core.capture_files import (
    PROCESS_TRACE_PATTERN,
    REQUEST_FILE,
    RUN_FILE,
    STEP_LOG_PATTERN,
    STEPS_FILE,
    TRACE_PATTERN,
)
from paro_advise.errors import OutputError, WouldOverwriteError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def replacing_capture(folder: Path, *, force: bool) -> Iterator[None]:
    """Set an earlier capture aside for a job, and remove it if the job has recorded another; else put it back.

    Other nodes of the job may share the folder.

    Raises:
        OutputError: nothing could be written there.
        WouldOverwriteError: there is a capture, and ``force`` is off.
    """
    _refuse_unwritable(folder)
    if not force:
        refuse_to_replace(folder)
    earlier = _set_aside(folder)
    try:
        yield
    finally:
        if earlier is not None:
            if not old_files(folder):
                for path in earlier.iterdir():
                    path.replace(folder / path.name)
            shutil.rmtree(earlier)


def old_files(folder: Path) -> list[Path]:
    """Return what an earlier capture wrote."""
    names = (TRACE_PATTERN, PROCESS_TRACE_PATTERN, STEP_LOG_PATTERN, RUN_FILE, REQUEST_FILE, STEPS_FILE)
    return [path for name in names for path in folder.glob(name)]


def refuse_to_replace(folder: Path) -> None:
    """Check that a folder holds nothing of an earlier capture.

    Raises:
        WouldOverwriteError: it does.
    """
    if old_files(folder):
        raise WouldOverwriteError(
            "this folder already holds a capture",
            where=str(folder),
            hint="name another folder, or pass --force to replace it",
        )


def _set_aside(folder: Path) -> Path | None:
    found = old_files(folder)
    if not found:
        return None
    earlier = Path(tempfile.mkdtemp(dir=folder, prefix=".earlier-"))  # no command reads what is hidden
    for path in found:
        try:
            path.replace(earlier / path.name)
        except FileNotFoundError:  # another node's was quicker
            continue
    return earlier


def _refuse_unwritable(folder: Path) -> None:
    whole = folder.absolute()
    existing = next(path for path in (whole, *whole.parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise OutputError("a capture must get a folder that can be written", where=str(folder))
