"""Ranks in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.advisor.wording.quantities import number_ranges

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from paro_advise.advisor.hangs.model import Culprit

_NAMED = 4  # ranks whose reasons the verdict says; all stand in the table


def named_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"."""
    listed = sorted(ranks)
    return f"rank {listed[0]}" if len(listed) == 1 else f"ranks {number_ranges(listed)}"


def verb(ranks: Collection[int]) -> str:
    """Return what ranks do that wait."""
    return "waits" if len(ranks) == 1 else "wait"


def blame(culprits: Sequence[Culprit]) -> str:
    """Return which ranks hold the others up, and why, in sentences."""
    holds = "holds" if len(culprits) == 1 else "hold"
    reasons = " ".join(f"Rank {one.rank} {one.why}." for one in culprits[:_NAMED])
    more = f" And {len(culprits) - _NAMED} more." if len(culprits) > _NAMED else ""
    return f"{named_ranks(one.rank for one in culprits).capitalize()} {holds} the others up. {reasons}{more}"
