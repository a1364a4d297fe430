"""The JSON documents that the product writes and reads back: equal values give equal bytes."""

from __future__ import annotations

import base64
import gzip
import re
import zlib
from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paro_advise.errors import ForeignDataError, InputError

_T = TypeVar("_T")
# Legal in JSON, but they steer terminals and turn text around in editors: DEL, C1, line and bidi controls.
_STEERING = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Report pages hold their document in this element.
EMBEDDED_ID = "paro-data"
PACKED_TYPE = "application/gzip;base64"
PLAIN_CHARACTERS = 1 << 18  # of JSON that a page holds as it is: some 300 ranks; more is packed to a fifth
MAX_UNPACKED_BYTES = 1 << 28  # of JSON behind a packed page; 100,000 ranks take 70 MB


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
        data.decode()  # msgspec passes over the text of fields that a type does not have
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the file must be a {expected.name} JSON, it is not: {error}", where=where) from error
    if head.format != expected.name or head.format_version.split(".")[0] != expected.major:
        got = f"{head.format} {head.format_version}".strip() or "a JSON that names no format"
        raise ForeignDataError(
            f"the file must be {expected.name} {expected.major}.x, got {got}",
            where=where,
            hint=expected.hint or None,
        )
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForeignDataError(f"the {expected.name} file is not complete: {error}", where=where) from error


def format_name(data: bytes) -> str:
    """Return the name of the format that a JSON says it has, "" where it says none or is no JSON."""
    import msgspec

    try:
        return msgspec.json.decode(data, type=_Head).format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def embedded(value: object) -> tuple[str, str]:
    """Return what a page embeds of a value, and its media type: JSON, or of a large one JSON as gzip in base64."""
    text = _embedded_json(value)
    if len(text) <= PLAIN_CHARACTERS:
        return text, "application/json"
    # Without a time stamp, so that equal values give equal pages.
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode(), PACKED_TYPE


def _embedded_json(value: object) -> str:
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
        data = Path(path).read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise InputError(f"an input must be a readable file: {error.strerror or error}", where=path) from error
    return _find_embedded(data, path) if data.lstrip()[:1] == b"<" else data


def _find_embedded(page: bytes, where: str) -> bytes:
    for media_type in ("application/json", PACKED_TYPE):
        mark = f'<script type="{media_type}" id="{EMBEDDED_ID}">'.encode()
        begin = page.find(mark)
        if begin >= 0:
            data = page[begin + len(mark) : page.find(b"</script>", begin)]
            return _unpack(data, where) if media_type == PACKED_TYPE else data
    raise ForeignDataError("a report must hold its data as JSON, this page holds none", where=where)


def _unpack(data: bytes, where: str) -> bytes:
    """Return the JSON behind what a page embeds packed; a page may come from anyone, so it is bounded."""
    reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        found = reader.decompress(base64.b64decode(data, validate=True), MAX_UNPACKED_BYTES)
    except (ValueError, zlib.error) as error:
        raise ForeignDataError(
            f"a report must hold its data whole, this one is damaged: {error}", where=where
        ) from error
    if not reader.eof:
        raise ForeignDataError(
            f"a report must hold its data whole and at most {MAX_UNPACKED_BYTES >> 20} MiB of it, this one does not",
            where=where,
        )
    return found
