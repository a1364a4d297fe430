"""A quick look at the heads of inputs: which ranks are there, before any work is done."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.errors import InputError
from paro_advise.trace_parsers.constants import MAX_WORLD_SIZE
from paro_advise.trace_parsers.kineto.header import rank_in_trace_name
from paro_advise.trace_parsers.read import looks_like_kineto, read_head

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.trace_parsers.bytes.blocks import SourceRef

_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"rank"\s*:\s*(\d{1,9})\b')
_TRACE_NAME = re.compile(r"(?i)\.json(?:\.(?:gz|zst|bz2|xz))?$")
_WORLD = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"world_size"\s*:\s*(\d{1,9})\b')


@dataclass(frozen=True, slots=True, kw_only=True)
class Peek:
    """What the heads say.

    Attributes:
        ranks: rank to the number of traces that claim it.
        world_size: the largest one claimed, None when none is.
        num_unnamed: traces whose rank neither content nor name gives.
        traces: by rank as their names tell it, those that do not last; what is no trace is left out.
    """

    ranks: dict[int, int]
    world_size: int | None
    num_unnamed: int
    traces: tuple[SourceRef, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """Return the ranks of the world that no trace claims."""
        world = min(self.world_size or 0, MAX_WORLD_SIZE)
        return tuple(sorted(set(range(world)) - set(self.ranks)))

    @property
    def doubles(self) -> tuple[int, ...]:
        """Return the ranks that several traces claim."""
        return tuple(sorted(rank for rank, count in self.ranks.items() if count > 1))


def peek(refs: Sequence[SourceRef]) -> Peek:
    """Look at the first 64 KiB of every trace; what cannot be read is left to the reading proper.

    Of inputs in stores only the name is looked at: a trace's tells a rank, or ends as a trace's does.
    """
    ranks: dict[int, int] = {}
    worlds: list[int] = []
    unnamed = 0
    traces: list[tuple[int, str, SourceRef]] = []
    for ref in refs:
        in_name = rank = rank_in_trace_name(ref.label)
        if ref.remote is None:
            try:
                head = read_head(ref)
            except InputError:
                continue
            if not looks_like_kineto(head):
                continue
            if found := _RANK.search(head):
                rank = int(found.group(1))
            if world := _WORLD.search(head):
                worlds.append(int(world.group(1)))
        elif rank is None and _TRACE_NAME.search(ref.label) is None:
            continue
        traces.append((MAX_WORLD_SIZE if in_name is None else in_name, ref.label, ref))
        if rank is None:
            unnamed += 1
        else:
            ranks[rank] = ranks.get(rank, 0) + 1
    return Peek(
        ranks=ranks,
        world_size=max(worlds, default=None),
        num_unnamed=unnamed,
        traces=tuple(ref for _, _, ref in sorted(traces, key=lambda item: item[:2])),
    )
