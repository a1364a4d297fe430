"""Where the rows of a unit's parameters lie: in blocks for collectives, and in shards of ranks.

A unit is what is gathered and reduced together (a transformer block, say). With m ranks a group,
g groups and N = m * g ranks, local rank k of group j (rank j * m + k) owns at level G a *slice* of
every parameter, r rows long, and at level I all that the slices of local rank k in all groups
hold. Going between the two levels so needs traffic across groups only (docs/strategies.md,
the three states). There are two ways to cut:

* by bands: band k holds c rows from row k * c on, and slice (k, j) is the j-th of g parts of it.
  Needed wherever parameters or optimizer states rest at level I.
* by ranks: slice (k, j) holds the r rows from (j * m + k) * r on, as FSDP2 cuts over all ranks.

Rows are cut as torch.chunk and DTensor cut them; a last shard may be short or empty, and is padded
with zeros in buffers. Where that would cost much (8 experts, or a LoRA matrix of 16 rows, on 64
ranks) "rows" run along another dimension, which the ranks divide. A buffer of a unit holds m slabs.
A slab is either *packed*, a band of one parameter after the other, or *nested*: g pieces, each with
one slice of every parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from paro_advise.runtime.sharding.parameters.copies import Copies, Places, fill, spread
from paro_advise.runtime.sharding.parameters.rows import Rows, cut_dimension

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLayout:
    """The layout of a unit's buffers.

    Attributes:
        rows: one entry per parameter, in the unit's order.
        group_size: ranks of a group (m).
        num_groups: groups (g).
        nested: slabs are nested, else packed.
    """

    rows: tuple[Rows, ...]
    group_size: int
    num_groups: int
    nested: bool
    _whole: tuple[Copies, ...]
    _bands: tuple[Copies, ...]

    @classmethod
    def of(
        cls,
        shapes: Sequence[Sequence[int]],
        *,
        group_size: int,
        num_groups: int,
        local: int,
        nested: bool,
        by_ranks: bool,
    ) -> UnitLayout:
        """Lay out parameters of given shapes.

        Args:
            shapes: one per parameter.
            group_size: ranks of a group (m).
            num_groups: groups (g).
            local: this rank's place in its group.
            nested: see UnitLayout.
            by_ranks: cut by ranks, else by bands.
        """
        rows = []
        for shape in shapes:
            dim = cut_dimension(shape, group_size * num_groups)
            count = shape[dim] if len(shape) else 1
            slices = -(-count // (group_size * num_groups))
            bands = 0 if by_ranks else -(-count // group_size)
            rows.append(
                Rows(
                    dim=dim,
                    num_rows=count,
                    row_elements=prod(shape[:dim]) * prod(shape[dim + 1 :]),
                    blocks=prod(shape[:dim]),
                    band_rows=bands,
                    slice_rows=slices,
                    group_size=group_size,
                    num_groups=num_groups,
                )
            )
        whole, of_band = _copies(rows, group_size, num_groups, local, nested=nested)
        return cls(
            rows=tuple(rows),
            group_size=group_size,
            num_groups=num_groups,
            nested=nested,
            _whole=whole,
            _bands=of_band,
        )

    @property
    def slice_elements(self) -> int:
        """Return the elements of one rank's slices (S)."""
        return sum(rows.slice_elements for rows in self.rows)

    @property
    def packed_elements(self) -> int:
        """Return the elements of a packed slab."""
        return sum(rows.band_elements for rows in self.rows)

    @property
    def slab_elements(self) -> int:
        """Return the elements of a slab."""
        return self.num_groups * self.slice_elements if self.nested else self.packed_elements

    def fill(self, buffer: torch.Tensor, tensors: Sequence[torch.Tensor | None]) -> None:
        """Write whole parameters (or gradients) into a buffer.

        Args:
            buffer: m * slab elements.
            tensors: one per parameter, of its shape; None for zeros.
        """
        fill(self._whole, buffer, tensors)

    def spread(self, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Read whole parameters out of a buffer: the reverse of ``fill``."""
        spread(self._whole, buffer, tensors)

    def unnest(self, slab: torch.Tensor, bands: Sequence[torch.Tensor]) -> None:
        """Write a nested slab into the bands of the parameters.

        Args:
            slab: g * S elements.
            bands: one per parameter, the rows that this rank has, without padding.
        """
        spread(self._bands, slab, bands)

    def view_of(self, buffer: torch.Tensor, place: int, *, sliced: bool) -> torch.Tensor:
        """Return the part of a slab, or of S elements where ``sliced``, that belongs to one parameter."""
        if sliced or self.nested:
            by_group = buffer.view(-1, self.slice_elements)
            start = sum(rows.slice_elements for rows in self.rows[:place])
            return by_group.narrow(1, start, self.rows[place].slice_elements)
        return self.views_of_band(buffer)[place]

    def views_of_band(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's flat part of a packed slab, padding included."""
        parts = packed.split([rows.band_elements for rows in self.rows])  # type: ignore[no-untyped-call]  # as torch declares it
        return list(parts)

    def views_of_slice(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's flat part of S elements, padding included."""
        parts = piece.split([rows.slice_elements for rows in self.rows])  # type: ignore[no-untyped-call]  # as torch declares it
        return list(parts)


def _copies(
    rows: Sequence[Rows], group_size: int, num_groups: int, local: int, *, nested: bool
) -> tuple[tuple[Copies, ...], tuple[Copies, ...]]:
    """Return the copies of whole parameters, and, where slabs are nested, those of this rank's bands."""
    slice_elements = sum(one.slice_elements for one in rows)
    slab_elements = num_groups * slice_elements if nested else sum(one.band_elements for one in rows)
    start, whole, bands = 0, [], []
    for one in rows:
        elements = one.slice_elements if nested else one.band_elements
        places = Places(
            num_locals=group_size,
            num_groups=num_groups if nested else 1,
            local_step=slab_elements,
            group_step=slice_elements,
            start=start,
            elements=elements,
        )
        whole.append(Copies.of(one, one.num_rows, places))
        if nested:
            first, last = one.band(local)
            bands.append(Copies.of(one, last - first, replace(places, num_locals=1)))
        start += elements
    return tuple(whole), tuple(bands)
