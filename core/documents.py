"""The JSON documents that the product writes and reads back: equal values give equal bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paro_advise.errors import ForeignDataError, InputError

_T = TypeVar("_T")
# Legal in JSON, but they steer terminals and turn text around in editors: DEL, C1, line and bidi controls.
_STEERING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Report pages hold their document in this element.
EMBEDDED_ID = "paro-data"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A document format.

    Attributes:
        name: what stands under ``format``.
        version: what stands under ``format_version``; files of the same major version are read.
        hint: how to make such a file again, "" for none.
    """

    name: str
    version: str
    hint: str = ""

    @property
    def major(self) -> str:
        """Return the major version."""
        return self.version.split(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    format: str = ""
    format_version: str = ""


def to_json(value: object, **beside: object) -> bytes:
    """Return a value as indented UTF-8 JSON with sorted keys; no control character stands in it as such.

    Args:
        value: of a format's type.
        beside: further keys of the document, which readers of the format pass over.
    """
    import msgspec

    if beside:
        value = {**msgspec.to_builtins(value, enc_hook=str), **beside}
    data = msgspec.json.format(msgspec.json.encode(value, order="sorted", enc_hook=str), indent=2) + b"\n"
    if data.isascii() and b"\x7f" not in data:
        return data
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode()).encode()


def from_json(data: bytes, expected: Format, kind: type[_T], where: str) -> _T:
    """Read a document back.

    Args:
        data: the file.
        expected: its format.
        kind: the type that it holds.
        where: the file's name, for messages.

    Raises:
        ForeignDataError: not JSON, another format or major version, or incomplete.
    """
    import msgspec

    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the file must be a {expected.name} JSON, it is not: {error}", where=where) from error
    if head.format != expected.name or head.format_version.split(".")[0] != expected.major:
        raise ForeignDataError(
            f"the file must be {expected.name} {expected.major}.x, got {head.format} {head.format_version}",
            where=where,
            hint=expected.hint or None,
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the {expected.name} file is not complete: {error}", where=where) from error


def embedded_json(value: object) -> str:
    """Return a value as JSON that is safe inside a script element."""
    import msgspec

    text = msgspec.json.format(to_json(value), indent=-1).decode()
    for sign, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026"), ("'", "\\u0027")):
        text = text.replace(sign, code)
    return text


def document_bytes(path: str) -> bytes:
    """Return the JSON in a file: the file itself, or what a report page embeds.

    Raises:
        InputError: the file cannot be read.
        ForeignDataError: it is a page that embeds none.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    return _embedded(data, path) if data.lstrip()[:1] == b"<" else data


def _embedded(page: bytes, where: str) -> bytes:
    mark = f'<script type="application/json" id="{EMBEDDED_ID}">'.encode()
    begin = page.find(mark)
    if begin < 0:
        raise ForeignDataError("a report must hold its data as JSON, this page holds none", where=where)
    return page[begin + len(mark) : page.find(b"</script>", begin)]
