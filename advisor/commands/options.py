"""Types of options that several verbs share."""

from __future__ import annotations

import re

import click

_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?\s*$", re.IGNORECASE)
_UNITS: dict[str, int] = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}


class ByteSize(click.ParamType[float]):
    """A size such as 80GiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return bytes."""
        found = _SIZE.match(str(value))
        if not found:
            self.fail(f"{value!r} is not a size; write for example 80GiB", param, ctx)
        number, unit = found.groups()
        return float(number) * float(_UNITS[(unit or "B").lower()])
