"""Types of options that several verbs share."""

from __future__ import annotations

import click

from paro_advise.advisor.wording.quantities import bytes_of


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
        size = bytes_of(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size; write for example 80GiB", param, ctx)
        if size < self._least:
            self.fail(f"{value!r} is less than 1 GiB; write for example 80GiB", param, ctx)
        return size
