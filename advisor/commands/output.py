"""Writes results: to a temporary file first, never over a file of the user's without leave."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import InputError, OutputError, UsageError, WouldOverwriteError
from paro_advise.trace_parsers.remote.objects import is_remote, shown_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.bytes.blocks import SourceRef

REGRESSION = 5  # exit code of a run that became slower; docs/formats.md, exit codes


# Folders whose names lead to devices and open files.
_OF_DEVICES = re.compile(r"/dev(?:/fd|/pts)?|/proc/(?:self|thread-self|\d+)(?:/task/\d+)?/fd")


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the outputs of a command go.

    Attributes:
        names: files and addresses, and - for the standard output.
    """

    names: tuple[str, ...]

    @classmethod
    def checked(cls, *names: str | None, force: bool, inputs: Sequence[str] = ()) -> Targets:
        """Return those that are wanted, before any work is done.

        Args:
            names: None for outputs that are not wanted.
            force: replace files that exist.
            inputs: what the command reads.

        Raises:
            UsageError: two are the same, or one has no name.
            WouldOverwriteError: one exists and ``force`` is off, or is one of the inputs.
            OutputError: the folder of one cannot be written.
        """
        found = cls(tuple(name for name in names if name is not None))
        real = {name if name == "-" or is_remote(name) else os.path.realpath(name) for name in found.names}
        if len(real) < len(found.names):
            raise UsageError("every output needs a file of its own, two are the same")
        for name in found.names:
            refuse_overwrite(name, force=force, inputs=inputs)
        return found

    @property
    def are_files(self) -> bool:
        """Whether none is the standard output, which takes one document, so that the report for people goes there."""
        return "-" not in self.names

    def written(self) -> list[str]:
        """Return a sentence for each that was written, but for the standard output."""
        return [wrote_text(name) for name in self.names if name != "-"]


def refuse_overwrite(target: str | None, *, force: bool, inputs: Sequence[str] = ()) -> None:
    """Raise before any work is done if a target exists, is an input, or lies in no writable folder.

    Raises:
        UsageError: it has no name.
        WouldOverwriteError: the file exists and ``force`` is off, or it is one of the inputs or lies among them as one.
        OutputError: its folder cannot be written.
    """
    if target is None or target == "-":
        return
    refuse_empty(target, "an output")
    if is_remote(target):
        _refuse_remote(target, force=force, inputs=inputs)
        return
    path = Path(target)
    if any(Path(text).exists() and path.exists() and path.samefile(text) for text in inputs):
        raise WouldOverwriteError("an output must not be one of the inputs", where=target, hint="name another file")
    if _is_read_with(path, inputs):
        raise WouldOverwriteError(
            "an output must not replace a file that is read as an input",
            where=target,
            hint="name another file, or move this one out of the folder",
        )
    parent = next((folder for folder in path.absolute().parents if folder.exists()), None)
    if path.is_dir() or parent is None or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError("an output must be a file in a folder that can be written", where=target)
    real = Path(os.path.realpath(path))
    if real.is_symlink():
        raise OutputError("an output must be a file, this one is a link that leads to itself", where=target)
    if (path.exists() and not path.is_file()) or any(
        _OF_DEVICES.fullmatch(str(place.parent)) for place in (path.absolute(), real)
    ):
        raise OutputError(
            "an output must be a file, this one is a device or a pipe, which a new file would replace",
            where=target,
            hint="write to - for the standard output, or name another file",
        )
    if not force and path.exists():
        raise WouldOverwriteError(
            "the output file exists already", where=target, hint="pass --force to replace it, or name another file"
        )


def _is_read_with(path: Path, inputs: Sequence[str]) -> bool:
    """Tell whether a file that exists is one of those that the folders and globs among the inputs lead to."""
    from paro_advise.trace_parsers.bytes.blocks import SourceRef
    from paro_advise.trace_parsers.discover import files_of

    if not path.is_file() or not _is_read(SourceRef(path=path)):
        return False
    return any(file.samefile(path) for text in inputs if not is_remote(text) for file in files_of(text)[0])


def _refuse_remote(target: str, *, force: bool, inputs: Sequence[str]) -> None:
    from paro_advise.trace_parsers.remote.store import exists

    if target in inputs:
        raise WouldOverwriteError(
            "an output must not be one of the inputs", where=shown_address(target), hint="name another object"
        )
    if not exists(target):
        return
    if not force:
        raise WouldOverwriteError(
            "the output object exists already",
            where=shown_address(target),
            hint="pass --force to replace it, or name another one",
        )
    if _is_object_read_with(target, [text for text in inputs if is_remote(text)]):
        raise WouldOverwriteError(
            "an output must not replace an object that is read as an input",
            where=shown_address(target),
            hint="name another object, or read fewer",
        )


def _is_object_read_with(target: str, inputs: Sequence[str]) -> bool:
    from paro_advise.trace_parsers.bytes.local_copy import local_copy
    from paro_advise.trace_parsers.discover import find_inputs
    from paro_advise.trace_parsers.remote.store import list_objects

    written = {item.url for item in list_objects(target)}
    if not any(item.url in written for text in inputs for item in list_objects(text)):
        return False
    try:
        refs, _ = find_inputs([target])
    except InputError:  # of no kind that is read from stores
        return False
    for ref in refs:
        with local_copy(ref) as copied:
            if _is_read(copied):
                return True
    return False


def _is_read(ref: SourceRef) -> bool:
    from paro_advise.trace_parsers.logs.step_log import is_capture_file
    from paro_advise.trace_parsers.read import is_an_input

    return is_capture_file(ref) or is_an_input(ref)


def write_output(target: str, data: bytes, *, force: bool, mode: int | None = None) -> None:
    """Write bytes to a file, or to stdout for ``-``.

    Args:
        target: the file.
        data: its content.
        force: replace a file that exists.
        mode: permissions; None for those of a new file.

    Raises:
        WouldOverwriteError: the file exists and ``force`` is off.
        OutputError: it cannot be written.
    """
    if target == "-":
        if sys.stdout is None:  # Python's, where the caller has closed it
            raise OutputError("an output must be writable: the standard output is closed", where=target)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    refuse_overwrite(target, force=force)
    if is_remote(target):
        from paro_advise.trace_parsers.remote.store import upload

        upload(target, data)
        return
    path = Path(os.path.realpath(target))  # a link stays one; what it leads to is replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            temporary.chmod(0o666 & ~_umask() if mode is None else mode)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(f"an output must be writable: {error.strerror or error}", where=target) from error


def wrote_text(target: str) -> str:
    """Return that an output was written, and how large a file is."""
    if is_remote(target):
        return f"wrote {shown_address(target)}"
    return f"wrote {target} ({Path(target).stat().st_size / 1024:.0f} KiB)"


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
