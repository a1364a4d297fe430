"""The global ranks of a collective's process group."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paro_advise.trace_parsers.kineto.constants import MAX_RANGE_RANKS, MAX_RANK_DIGITS, MAX_READ_RANKS_TEXT
from paro_advise.trace_parsers.kineto.events import CommArgs, as_int
from paro_advise.trace_parsers.rank_lists import ranks_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paro_advise.trace_parsers.tables import ProcessGroup

_INTEGERS = re.compile(r"\d+")
_LIST = re.compile(r"[\d\s,\[\]()]+")  # of ranks and nothing else: neither "..." nor what is no rank


def group_ranks(args: CommArgs, groups: Mapping[str, ProcessGroup]) -> tuple[int, ...]:
    """Return the global ranks of a collective's process group, () when they cannot be known.

    Kineto cuts the list at 30 entries; then the group's configuration, or start and stride, give the ranks.
    """
    size = as_int(args.group_size)
    text = str(args.group_ranks or "")[:MAX_READ_RANKS_TEXT]
    listed = tuple(int(number) for number in _INTEGERS.findall(text) if len(number) <= MAX_RANK_DIGITS)
    is_list = _LIST.fullmatch(text) is not None
    if listed and is_list and (size is None or len(listed) == size):
        return listed
    known = groups.get(str(args.group_name))
    if known and known.ranks and (size is None or known.size == size):
        return known.ranks
    start, stride = as_int(args.rank_start), as_int(args.rank_stride)
    if start is None or stride is None or size is None:
        return ()
    is_sound = stride > 0 and 0 < size <= MAX_RANGE_RANKS
    return tuple(range(start, start + stride * size, stride)) if is_sound else ()


class GroupTexts:
    """The global ranks of groups as text (see ranks_text); the same few groups come again and again."""

    def __init__(self, groups: Mapping[str, ProcessGroup]) -> None:
        self._groups = groups
        self._known: dict[tuple[str, ...], str] = {}

    def ranks(self, args: CommArgs) -> str:
        """Return the ranks of a collective's group, "" when unknown."""
        asked = (args.group_ranks, args.group_name, args.group_size, args.rank_start, args.rank_stride)
        key = tuple(map(str, asked))
        if key not in self._known:
            self._known[key] = ranks_text(group_ranks(args, self._groups))
        return self._known[key]
