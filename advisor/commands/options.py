"""Types of options that several verbs share."""

from __future__ import annotations

import math
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from paro_advise.advisor.facts.reading.choice import EngineChoice, EngineName
from paro_advise.advisor.wording.quantities import bytes_of, bytes_text

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")


def engine_options(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Add the options that say where inputs are read; the function takes them as ``engine``."""

    @click.option(
        "--engine",
        "engine_name",
        type=click.Choice([name.value for name in EngineName]),
        envvar="PARO_ENGINE",
        default=EngineName.LOCAL.value,
        show_default=True,
        help="Where files are read; also by PARO_ENGINE.",
    )
    @click.option(
        "--max-array", type=click.IntRange(1, 1_000_000), help="Tasks of a Slurm array at most.  [default: 1000]"
    )
    @wraps(function)
    def with_engine(*, engine_name: str, max_array: int | None, **given: Any) -> _Result:
        return function(engine=EngineChoice(name=EngineName(engine_name), max_array=max_array), **given)

    return with_engine


class Number(click.FloatRange):
    """A number in a range, or any; Python also reads "nan", which is none."""

    name = "number"

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        found = super().convert(cast("float", value), param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return float(found)


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
        size = 0.0 if str(value).strip() == "0" else bytes_of(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size; write for example 80GiB", param, ctx)
        if size < self._least:
            self.fail(f"{value!r} is less than {bytes_text(self._least)}; write for example 80GiB", param, ctx)
        return size
