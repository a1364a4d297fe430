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

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from paro_advise.runtime.sharding.parameters.constants import SMALL_PADDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def cut_dimension(shape: Sequence[int], num_ranks: int) -> int:
    """Return the dimension along which a parameter is cut: the first one, unless its padding is large and avoidable.

    FSDP2 cuts others only where all ranks get equally much.
    """
    if not len(shape) or -(-shape[0] // num_ranks) * num_ranks <= (1 + SMALL_PADDING) * shape[0]:
        return 0
    return next((dim for dim, size in enumerate(shape) if size and size % num_ranks == 0), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one parameter.

    Attributes:
        dim: the dimension that is cut; rows are what is at one place along it.
        num_rows: length of that dimension; 1 for a scalar.
        row_elements: elements of a row.
        blocks: how many pieces of memory a row is in, one for the first dimension.
        band_rows: rows of a band (c); 0 when cut by ranks.
        slice_rows: rows of a slice (r), of a full band.
        group_size: ranks of a group (m).
        num_groups: groups (g).
    """

    dim: int
    num_rows: int
    row_elements: int
    blocks: int
    band_rows: int
    slice_rows: int
    group_size: int
    num_groups: int

    def cut(self, tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return a view of rows of a tensor that has this parameter's other dimensions."""
        return (tensor if tensor.dim() else tensor.view(1)).narrow(self.dim, start, stop - start)

    def write(self, place: torch.Tensor, tensor: torch.Tensor | None, start: int, stop: int) -> None:
        """Copy rows of a tensor, whole or a band, to the start of a flat place and clear the rest of it."""
        used = (stop - start) * self.row_elements if tensor is not None else 0
        if tensor is not None and used:
            self._blocks_of(place[:used]).copy_(self._blocks_of(tensor.reshape(-1))[:, start:stop])
        if used < place.numel():
            place[used:].zero_()

    def read(self, place: torch.Tensor, tensor: torch.Tensor, start: int, stop: int) -> None:
        """Copy the start of a flat place to rows of a tensor."""
        used = (stop - start) * self.row_elements
        if used:
            self._blocks_of(tensor.view(-1))[:, start:stop].copy_(self._blocks_of(place[:used]))

    def _blocks_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return flat memory as (blocks, rows, elements of a row in a block)."""
        return flat.view(self.blocks, -1, self.row_elements // self.blocks)

    def band(self, local: int) -> tuple[int, int]:
        """Return the first row of a band and the one behind its last."""
        return min(self.num_rows, local * self.band_rows), min(self.num_rows, (local + 1) * self.band_rows)

    def slice(self, local: int, group: int) -> tuple[int, int]:
        """Return the first row of a slice and the one behind its last."""
        if not self.band_rows:
            place = group * self.group_size + local
            return min(self.num_rows, place * self.slice_rows), min(self.num_rows, (place + 1) * self.slice_rows)
        start, stop = self.band(local)
        first, last = self.slice_of_band(stop - start, group)
        return start + first, start + last

    def slice_of_band(self, band_rows: int, group: int) -> tuple[int, int]:
        """Return the rows of a slice inside a band of so many rows, as torch.chunk cuts it."""
        size = -(-band_rows // self.num_groups)
        return min(band_rows, group * size), min(band_rows, (group + 1) * size)

    @property
    def band_elements(self) -> int:
        """Return the elements of a band in a buffer, padding included."""
        return self.band_rows * self.row_elements

    @property
    def slice_elements(self) -> int:
        """Return the elements of a slice in a buffer, padding included."""
        return self.slice_rows * self.row_elements


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

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], *, group_size: int, num_groups: int, nested: bool, by_ranks: bool
    ) -> UnitLayout:
        """Lay out parameters of given shapes.

        Args:
            shapes: one per parameter.
            group_size: ranks of a group (m).
            num_groups: groups (g).
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
        return cls(rows=tuple(rows), group_size=group_size, num_groups=num_groups, nested=nested)

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
        slabs = buffer.view(self.group_size, self.slab_elements)
        for local in range(self.group_size):
            self._fill_slab(slabs[local], tensors, local)

    def _fill_slab(self, slab: torch.Tensor, tensors: Sequence[torch.Tensor | None], local: int) -> None:
        for (rows, places), tensor in zip(self._places(slab), tensors, strict=True):
            for group, place in enumerate(places):
                start, stop = rows.slice(local, group) if self.nested else rows.band(local)
                rows.write(place, tensor, start, stop)

    def spread(self, buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Read whole parameters out of a buffer: the reverse of ``fill``."""
        slabs = buffer.view(self.group_size, self.slab_elements)
        for local in range(self.group_size):
            for (rows, places), tensor in zip(self._places(slabs[local]), tensors, strict=True):
                for group, place in enumerate(places):
                    start, stop = rows.slice(local, group) if self.nested else rows.band(local)
                    rows.read(place, tensor, start, stop)

    def with_missing(self, blocks: torch.Tensor, present: Sequence[bool], *, by_bands: bool) -> torch.Tensor:
        """Return FSDP2's blocks with zeros for the parameters that it has left out.

        Args:
            blocks: one after the other, each with the shards of the parameters that are present.
            present: one per parameter.
            by_bands: shards are bands, else slices.
        """
        sizes = [rows.band_elements if by_bands else rows.slice_elements for rows in self.rows]
        given = sum(size for size, is_present in zip(sizes, present, strict=True) if is_present)
        if not given or blocks.numel() % given:
            return blocks
        table = blocks.view(-1, given)
        whole = blocks.new_zeros(table.shape[0], sum(sizes))
        place = taken = 0
        for size, is_present in zip(sizes, present, strict=True):
            if is_present:
                whole[:, place : place + size].copy_(table[:, taken : taken + size])
                taken += size
            place += size
        return whole.view(-1)

    def nest(self, slab: torch.Tensor, packed: torch.Tensor, local: int) -> None:
        """Reorder a packed slab of a local rank into a nested one."""
        for (rows, places), band in zip(self._places(slab), self.views_of_band(packed), strict=True):
            first, last = rows.band(local)
            for group, place in enumerate(places):
                rows.write(place, band, *rows.slice_of_band(last - first, group))

    def unnest(self, slab: torch.Tensor, bands: Sequence[torch.Tensor]) -> None:
        """Write a nested slab into the bands of the parameters.

        Args:
            slab: g * S elements.
            bands: one per parameter, the rows that this rank has, without padding.
        """
        for (rows, places), band in zip(self._places(slab), bands, strict=True):
            have = band.numel() // rows.row_elements if rows.row_elements else 0
            for group, place in enumerate(places):
                rows.read(place, band, *rows.slice_of_band(have, group))

    def _places(self, slab: torch.Tensor) -> list[tuple[Rows, list[torch.Tensor]]]:
        """Return each parameter's pieces of a slab: g if nested, one otherwise."""
        if not self.nested:
            return [(rows, [view]) for rows, view in zip(self.rows, self.views_of_band(slab), strict=True)]
        pieces = slab.view(self.num_groups, self.slice_elements)
        per_group = [self.views_of_slice(piece) for piece in pieces]
        return [(rows, [views[place] for views in per_group]) for place, rows in enumerate(self.rows)]

    def views_of(self, buffer: torch.Tensor, place: int, *, sliced: bool) -> list[torch.Tensor]:
        """Return the parts of a slab, or of S elements where ``sliced``, that belong to one parameter."""
        if sliced:
            return [self.views_of_slice(buffer)[place]]
        return self._places(buffer)[place][1]

    def views_of_band(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's flat part of a packed slab, padding included."""
        parts = packed.split([rows.band_elements for rows in self.rows])  # type: ignore[no-untyped-call]  # as torch declares it
        return list(parts)

    def views_of_slice(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's flat part of S elements, padding included."""
        parts = piece.split([rows.slice_elements for rows in self.rows])  # type: ignore[no-untyped-call]  # as torch declares it
        return list(parts)
