"""The collectives of a sharded model: inside groups, across groups, and over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paro_advise.errors import CommunicationError, UsageError
from paro_advise.runtime.ho_ring import HoRing
from paro_advise.runtime.ho_ring.grid import Grid
from paro_advise.runtime.ho_ring.groups import Subgroups, runs_in_order
from paro_advise.runtime.ho_ring.rails import make_rails
from paro_advise.runtime.sharding.exchange.native import NativeGroup

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGrid:
    """The ranks as groups: rank = group * m + local.

    Attributes:
        rank, world_size: of this process.
        group_size: ranks of a group (m).
        ranks_per_node: ranks that share a node.

    Raises (on construction):
        UsageError: the group size does not divide the world.
    """

    rank: int
    world_size: int
    group_size: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.group_size < 1 or self.world_size % self.group_size:
            raise UsageError(
                f"the group size must divide the {self.world_size} ranks, got {self.group_size}",
                hint=f"one of {', '.join(str(size) for size in divisors(self.world_size))}",
            )

    @property
    def num_groups(self) -> int:
        """Return the number of groups (g)."""
        return self.world_size // self.group_size

    @property
    def group(self) -> int:
        """Return this rank's group (j)."""
        return self.rank // self.group_size

    @property
    def local(self) -> int:
        """Return this rank's place in its group (k)."""
        return self.rank % self.group_size

    @property
    def groups(self) -> list[list[int]]:
        """Return the ranks of each group."""
        return [[j * self.group_size + k for k in range(self.group_size)] for j in range(self.num_groups)]

    @property
    def nested_ranks(self) -> list[list[int]]:
        """Return the ranks by local rank, then by group: the order of slices."""
        return [[j * self.group_size + k for j in range(self.num_groups)] for k in range(self.group_size)]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


class Channels:
    """Collectives between the ranks of a grid; every call blocks, and all ranks make the same calls.

    A buffer over all ranks holds N blocks, by local rank, then by group (see layout), or by rank.

    Attributes:
        inside: collectives of this rank's group, HO-Ring's or the backend's own; None with one rank a group.
        across: collectives of equal local ranks; None with one group.
    """

    def __init__(self, grid: GroupGrid, *, native: bool = False) -> None:
        self.grid = grid
        self.inside: HoRing | NativeGroup | None
        self.across: HoRing | NativeGroup | None
        self._world: HoRing | NativeGroup | None
        m, g, per_node = grid.group_size, grid.num_groups, grid.ranks_per_node
        inside, across, world = grid.groups, grid.nested_ranks, [list(range(grid.world_size))]
        if native:
            subgroups = Subgroups((inside, across, world))
            self.inside = NativeGroup.of(subgroups.of(inside[grid.group]))
            self.across = NativeGroup.of(subgroups.of(across[grid.local]))
            self._world = NativeGroup.of(subgroups.of(world[0]))
            return
        inside_grid = Grid.of(m, grid.local, _fit(min(m, per_node), m))
        across_grid = Grid.of(g, grid.group, _fit(max(1, per_node // m), g))
        subgroups = Subgroups((*_rails(inside, inside_grid), *_rails(across, across_grid)))

        def ring(within: Grid, ranks: Sequence[int]) -> HoRing | None:
            rails = make_rails(within, ranks, subgroups)
            return HoRing.over(within, rails, ranks, grouped=runs_in_order()) if len(ranks) > 1 else None

        self.inside, self.across = ring(inside_grid, inside[grid.group]), ring(across_grid, across[grid.local])
        # Where groups are nodes, both stages of a world-wide collective overlap.
        overlaps = self.inside and self.across and m == per_node
        self._world = ring(Grid.of(grid.world_size, grid.rank, m), world[0]) if overlaps else None

    def gather_inside(self, slabs: torch.Tensor, slab: torch.Tensor) -> None:
        """Gather every local rank's slab: (m * T) from (T)."""
        if self.inside:
            self.inside.all_gather(slabs, slab)
        elif slabs.data_ptr() != slab.data_ptr():
            slabs.copy_(slab)

    def gather_across(self, slab: torch.Tensor, piece: torch.Tensor) -> None:
        """Gather every group's piece of a slab: (g * S) from (S)."""
        if self.across:
            self.across.all_gather(slab, piece)
        elif slab.data_ptr() != piece.data_ptr():
            slab.copy_(piece)

    def gather_all(self, buffer: torch.Tensor, piece: torch.Tensor) -> None:
        """Gather every rank's piece: (m * g * S) from (S)."""
        if self._world:
            self._world.all_gather(self._by_node(buffer, piece.numel()), piece)
            return
        slab = buffer.view(self.grid.group_size, -1)[self.grid.local]
        self.gather_across(slab, piece)
        self.gather_inside(buffer, slab)

    def reduce_inside(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum the buffers of a group and return this rank's slab: (T) from (m * T)."""
        if not self.inside:
            return buffer
        slab = buffer.new_empty(buffer.numel() // self.grid.group_size)
        self.inside.reduce_scatter(slab, buffer)
        return slab

    def reduce_across(self, slab: torch.Tensor) -> torch.Tensor:
        """Sum the slabs of all groups and return this rank's piece: (S) from (g * S)."""
        if not self.across:
            return slab
        piece = slab.new_empty(slab.numel() // self.grid.num_groups)
        self.across.reduce_scatter(piece, slab)
        return piece

    def reduce_all(self, buffer: torch.Tensor) -> torch.Tensor:
        """Sum the buffers of all ranks and return this rank's piece: (S) from (m * g * S)."""
        if self._world:
            piece = buffer.new_empty(buffer.numel() // self.grid.world_size)
            self._world.reduce_scatter(piece, self._by_node(buffer, piece.numel()))
            return piece
        return self.reduce_across(self.reduce_inside(buffer))

    def gather_by_rank(self, buffer: torch.Tensor, piece: torch.Tensor) -> None:
        """Gather every rank's piece in order of ranks: (N * S) from (S)."""
        if self._world:
            self._world.all_gather(buffer, piece)
            return
        grid = self.grid
        ordered = torch.empty_like(buffer)
        self.gather_all(ordered, piece)
        shape = (grid.group_size, grid.num_groups, piece.numel())
        buffer.view(grid.num_groups, grid.group_size, piece.numel()).copy_(ordered.view(shape).transpose(0, 1))

    def sum_all(self, buffer: torch.Tensor) -> None:
        """Sum buffers over all ranks in place; N divides their elements."""
        if self._world:
            self._world.all_reduce(buffer)
            return
        slab = self.reduce_inside(buffer)
        self.sum_across(slab)
        self.gather_inside(buffer, slab)

    def sum_across(self, slab: torch.Tensor) -> None:
        """Sum the slabs of all groups in place."""
        if self.across:
            self.across.all_reduce(slab)

    def _by_node(self, buffer: torch.Tensor, size: int) -> torch.Tensor:
        """Return a buffer's blocks as (groups, local ranks, S)."""
        return buffer.view(self.grid.group_size, self.grid.num_groups, size).transpose(0, 1)

    def sent(self) -> dict[str, tuple[int, int]]:
        """Return the (messages, bytes) that this rank has sent ``inside`` and ``across`` groups."""
        totals = {"inside": [0, 0], "across": [0, 0]}
        world = self._world
        parts = [
            ("inside", self.inside and self.inside.sent_between),
            ("inside", self.inside and self.inside.sent_inside),
            ("across", self.across and self.across.sent_between),
            ("across", self.across and self.across.sent_inside),
            ("inside", world and world.sent_inside),
            ("across", world and world.sent_between),
        ]
        for name, count in parts:
            if count:
                totals[name][0] += count.messages
                totals[name][1] += count.num_bytes
        return {name: (messages, num_bytes) for name, (messages, num_bytes) in totals.items()}

    def self_check(self, device: torch.device) -> None:
        """Sum and gather known numbers over all ranks.

        Args:
            device: that the backend communicates from.

        Raises:
            CommunicationError: the backend gives a wrong result.
        """
        world = self.grid.world_size
        total = self.reduce_all(torch.arange(world, dtype=torch.float32, device=device) + self.grid.rank)
        place = self.grid.local * self.grid.num_groups + self.grid.group
        expected = world * place + world * (world - 1) / 2
        gathered = torch.empty(world, dtype=torch.float32, device=device)
        self.gather_all(gathered, total)
        wanted = world * torch.arange(world, dtype=torch.float32, device=device) + world * (world - 1) / 2
        if total.item() != expected or not torch.equal(gathered, wanted):
            raise CommunicationError(
                f"sums of the communication backend must be right, expected {expected} on rank {self.grid.rank}, "
                f"got {total.item()}",
                hint="torch 2.8 with gloo averages wrongly; use torch 2.9 or later",
            )


def _rails(partition: Sequence[Sequence[int]], grid: Grid) -> list[list[list[int]]]:
    """Return the ranks of the communicators over nodes, and on nodes, of all groups that lie like one."""
    return [
        [[members[place] for place in rail] for members in partition for rail in rails]
        for rails in (grid.rings, grid.nodes)
    ]


def _fit(wanted: int, size: int) -> int:
    """Return ranks per node for a group, 1 (a plain ring) where nodes do not divide it."""
    return wanted if size % wanted == 0 else 1
