"""Types of options that several verbs share."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(B|[KMGT]B?|[KMGT]iB?)\s*$", re.IGNORECASE)
_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", start=1) for end in ("", "b")},
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", start=1) for end in ("i", "ib")},
}


class ByteSize(click.ParamType[float]):
    """A size such as 80GiB.

    Args:
        least: bytes below which it must be a mistake.
    """

    name = "size"

    def __init__(self, least: int = 0) -> None:
        self._least = least

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return bytes."""
        found = _SIZE.match(str(value))
        if not found:
            self.fail(f"{value!r} is not a size; write for example 80GiB", param, ctx)
        number, unit = found.groups()
        size = float(number) * float(_UNITS[unit.lower()])
        if size < self._least:
            self.fail(f"{value!r} is less than 1 GiB; write for example 80GiB", param, ctx)
        return size
