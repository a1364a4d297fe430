"""Changes values inside JSON text, comments or not, and leaves every other character as it is (pure)."""

from __future__ import annotations

import json
import re
from typing import Any

from paro_advise.errors import UsageError

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_decoder = json.JSONDecoder()


def without_comments(text: str) -> str:
    """Return text with spaces in the place of comments, as Hjson has them: all else stands where it did."""

    def hidden(found: re.Match[str]) -> str:
        word = found.group()
        return word if word.startswith('"') else re.sub(r"[^\n]", " ", word)

    return _STRING_OR_COMMENT.sub(hidden, text)


def set_value(text: str, path: tuple[str, ...], value: Any) -> str:
    """Return JSON text in which one key has a value; missing objects on the way are made.

    Args:
        text: an object.
        path: keys from the root.
        value: what JSON can hold.

    Raises:
        UsageError: the text is not JSON, or something on the way is not an object.
    """
    plain = without_comments(text)
    start = _skip(plain, 0)
    for depth, key in enumerate(path):
        if start >= len(text) or text[start] != "{":
            raise UsageError(f"{'.'.join(path[:depth]) or 'the file'} must be an object")
        entries, end = _entries(plain, start)
        last = depth == len(path) - 1
        if key in entries:
            begin, stop = entries[key]
            if last:
                if json.loads(plain[begin:stop]) == value:
                    return text
                return text[:begin] + _indent(value, text, begin) + text[stop:]
            start = begin
            continue
        for name in reversed(path[depth + 1 :]):
            value = {name: value}
        return _insert_key(text, start, end, key, value, max((stop for _, stop in entries.values()), default=None))
    return text


def remove_key(text: str, path: tuple[str, ...]) -> str:
    """Return JSON text without a key; unchanged if it is not there."""
    plain = without_comments(text)
    start = _skip(plain, 0)
    for depth, key in enumerate(path):
        if start >= len(text) or text[start] != "{":
            return text
        entries, end = _entries(plain, start)
        if key not in entries:
            return text
        if depth < len(path) - 1:
            start = entries[key][0]
            continue
        begin, stop = entries[key]
        name = json.dumps(key)
        if plain.count(name, start, begin) != 1 or plain.count(name, stop, end) > 0:
            raise UsageError(f"the file must name {key} once and plainly")
        begin = plain.rindex(name, start, begin)
        after = _skip(plain, stop)
        if plain[after] == ",":
            return text[:begin] + text[_skip(text, after + 1) :]
        before = plain[:begin].rstrip()
        between = text[len(before) : begin]  # a comment there stays, and the break that ends it
        return text[: len(before)].removesuffix(",") + (between if between.strip() else "") + text[stop:]
    return text


def _skip(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found else place


def _entries(text: str, start: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Return the span of each value of the object at a place, and where its brace closes."""
    entries: dict[str, tuple[int, int]] = {}
    place = _skip(text, start + 1)
    try:
        while text[place] != "}":
            key, place = _decoder.raw_decode(text, place)
            place = _skip(text, place)
            if text[place] != ":" or not isinstance(key, str):
                raise UsageError(f"the file must be JSON, a colon is missing after {str(key)[:40]!r}")
            begin = _skip(text, place + 1)
            _, stop = _decoder.raw_decode(text, begin)
            entries[key] = (begin, stop)
            place = _skip(text, stop)
            if text[place] == ",":
                place = _skip(text, place + 1)
    except (ValueError, IndexError) as error:
        raise UsageError(f"the file must be JSON: {error}") from error
    return entries, place


def _line_indent(text: str, place: int) -> str:
    line = text[text.rfind("\n", 0, place) + 1 :]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _unit(text: str) -> str:
    """Return the file's own indentation of one level."""
    found = re.search(r"\n([ \t]+)\S", text)
    return found.group(1) if found else "  "


def _indent(value: Any, text: str, place: int) -> str:
    if not isinstance(value, dict | list):
        return json.dumps(value)
    return json.dumps(value, indent=_unit(text)).replace("\n", "\n" + _line_indent(text, place))


def _insert_key(text: str, start: int, end: int, key: str, value: Any, last_stop: int | None) -> str:
    """Insert a key as the last of the object between two braces, whose last value ends at a place if there is one."""
    if "\n" not in text[start:end] and last_stop is not None:
        inside = text[start + 1 : end].rstrip()
        return f"{text[: start + 1]}{inside}, {json.dumps(key)}: {json.dumps(value)}{text[end:]}"
    outer = _line_indent(text, start)
    inner = outer + _unit(text)
    body = (
        json.dumps(value, indent=_unit(text)).replace("\n", "\n" + inner)
        if isinstance(value, dict)
        else json.dumps(value)
    )
    head = text[:end].rstrip()
    if last_stop is not None:
        head = f"{text[:last_stop]},{text[last_stop:end].rstrip()}"
    return f"{head}\n{inner}{json.dumps(key)}: {body}\n{outer}{text[end:]}"
