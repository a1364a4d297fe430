"""The rows of one parameter: along which dimension it is cut, and which rows a rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paro_advise.runtime.sharding.parameters.constants import SMALL_PADDING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def cut_dimension(shape: Sequence[int], num_ranks: int) -> int:
    """Return the dimension along which a parameter is cut: the first one, unless its padding is large and avoidable.

    FSDP2 cuts others only where all ranks get equally much.
    """
    if 0 in shape:
        return list(shape).index(0)  # of no elements none has a row
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
