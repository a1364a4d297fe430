"""Finds the inputs under the paths a user gave."""

from __future__ import annotations

import glob
import os
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from paro_advise.core.required_name import refuse_empty
from paro_advise.errors import InputError, NoInputError
from paro_advise.trace_parsers.bytes.archive import archive_members, is_archive
from paro_advise.trace_parsers.bytes.blocks import SourceRef
from paro_advise.trace_parsers.constants import MAX_FILES
from paro_advise.trace_parsers.remote.objects import is_remote, shown_address
from paro_advise.trace_parsers.remote.store import list_objects

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paro_advise.trace_parsers.remote.objects import RemoteObject

# Never traces: what we write ourselves, code, pictures, papers.
_SKIPPED_SUFFIXES = {
    ".html", ".htm", ".py", ".png", ".jpg", ".jpeg", ".svg", ".pdf", ".ipynb", ".pyc", ".sh", ".parquet",
}  # fmt: skip


def find_inputs(paths: Iterable[str]) -> tuple[list[SourceRef], bool]:
    """Expand files, folders, globs, archives and addresses of stores into single inputs, sorted, without repeats.

    Args:
        paths: as typed by the user; globs may be quoted.

    Returns:
        The inputs, and whether any path was a folder, glob or archive (so that unknown files
        are skipped with a notice rather than refused).

    Raises:
        UsageError: a path is empty.
        NoInputError: a path does not exist or holds no file.
        InputError: an archive cannot be read, or there are more than 20,000 files.
    """
    refs: dict[str, SourceRef] = {}
    is_collection = False
    for text in paths:
        refuse_empty(text, "an input")
        if is_remote(text):
            objects = [item for item in list_objects(text) if not item.url.lower().endswith(tuple(_SKIPPED_SUFFIXES))]
            refs.update({item.url: _ref_of_object(item) for item in objects})
            is_collection |= len(objects) > 1
            continue
        files, expanded = files_of(text)
        is_collection |= expanded
        if not files:
            raise NoInputError(
                "nothing found at this path",
                where=text,
                hint=_hint_of_nothing(Path(text)),
            )
        for path in files:
            is_collection |= is_archive(path)
            refs.update(_refs_of_file(path, skips=expanded))
            if len(refs) > MAX_FILES:
                raise InputError(f"one analysis takes at most {MAX_FILES} files", where=text)
    return [refs[key] for key in sorted(refs)], is_collection


def files_of(text: str) -> tuple[list[Path], bool]:
    """Return the files that a local path or glob leads to, and whether it is a folder or glob."""
    path = Path(text)
    if path.is_dir():
        files, closed = files_below(path)
        files = [item for item in files if item.suffix.lower() not in _SKIPPED_SUFFIXES]
        # A folder that may not be looked into stands for what is in it: reading it says so.
        return sorted(item for item in (*files, *closed) if not _is_hidden(item, path)), True
    if path.exists():
        return ([path] if path.is_file() else []), False
    matches = [Path(item) for item in sorted(glob.glob(text, recursive=True))]  # noqa: PTH207 - absolute patterns
    files = []
    for match in matches:
        if match.exists():  # else a link that leads nowhere
            files += files_of(str(match))[0]
    return files, True


def files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder, in order, and the folders there that may not be looked into.

    A link that leads nowhere stands for a file that is gone: reading it says so. Links to folders are not followed.
    """
    closed: list[Path] = []
    found = [
        Path(place) / name
        for place, _, names in os.walk(folder, onerror=lambda error: closed.append(Path(error.filename)))
        for name in names
    ]
    return sorted(item for item in found if _may_be_file(item)), sorted(closed)


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file() or not path.exists()
    except OSError:  # of a folder that names what is in it and shows no more
        return True


def _ref_of_object(item: RemoteObject) -> SourceRef:
    """Return an object as an input.

    Raises:
        InputError: it is an archive, which must lie on this machine to be looked into.
    """
    name = shown_address(item.url)
    if is_archive(PurePath(name)):
        raise InputError("an archive must lie on this machine", where=name, hint="copy it here, or unpack it there")
    return SourceRef(path=Path(name.rpartition("/")[2]), remote=item)


def _hint_of_nothing(path: Path) -> str:
    """Return what to do about a path without a file: what lies under hidden folders is left out of a search."""
    hidden = next((item for item in path.rglob("*") if item.is_file() and _is_hidden(item, path)), None)
    if hidden is not None:
        return f"files under names that begin with a dot are left out; pass them: {hidden.parent}"
    return "pass files, folders that hold them, or quoted globs"


def _refs_of_file(path: Path, *, skips: bool) -> dict[str, SourceRef]:
    """Return a file, or the members of an archive, by a name that is the same for all ways to it.

    Args:
        path: of it.
        skips: one that may not be reached is told when it is read, as one of several.
    """
    try:
        identity = str(path.resolve())
    except OSError:
        if not skips:
            raise
        return {str(path.absolute()): SourceRef(path=path)}
    if not is_archive(path):
        return {identity: SourceRef(path=path)}
    return {f"{identity}!{member.name}": SourceRef(path=path, member=member) for member in archive_members(path)}


def _is_hidden(item: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in item.relative_to(root).parts)
