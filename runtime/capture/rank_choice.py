"""Which ranks record: all, those that a user lists, or as few as show every node and process group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ALL, AUTO = "all", "auto"
_RANGES = re.compile(r"\d{1,7}(-\d{1,7})?(,\d{1,7}(-\d{1,7})?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChoice:
    """Which ranks record.

    Attributes:
        text: "all", "auto", or ranks such as "0-7,64".
    """

    text: str = ALL

    @classmethod
    def of(cls, text: str) -> RankChoice:
        """Read a choice.

        Raises:
            UsageError: it is none.
        """
        if text not in (ALL, AUTO) and not _RANGES.fullmatch(text):
            raise UsageError(
                f"ranks must be {ALL}, {AUTO} or a list, got {text!r}", hint="0-7,64 records the ranks 0 to 7 and 64"
            )
        return cls(text=text)

    def records(self, rank: int, ranks_per_node: int | None, groups: Iterable[Sequence[int]]) -> bool:
        """Tell whether a rank records; each rank asks for itself, and nothing needs to be agreed on.

        Of "auto" these are the first node's ranks, the first rank of every other node, and the lowest rank of each
        process group that none of these is of: between them every node and every group is seen.

        Args:
            rank: that asks.
            ranks_per_node: as the launcher says, None where it does not: then all record.
            groups: global ranks of each process group that the rank is of.
        """
        if self.text == ALL:
            return True
        if self.text != AUTO:
            return any(first <= rank <= last for first, last in _parts(self.text))
        if not ranks_per_node:
            return True

        def is_first(other: int) -> bool:
            return other < ranks_per_node or other % ranks_per_node == 0

        return is_first(rank) or any(min(group) == rank and not any(map(is_first, group)) for group in groups if group)


def _parts(text: str) -> list[tuple[int, int]]:
    pairs = [part.partition("-") for part in text.split(",")]
    return [(int(first), int(last or first)) for first, _, last in pairs]
