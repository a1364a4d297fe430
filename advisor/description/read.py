"""Reads the description of a run."""

from __future__ import annotations

import hashlib
from codecs import BOM_UTF8
from pathlib import Path

import msgspec

from paro_advise.advisor.description.model import Description
from paro_advise.advisor.wording.quantities import bytes_of
from paro_advise.errors import InputError

SUFFIX = ".toml"
_MOST_BYTES = 1 << 20  # a description is a page of text
_MOST_STATED = float(1 << 60)  # bytes that anyone would mean
_HINT = "docs/descriptions.md shows a whole one"


def read_description(path: str) -> tuple[Description, str]:
    """Read a TOML file; return what it describes, and the digest (sha256) of its content.

    Raises:
        InputError: it cannot be read, or is no description.
    """
    try:
        if not Path(path).is_file():
            raise InputError("a description must be a file, got none", where=path, hint=_HINT)
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"a description must be a readable file: {error.strerror or error}", where=path) from error
    if len(data) > _MOST_BYTES:
        raise InputError("a description must be a page of TOML, got more than 1 MiB", where=path, hint=_HINT)
    return description_from_toml(data, path), hashlib.sha256(data).hexdigest()


def stated_bytes(name: str, text: str | None) -> float | None:
    """Return the bytes that a description states, None where it states none.

    Raises:
        InputError: it is no size.
    """
    if text is None:
        return None
    found = bytes_of(text)
    if not found or not found < _MOST_STATED:
        raise InputError(f'{name} must be a size such as "80GiB", got {text!r}')
    return found


def description_from_toml(data: bytes, where: str) -> Description:
    """Return what TOML describes.

    Raises:
        InputError: it is no TOML, lacks what is needed, or holds what is not known.
    """
    try:
        return msgspec.toml.decode(data.removeprefix(BOM_UTF8), type=Description)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InputError(
            f"a description must be TOML that says model, cluster and run: {error}", where=where, hint=_HINT
        ) from error
