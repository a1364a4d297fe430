"""Ranks in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import number_ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def ranks_text(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {number_ranges(listed)}"


def verb(ranks: Collection[int]) -> str:
    """Return what ranks do that wait."""
    return "waits" if len(ranks) == 1 else "wait"
