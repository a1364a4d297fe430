"""Writes results: to a temporary file first, never over a file of the user's without leave."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from paro_advise.errors import OutputError, WouldOverwriteError


def refuse_overwrite(target: str | None, *, force: bool) -> None:
    """Raise before any work is done if a target exists.

    Raises:
        WouldOverwriteError: the file exists and ``force`` is off.
    """
    if target and target != "-" and not force and Path(target).exists():
        raise WouldOverwriteError(
            "an output must not exist yet, this one does", where=target, hint="pass --force to replace it"
        )


def write_output(target: str, data: bytes, *, force: bool) -> None:
    """Write bytes to a file, or to stdout for ``-``.

    Raises:
        WouldOverwriteError: the file exists and ``force`` is off.
        OutputError: it cannot be written.
    """
    if target == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    refuse_overwrite(target, force=force)
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"an output must be writable: {error.strerror or error}", where=target) from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
