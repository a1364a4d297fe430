"""Copies between a unit's parameters and a buffer of places: few strided pieces, however many ranks there are.

The places of full bands, or of full ranks, lie at equal distances in a parameter and in a buffer: one strided copy
moves them all. Only what is left at the end of a parameter, and of its bands, takes another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.sharding.parameters.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a parameter's places lie in a buffer.

    Attributes:
        num_locals, num_groups: how many there are by local rank, and by group; 1 where a buffer has no others.
        local_step, group_step: elements from one place to the next.
        start: elements before the first.
        elements: of a place, padding included.
    """

    num_locals: int
    num_groups: int
    local_step: int
    group_step: int
    start: int
    elements: int

    def at(self, local: int, group: int) -> int:
        """Return the elements before a place."""
        return self.start + local * self.local_step + group * self.group_step


class _Along(NamedTuple):
    """How often runs of rows repeat, and after how many rows of a parameter and elements of a buffer each time."""

    times: int
    rows: int
    elements: int


_ONCE = _Along(1, 0, 0)


class _Piece(NamedTuple):
    """Runs of rows, and the places that they go to: one for each step along two directions."""

    first_row: int
    num_rows: int  # of a run
    place: int  # elements before the first run's
    outer: _Along
    inner: _Along


class _Area(NamedTuple):
    """Places of some local ranks in some groups."""

    locals: range
    groups: range


class _Strided(NamedTuple):
    """A view of one piece of memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of one parameter, or of a band of it.

    Attributes:
        rows: views of the parameter.
        places: views of the buffer, of the same sizes.
        padding: views of the buffer where no rows go.
        whole: view of all its places.
    """

    rows: tuple[_Strided, ...]
    places: tuple[_Strided, ...]
    padding: tuple[_Strided, ...]
    whole: _Strided

    @classmethod
    def of(cls, rows: Rows, num_rows: int, places: Places) -> Copies:
        """Find them.

        Args:
            rows: how the parameter is cut.
            num_rows: rows that the tensor has.
            places: for all local ranks of all groups, for those of one group's bands, or for the groups of one band.
        """
        pieces, unused = (_by_bands if rows.band_rows else _by_ranks)(rows, num_rows, places)
        inner = rows.row_elements // max(1, rows.blocks)
        views, targets, padding = [], [], [_area(places, area) for area in unused]
        for piece in pieces if rows.row_elements else ():
            outer, along = piece.outer, piece.inner
            run = piece.num_rows * inner
            size = (rows.blocks, outer.times, along.times, run)
            steps = (num_rows * inner, outer.rows * inner, along.rows * inner, 1)
            views.append(_Strided(size, steps, piece.first_row * inner))
            targets.append(_Strided(size, (run, outer.elements, along.elements, 1), piece.place))
            used = piece.num_rows * rows.row_elements
            rest = (outer.times, along.times, places.elements - used)
            padding.append(_Strided(rest, (outer.elements, along.elements, 1), piece.place + used))
        return cls(
            rows=tuple(views),
            places=tuple(targets),
            padding=tuple(view for view in padding if all(view.size)),
            whole=_area(places, _Area(range(places.num_locals), range(places.num_groups))),
        )


def fill(copies: Sequence[Copies], buffer: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
    """Write tensors into a buffer, and zeros where a tensor is None or there is padding."""
    targets, sources = [], []
    for found, tensor in zip(copies, tensors, strict=True):
        for blank in (found.whole,) if tensor is None else found.padding:
            blank.of(buffer).zero_()
        if tensor is not None:
            flat = tensor.reshape(-1)
            targets += [view.of(buffer) for view in found.places]
            sources += [view.of(flat) for view in found.rows]
    if targets:
        torch._foreach_copy_(targets, sources)


def spread(copies: Sequence[Copies], buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Read tensors out of a buffer: the reverse of ``fill``."""
    sources = [view.of(buffer) for found in copies for view in found.places]
    targets = [view.of(tensor) for found, tensor in zip(copies, tensors, strict=True) for view in found.rows]
    if targets:
        torch._foreach_copy_(targets, sources)


def _by_bands(rows: Rows, num_rows: int, places: Places) -> tuple[list[_Piece], list[_Area]]:
    """Cut by bands, and each band among the groups that have places."""
    pieces, unused = [], []
    full, rest = divmod(num_rows, rows.band_rows)
    local = 0
    for count, band in ((full, rows.band_rows), (1, rest)):
        if not count or not band:
            continue
        size = -(-band // places.num_groups)
        groups, tail = divmod(band, size)
        outer, first = _Along(count, band, places.local_step), local * rows.band_rows
        pieces.append(_Piece(first, size, places.at(local, 0), outer, _Along(groups, size, places.group_step)))
        if tail:
            pieces.append(_Piece(first + groups * size, tail, places.at(local, groups), outer, _ONCE))
        used = groups + (tail > 0)
        unused.append(_Area(range(local, local + count), range(used, places.num_groups)))
        local += count
    unused.append(_Area(range(local, places.num_locals), range(places.num_groups)))
    return pieces, unused


def _by_ranks(rows: Rows, num_rows: int, places: Places) -> tuple[list[_Piece], list[_Area]]:
    """Cut by ranks: all local ranks of a group, then those of the next one."""
    size, locals_ = rows.slice_rows, places.num_locals
    full, rest = divmod(num_rows, size) if size else (0, 0)
    groups, left = divmod(full, locals_)
    over_locals = _Along(locals_, size, places.local_step)
    pieces = []
    if groups:
        outer = _Along(groups, locals_ * size, places.group_step)
        pieces.append(_Piece(0, size, places.at(0, 0), outer, over_locals))
    if left:
        pieces.append(
            _Piece(groups * locals_ * size, size, places.at(0, groups), _ONCE, over_locals._replace(times=left))
        )
    if rest:
        pieces.append(_Piece(full * size, rest, places.at(left, groups), _ONCE, _ONCE))
    used = left + (rest > 0)
    started = range(groups, min(groups + 1, places.num_groups))
    unused = [
        _Area(range(used, locals_), started),
        _Area(range(locals_), range(started.stop, places.num_groups)),
    ]
    return pieces, unused


def _area(places: Places, area: _Area) -> _Strided:
    size = (len(area.locals), len(area.groups), places.elements)
    return _Strided(size, (places.local_step, places.group_step, 1), places.at(area.locals.start, area.groups.start))
