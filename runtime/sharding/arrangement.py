"""A model under one strategy: its levels, groups, units, and the meshes that its shards are shown on."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_group
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from paro_advise.policies.strategy import Level, Strategy
from paro_advise.runtime.ho_ring.groups import Subgroups, largest
from paro_advise.runtime.sharding.exchange.channels import Channels
from paro_advise.runtime.sharding.exchange.host_copies import pinned_for
from paro_advise.runtime.sharding.exchange.operators import complete_operators
from paro_advise.runtime.sharding.exchange.procedure import UnitState
from paro_advise.runtime.sharding.parameters.layout import UnitLayout
from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.settings import effective

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Thread

    from torch import nn
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from paro_advise.runtime.sharding.exchange.channels import GroupGrid
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec


class Communicators:
    """The channels and meshes of a model, made once per group size and device.

    Those of a model that is gone serve the next one: each set costs process groups, threads and sockets.

    Attributes:
        owner: whom they are lent to; a reference that does not keep it.
        threads: that run the owner's collectives.
        native: see ``Channels``.
    """

    # Of the present default group: torch forgets all groups with it.
    _of_world: ClassVar[tuple[weakref.ref[dist.ProcessGroup], list[Communicators]] | None] = None

    @classmethod
    def lent_to(cls, owner: object, threads: Sequence[Thread], *, native: bool = False) -> Communicators:
        """Return communicators for as long as an owner lives; all ranks call it together.

        Args:
            owner: of the model.
            threads, native: see ``Communicators``; the threads end some time after the owner.
        """
        world = _get_default_group()
        if cls._of_world is None or cls._of_world[0]() is not world:
            cls._of_world = weakref.ref(world), []
            # What torch has remembered of equal meshes before holds groups that are gone.
            _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # as torch declares it
        made = cls._of_world[1]
        # Where a model goes with Python's collector, it goes on each rank at another time.
        is_lent = largest([one.native != native or one.owner() is not None for one in made]) if made else []
        if 0 in is_lent:
            chosen = made[is_lent.index(0)]
            for thread in chosen.threads:
                thread.join()
        else:
            chosen = cls(native=native)
            made.append(chosen)
        chosen.owner, chosen.threads = weakref.ref(owner), threads
        return chosen

    def __init__(self, *, native: bool = False) -> None:
        self.owner: Callable[[], object] = lambda: None
        self.threads: Sequence[Thread] = ()
        self.native = native
        self._channels: dict[tuple[int, int], tuple[Channels, Channels]] = {}
        self._meshes: dict[tuple[int, str], DeviceMesh] = {}
        complete_operators()

    def channels(self, grid: GroupGrid) -> tuple[Channels, Channels]:
        """Return the channels of reductions and of gathers; both run at once, so each has its own communicators."""
        key = grid.group_size, grid.ranks_per_node
        if key not in self._channels:
            reducing, gathering = (Channels(grid, native=self.native) for _ in range(2))
            self._channels[key] = reducing, gathering
        return self._channels[key]

    def world_mesh(self, grid: GroupGrid, device: torch.device) -> DeviceMesh:
        """Return the mesh over all ranks."""
        key = (0, device.type)
        if key not in self._meshes:
            # Without a name, as fully_shard makes it: shards that each rank saves for itself then fit plain FSDP2.
            self._meshes[key] = DeviceMesh(device.type, torch.arange(grid.world_size, device="cpu"))
            WholeReads.watch(self._meshes[key])
        return self._meshes[key]

    def nested_mesh(self, grid: GroupGrid, device: torch.device) -> DeviceMesh:
        """Return the mesh over the ranks of a group, then over groups."""
        key = (grid.group_size, device.type)
        if key not in self._meshes:
            # Scripts read and clip in their own thread, beside those that use the channels.
            subgroups = Subgroups((grid.groups, grid.nested_ranks))
            made = subgroups.of(grid.groups[grid.group]), subgroups.of(grid.nested_ranks[grid.local])
            parts = [part for part in made if part is not None]
            ranks = torch.tensor(grid.nested_ranks, device="cpu")
            mesh = DeviceMesh.from_group(parts, device.type, ranks, mesh_dim_names=("inside", "across"))
            # Not flattened: torch would gather over all ranks at once, in their order, not in that of the mesh.
            for part in (mesh, mesh["inside"]):
                WholeReads.watch(part)
            self._meshes[key] = mesh
        return self._meshes[key]


class _Place(NamedTuple):
    unit: UnitState
    place: int | None  # among those that train
    slot: Slot
    resting: nn.Parameter


def _places_of(unit: UnitState) -> list[_Place]:
    numbers = {slot.name: place for place, slot in enumerate(unit.spec.training)}
    return [_Place(unit, numbers.get(slot.name), slot, resting) for slot, resting in unit.at_rest()]


class Arrangement:
    """A model under one strategy.

    Attributes:
        strategy: as asked for.
        levels: the same with level I only where it differs from N and G.
        grid: groups.
        units: in the order of ``find_units``: the root last.
        reducing, gathering: channels of gradients, and of parameters.
        device: the model's.
    """

    def __init__(
        self,
        specs: Sequence[UnitSpec],
        strategy: Strategy,
        grid: GroupGrid,
        device: torch.device,
        communicators: Communicators,
    ) -> None:
        self.strategy, self.grid, self.device = strategy, grid, device
        self.levels = effective(strategy, grid)
        self.reducing, self.gathering = communicators.channels(grid)
        self._communicators = communicators
        self.units = [UnitState(spec=spec, layout=self._layout(spec)) for spec in specs]
        self._places: dict[int, _Place] = {}
        self._specs: dict[tuple[str, int, torch.device, torch.dtype], DTensorSpec] = {}

    def _layout(self, spec: UnitSpec) -> UnitLayout:
        levels = self.levels
        return UnitLayout.of(
            [slot.shape for slot in spec.training],
            group_size=self.grid.group_size,
            num_groups=self.grid.num_groups,
            local=self.grid.local,
            nested=levels.optimizer == Level.G,
            by_ranks=levels.optimizer == Level.G and levels.parameter != Level.I,
        )

    @property
    def forward_order(self) -> list[UnitState]:
        """Return the units as forward uses them: the root first; its gradients are complete last."""
        return [self.units[-1], *self.units[:-1]]

    def place_of(self, parameter: torch.Tensor) -> tuple[UnitState, int] | None:
        """Return the unit of one of the model's parameters that train, and its place there; None for others.

        Between forward and backward a gathered copy may stand in the place of the one that rests: both are known.
        """
        found = self._places.get(id(parameter))
        if found is None or not any(parameter is known for known in (found.slot.parameter, found.resting)):
            # Parameters are new objects after each sharding.
            places = [place for unit in self.units for place in _places_of(unit)]
            self._places = {id(known): place for place in places for known in (place.resting, place.slot.parameter)}
            found = self._places.get(id(parameter))
        return None if found is None or found.place is None else (found.unit, found.place)

    def rows_at(self, level: Level, unit: UnitState, place: int) -> tuple[int, int]:
        """Return the rows of a trained parameter that this rank has at a level."""
        rows, grid = unit.layout.rows[place], self.grid
        match level:
            case Level.N:
                return 0, rows.num_rows
            case Level.I:
                return rows.band(grid.local)
            case _:
                return rows.slice(grid.local, grid.group)

    def own_rows(self, unit: UnitState, place: int, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a whole tensor that this rank has at the optimizer's level."""
        start, stop = self.rows_at(self.levels.optimizer, unit, place)
        return unit.layout.rows[place].cut(whole.detach(), start, stop)

    def copy_of_own_rows(
        self,
        unit: UnitState,
        place: int,
        whole: torch.Tensor,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return a copy of ``own_rows`` as one piece of memory, on another device and in another type where asked."""
        rows = self.own_rows(unit, place, whole)
        copy = rows.to(device or rows.device, dtype or rows.dtype, copy=True, memory_format=torch.contiguous_format)
        return pinned_for(rows.device, copy)

    def parameter_mesh(self) -> DeviceMesh:
        """Return the mesh that FSDP2 shards over: the group, or all ranks."""
        if self.levels.parameter == Level.I:
            return self._communicators.nested_mesh(self.grid, self.device)["inside"]
        return self._communicators.world_mesh(self.grid, self.device)

    def as_sharded(self, unit: UnitState, place: int, local: torch.Tensor) -> torch.Tensor:
        """Return the rows at the optimizer's level as a DTensor; whole tensors stay as they are."""
        level = self.levels.optimizer
        if level == Level.N or self.grid.world_size == 1:
            return local
        # Made for each gradient in each step: what says how it is sharded is made once.
        key = (unit.spec.name, place, local.device, local.dtype)
        if key not in self._specs:
            self._specs[key] = self._shard_anew(unit, place, local)._spec  # noqa: SLF001
        return _in_layout(local, self._specs[key])

    def as_dtensor(self, unit: UnitState, place: int, local: torch.Tensor) -> torch.Tensor:
        """Return the rows at the optimizer's level as a DTensor, a replicated one where they are whole."""
        return self.replicated(self.as_sharded(unit, place, local))

    def replicated(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor as a DTensor that every rank holds whole; DTensors stay as they are."""
        if isinstance(tensor, DTensor):
            return tensor
        mesh = self._communicators.world_mesh(self.grid, tensor.device)
        spec = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)._spec  # noqa: SLF001
        return _in_layout(tensor, spec)

    def _shard_anew(self, unit: UnitState, place: int, local: torch.Tensor) -> DTensor:
        level = self.levels.optimizer
        rows = unit.layout.rows[place]
        placements: list[Placement] = [Shard(rows.dim)]
        if level == Level.I:
            mesh = self._communicators.nested_mesh(self.grid, local.device)["inside"]
        elif rows.band_rows:
            mesh, placements = self._communicators.nested_mesh(self.grid, local.device), placements * 2
        else:
            mesh = self._communicators.world_mesh(self.grid, local.device)
        shape = unit.spec.training[place].shape
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

    def span_name(self, state: str, unit: UnitState) -> str:
        """Return what a profile shows of a job: the model state it moves, of which unit, under which strategy."""
        count = sum(slot.shape.numel() for slot in unit.spec.training)
        return f"{state} ({unit.spec.name or 'root'}) {count} {self.levels}/{self.grid.group_size}"


def _in_layout(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor over the memory of a view, which torch 2.13 cannot save if it knows where the view begins."""
    found = _from_local_no_grad(local.new_empty(0) if local.storage_offset() else local, spec)
    found._local_tensor = local  # noqa: SLF001 - its constructor takes type, device and offset from what it is given
    return found
