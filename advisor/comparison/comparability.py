"""Whether two runs can be compared: the same work on the same number of ranks (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.comparison.constants import SAME_COUNT_SHARE
from paro_advise.errors import UnlikeRunsError

if TYPE_CHECKING:
    from collections.abc import Collection

    from paro_advise.advisor.analysis.model import Analysis

FACTS = ("world_size", "batch", "micro_batches", "precision", "parameters")


def check_comparability(before: Analysis, after: Analysis, allowed: Collection[str]) -> tuple[str, ...]:
    """Return in what the runs differ although the user allows it.

    Raises:
        UnlikeRunsError: they differ in something that was not allowed.
    """
    found = []
    for fact, one, other in _facts(before, after):
        text = f"{fact} {one} before and {other} after"
        if fact not in allowed:
            raise UnlikeRunsError(
                f"both runs must do the same work, got {text}",
                hint=f"capture both in the same way, or pass --allow-unlike {fact} if you know what it means",
            )
        found.append(text)
    return tuple(found)


def _facts(before: Analysis, after: Analysis) -> list[tuple[str, str, str]]:
    """Return (fact, before, after) of each that is known of both and differs."""
    pairs: list[tuple[str, object, object]] = [
        ("world_size", before.run.world_size, after.run.world_size),
        ("micro_batches", before.run.micro_batches, after.run.micro_batches),
    ]
    if before.captured and after.captured:
        one, other = before.captured, after.captured
        pairs.append(("batch", ", ".join(one.inputs), ", ".join(other.inputs)))
        pairs.append(("precision", one.autocast or "no autocast", other.autocast or "no autocast"))
    first, second = before.run.parameter_count, after.run.parameter_count
    if first and second and abs(first - second) > SAME_COUNT_SHARE * first:
        pairs.append(("parameters", first, second))
    return [(name, str(one), str(other)) for name, one, other in pairs if one and other and one != other]
