"""Lists of ranks as text: the key by which tables name a process group.

Every collective of a group repeats its text, and a world of thousands listed one by one would fill memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.trace_parsers.constants import MAX_PLAIN_RANKS, MAX_RANKS_TEXT, MAX_TEXT_RANKS

if TYPE_CHECKING:
    from collections.abc import Sequence


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text, equal for equal lists: "3,5", of many ranks "0:4096:1,8192:8256:8" (start:stop:stride).

    Returns:
        "" for none, and for more than 16,384 ranks or 4 KiB of text.
    """
    if len(ranks) <= MAX_PLAIN_RANKS:
        return ",".join(map(str, ranks))
    if len(ranks) > MAX_TEXT_RANKS:
        return ""
    parts = []
    first = 0
    while first < len(ranks):
        last = _end_of_run(ranks, first)
        stride = ranks[last] - ranks[last - 1] if last > first else 1
        parts.append(f"{ranks[first]}:{ranks[last] + 1}:{stride}" if last > first else str(ranks[first]))
        first = last + 1
    text = ",".join(parts)
    return text if len(text) <= MAX_RANKS_TEXT else ""


def _end_of_run(ranks: Sequence[int], first: int) -> int:
    """Return the place of the last rank that rises in equal strides from one on."""
    if first + 1 >= len(ranks) or ranks[first + 1] <= ranks[first]:
        return first
    stride = ranks[first + 1] - ranks[first]
    last = first + 1
    while last + 1 < len(ranks) and ranks[last + 1] - ranks[last] == stride:
        last += 1
    return last


def ranks_in(text: str) -> list[int]:
    """Return the ranks that a text of ``ranks_text`` lists."""
    return [rank for part in _ranges_in(text) for rank in part]


def highest_rank(text: str) -> int | None:
    """Return the highest rank that a text of ``ranks_text`` lists, None of none."""
    return max((max(part[0], part[-1]) for part in _ranges_in(text) if part), default=None)


def _ranges_in(text: str) -> list[range]:
    parts = [[int(number) for number in part.split(":")] for part in text.split(",") if part]
    return [range(*part) if len(part) > 1 else range(part[0], part[0] + 1) for part in parts]
