"""Ties a model, its optimizer and the procedure of a strategy together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level, Strategy
from paro_advise.runtime.ho_ring.spans import Span
from paro_advise.runtime.ho_ring.worker import reaching_all_ranks
from paro_advise.runtime.sharding.exchange.channels import Channels, Queue
from paro_advise.runtime.sharding.exchange.exposure import Exposure
from paro_advise.runtime.sharding.exchange.procedure import Procedure, UnitState
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.layout import UnitLayout
from paro_advise.runtime.sharding.parameters.replicated import ReplicatedUnits, cast_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.exchange.channels import GroupGrid
    from paro_advise.runtime.sharding.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model is sharded beside its strategy.

    Attributes:
        param_dtype: type to compute in and to keep parameters in; None for the parameters' own.
        reduce_dtype: type gradients are added up and reduced in; None for the parameters' own.
        reshard_root: free the root's parameters after forward too, as those of all other units.
        overlap_updates: let the next forward wait for the updated parameters of each unit, not
            ``optimizer.step()``; parameters must not be read in between.
        offload_optimizer: keep the optimizer's parameters and states in the host's memory and step there.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_root: bool = False
    overlap_updates: bool = False
    offload_optimizer: bool = False


@dataclass(slots=True)
class _Homes:
    """Where the parameters of the model rest, and what undoes it."""

    replicated: ReplicatedUnits | None = None
    handles: list[RemovableHandle] = field(default_factory=list)
    updates: dict[str, Future[None]] = field(default_factory=dict)


def effective(strategy: Strategy, grid: GroupGrid) -> Strategy:
    """Return a strategy with level I only where groups differ from ranks and from the world."""
    if 1 < grid.group_size < grid.world_size:
        return strategy
    letter = Level.N if grid.group_size == 1 else Level.G
    levels = (
        letter if level == Level.I else level for level in (strategy.parameter, strategy.gradient, strategy.optimizer)
    )
    return Strategy.parse("".join(levels))


class Engine:
    """A sharded model at work.

    Attributes:
        strategy: as asked for.
        levels: the same with level I only where it differs from N and G.
        grid: groups.
        units: in the order of ``find_units``: the root last.
        shards: the optimizer's side.
        synchronizes: the next backward pass is an accumulation boundary.
        after_backward: called at the end of each backward pass.
        after_discard: called when all gradients are forgotten.
    """

    def __init__(
        self,
        model: nn.Module,
        specs: list[UnitSpec],
        shards: OptimizerShards,
        *,
        strategy: Strategy,
        grid: GroupGrid,
        settings: Settings,
        device: torch.device,
    ) -> None:
        self.model = model
        self.specs = specs
        self.shards = shards
        self.settings = settings
        self.device = device
        self.synchronizes = True
        self.after_backward: Callable[[], None] = lambda: None
        self.after_discard: Callable[[], None] = lambda: None
        self._callback_queued = False
        self._homes = _Homes()
        self._exposure = Exposure()
        self._reducing = Queue("a reduction of gradients")
        self._gathering = Queue("an update of parameters", depth=len(specs) + 1)
        # Threads outlive whoever started them.
        for queue in (self._reducing, self._gathering):
            weakref.finalize(self, queue.close).atexit = False
        self.units: list[UnitState] = []
        self._meshes: dict[Any, DeviceMesh] = {}
        self._channels: dict[int, tuple[Channels, Channels]] = {}
        self.set_strategy(strategy, grid)

    def set_strategy(self, strategy: Strategy, grid: GroupGrid) -> None:
        """Choose levels and groups; parameters are placed afterwards."""
        self.strategy, self.grid = strategy, grid
        self.levels = effective(strategy, grid)
        if grid.group_size not in self._channels:
            # Gathers and reductions run at once: each kind has communicators of its own.
            self._channels[grid.group_size] = (Channels(grid), Channels(grid))
        self.reducing, self.gathering = self._channels[grid.group_size]
        self._reduce = Procedure(self.levels, self.reducing)
        self._gather = Procedure(self.levels, self.gathering)
        self.units = [UnitState(spec=spec, layout=self._layout(spec)) for spec in self.specs]

    def _layout(self, spec: UnitSpec) -> UnitLayout:
        levels = self.levels
        return UnitLayout.of(
            [slot.shape for slot in spec.training],
            group_size=self.grid.group_size,
            num_groups=self.grid.num_groups,
            nested=levels.optimizer == Level.G,
            by_ranks=levels.optimizer == Level.G and levels.parameter != Level.I,
        )

    # ---- parameters ---------------------------------------------------------------------------

    def master_dtype(self, slot: Slot) -> torch.dtype:
        """Return the type a parameter is updated in: the user's own."""
        return slot.dtype

    def home_unit(self, unit: UnitState) -> None:
        """Bring the whole parameters that a unit's slots hold to rest at their level."""
        spec, dtype = unit.spec, self.settings.param_dtype
        if dtype is not None:
            for slot in spec.slots:
                whole = slot.parameter
                if whole.is_floating_point() and whole.dtype != dtype:
                    slot.fill(nn.Parameter(whole.detach().to(dtype), requires_grad=slot.trains))
        if self.levels.parameter == Level.N:
            return
        is_root = spec.module is self.model
        fsdp2.wrap(
            spec,
            self.parameter_mesh(),
            reshard_after_forward=self.settings.reshard_root or not is_root,
            param_dtype=dtype,
            reduce_dtype=self.settings.reduce_dtype,
            gather=self._gather_unit,
            deliver=lambda whole: self._deliver(unit, whole),
        )

    def _gather_unit(self, output: torch.Tensor, block: torch.Tensor) -> None:
        with reaching_all_ranks("a gather of parameters"):
            if self.levels.parameter == Level.I:
                self.gathering.gather_inside(output, block)
            else:
                self.gathering.gather_by_rank(output, block)

    def start(self) -> None:
        """Begin to take gradients, once all units are at rest."""
        if self.levels.parameter == Level.N:
            order = [self.units[-1], *self.units[:-1]]  # the root's gradients are complete last
            self._homes.replicated = ReplicatedUnits(
                [unit.spec for unit in order], lambda place: self._deliver_whole(order[place]), self._queue_callback
            )
            if self.settings.param_dtype is not None:
                hook = cast_inputs(self.settings.param_dtype)
                for unit in self.units:
                    handle = unit.spec.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                    self._homes.handles.append(handle)
        # Registered last and put first: nothing may read parameters or add gradients before.
        for unit in self.units:
            hook = self._before_forward(unit)
            self._homes.handles.append(unit.spec.module.register_forward_pre_hook(hook, prepend=True))
        self._homes.handles.append(self.model.register_forward_hook(self._after_forward))
        for unit in self.units:
            for slot in unit.spec.training:
                if slot.parameter.dtype != self.reduce_dtype(slot):
                    # Whole gradients are then added up in the type they are reduced in; FSDP2 does
                    # that itself and puts its own on the parameter for a moment.
                    is_whole = self.levels.parameter == Level.N
                    slot.parameter.grad_dtype = self.reduce_dtype(slot) if is_whole else None

    def stop(self) -> None:
        """Undo ``start`` and take parameters out of FSDP2; slots keep what they hold at rest."""
        self.drain()
        for handle in self._homes.handles:
            handle.remove()
        if self._homes.replicated:
            self._homes.replicated.detach()
        self._homes = _Homes()
        if self.levels.parameter != Level.N:
            fsdp2.reshard(self.model)
            for unit in reversed(self.units):
                fsdp2.unwrap(unit.spec.module)

    def _before_forward(self, unit: UnitState) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            update = self._homes.updates.pop(unit.spec.name, None)
            if update is not None:
                self._gathering.result(update)

        return hook

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        """Let the backward pass of an output begin with taking the gradients back.

        Not earlier: between a forward and its backward, or in a validation pass, the user may still
        clip, step or clear what the passes before have left.
        """
        if not torch.is_grad_enabled() and self.levels.parameter != Level.N:
            # No backward follows that would free the root's; whole, it would miss the clipping, the step and
            # the next update.
            fsdp2.reshard(self.model)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not tensors:  # of a kind that we cannot look into
            self.hide_gradients()
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:
        self.hide_gradients()

    def held(self, unit: UnitState) -> list[torch.Tensor]:
        """Return what this rank holds of each trained parameter, flat."""
        if self.levels.parameter == Level.N:
            return [slot.parameter.detach().view(-1) for slot in unit.spec.training]
        return [fsdp2.held(slot) for slot in unit.spec.training]

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

    def bind_masters(self, unit: UnitState, separate: list[torch.Tensor] | None = None) -> None:
        """Let the optimizer's rows of a unit be views of the parameters, or memory of their own.

        Args:
            unit: at rest.
            separate: the optimizer's rows where types differ; None to make views.
        """
        if separate is not None:
            unit.masters, unit.separate = separate, True
            return
        unit.masters, unit.separate = [], False
        for place, (slot, held) in enumerate(zip(unit.spec.training, self.held(unit), strict=True)):
            first, _ = self.rows_at(self.levels.parameter, unit, place)
            start, stop = self.rows_at(self.levels.optimizer, unit, place)
            width = unit.layout.rows[place].row_elements
            part = held[(start - first) * width : (stop - first) * width]
            unit.masters.append(part.view(stop - start, *slot.shape[1:]))

    def has_own_masters(self) -> bool:
        """Tell whether the optimizer's parameters have memory of their own, of another type or place."""
        return self.settings.param_dtype is not None or self.settings.offload_optimizer

    @property
    def optimizer_device(self) -> torch.device:
        """Return where the optimizer's parameters and states are."""
        return torch.device("cpu") if self.settings.offload_optimizer else self.device

    def reduce_dtype(self, slot: Slot) -> torch.dtype:
        """Return the type of a parameter's gradients."""
        return self.settings.reduce_dtype or (self.settings.param_dtype or slot.dtype)

    # ---- meshes -------------------------------------------------------------------------------

    def parameter_mesh(self) -> DeviceMesh:
        """Return the mesh that FSDP2 shards over: the group, or all ranks."""
        if self.levels.parameter == Level.I:
            return self._nested_mesh()["inside"]
        return self._world_mesh()

    def _world_mesh(self, device: torch.device | None = None) -> DeviceMesh:
        device_type = (device or self.device).type
        key = ("world", device_type)
        if key not in self._meshes:
            self._meshes[key] = DeviceMesh(device_type, torch.arange(self.grid.world_size), mesh_dim_names=("world",))
        return self._meshes[key]

    def _nested_mesh(self, device: torch.device | None = None) -> DeviceMesh:
        device_type = (device or self.device).type
        key = (self.grid.group_size, device_type)
        if key not in self._meshes:
            mesh = DeviceMesh(device_type, torch.tensor(self.grid.nested_ranks), mesh_dim_names=("inside", "across"))
            # Norms over both dimensions then take one all-reduce.
            mesh._flatten("all")  # noqa: SLF001 - there is no public name
            self._meshes[key] = mesh
        return self._meshes[key]

    def as_sharded(self, unit: UnitState, place: int, local: torch.Tensor) -> torch.Tensor:
        """Return the rows at the optimizer's level as a DTensor; whole tensors stay as they are."""
        level = self.levels.optimizer
        slot = unit.spec.training[place]
        if level == Level.N or self.grid.world_size == 1:
            return local
        if level == Level.I:
            mesh, placements = self._nested_mesh(local.device)["inside"], [Shard(0)]
        elif unit.layout.rows[place].band_rows:
            mesh, placements = self._nested_mesh(local.device), [Shard(0), Shard(0)]
        else:
            mesh, placements = self._world_mesh(local.device), [Shard(0)]
        stride = torch.empty(slot.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=slot.shape, stride=stride)

    def place_shards(self) -> None:
        """Give the optimizer its rows of all units as parameters."""
        shards = {}
        for unit in self.units:
            for place, (slot, master) in enumerate(zip(unit.spec.training, unit.masters, strict=True)):
                shards[slot.name] = nn.Parameter(self.as_sharded(unit, place, master))
        self.shards.place(shards)

    # ---- gradients ----------------------------------------------------------------------------

    def set_synchronizes(self, *, enabled: bool) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        self.synchronizes = enabled
        if self.levels.gradient == Level.N and self.levels.parameter != Level.N:
            fsdp2.set_gradient_sync(self.model, enabled=enabled)

    def _deliver(self, unit: UnitState, whole: torch.Tensor) -> None:
        """Take the gradients of a unit from FSDP2."""
        self._queue_callback()
        last = self.synchronizes
        self._reducing.submit(self._named("gradient", unit, lambda: self._reduce.add(unit, whole, last=last)))

    def _deliver_whole(self, unit: UnitState) -> None:
        """Take the gradients of a unit that is kept whole."""
        if not unit.spec.training or (self.levels.gradient == Level.N and not self.synchronizes):
            return
        gradients = [slot.parameter.grad for slot in unit.spec.training]
        with torch.no_grad():
            whole = self._reduce.whole_buffer(unit, gradients, self.reduce_dtype(unit.spec.training[0]))
        for slot in unit.spec.training:
            slot.parameter.grad = None
        last = self.synchronizes
        self._reducing.submit(self._named("gradient", unit, lambda: self._reduce.add(unit, whole, last=last)))

    def _named(self, state: str, unit: UnitState, job: Callable[[], None]) -> Callable[[], None]:
        """Let a job say in profiles which model state it moves, under which strategy."""
        count = sum(slot.shape.numel() for slot in unit.spec.training)
        name = f"{state} ({unit.spec.name or 'root'}) {count} {self.levels}/{self.grid.group_size}"

        def run() -> None:
            with Span(name):
                job()

        return run

    def _queue_callback(self) -> None:
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001 - as FSDP and DDP do

    def _end_backward(self) -> None:
        if self._homes.replicated:
            self._homes.replicated.finish()
        self._callback_queued = False
        self._reducing.drain()
        if self.synchronizes:
            self._expose_gradients()
        self.after_backward()

    def finish_accumulation(self) -> None:
        """Bring the gradients of passes that were no boundaries to the optimizer's level, without another pass.

        Raises:
            UsageError: gradients are whole and parameters are not: FSDP2 then holds them.
        """
        if self.levels.gradient == Level.N and self.levels.parameter != Level.N:
            raise UsageError(f"gradients of {self.levels} must be brought on by a backward pass")
        self._reducing.drain()
        before, self.synchronizes = self.synchronizes, True
        for unit in reversed(self.units):
            if self.levels.gradient == Level.N:
                self._deliver_whole(unit)
            elif unit.accumulated is not None:
                self._reducing.submit(self._named("gradient", unit, partial(self._reduce.finish, unit)))
        self._reducing.drain()
        self.synchronizes = before
        self._expose_gradients()

    def _expose_gradients(self) -> None:
        for unit, place, slot, view in self._reduced():
            gradient = self.as_sharded(unit, place, view)
            shard = slot.parameter if self.settings.offload_optimizer else self.shards.shards[slot.name]
            self._exposure.show(slot.parameter, shard, gradient)

    def _reduced(self) -> Iterator[tuple[UnitState, int, Slot, torch.Tensor]]:
        """Return each reduced gradient with its unit, its place there, and its slot."""
        for unit in self.units:
            if unit.reduced is not None:
                views = self._reduce.gradient_views(unit)
                for place, (slot, view) in enumerate(zip(unit.spec.training, views, strict=True)):
                    yield unit, place, slot, view

    def hide_gradients(self) -> None:
        """Take the gradients back, with what the user did to them, so that more can be added."""
        self._exposure.hide()
        if self._exposure.discarded:
            self._exposure.discarded = False
            for unit in self.units:
                unit.reduced = None

    # ---- what the optimizer calls -------------------------------------------------------------

    def before_step(self) -> None:
        """Bring the gradients to the optimizer's parameters."""
        self._exposure.collect()
        if self.settings.offload_optimizer:
            for unit, place, slot, view in self._reduced():
                if slot.parameter.grad is not None:
                    there = view.to(self.optimizer_device, copy=True)
                    self.shards.shards[slot.name].grad = self.as_sharded(unit, place, there)

    def after_step(self) -> None:
        """Bring the updated parameters to the model."""
        if self.settings.offload_optimizer:
            for shard in self.shards.shards.values():
                shard.grad = None
        self.publish(wait=not self.settings.overlap_updates)

    def publish(self, *, wait: bool = True) -> None:
        """Bring the optimizer's rows to the parameters' level, unit by unit, in forward order."""
        for unit in [self.units[-1], *self.units[:-1]]:
            if unit.spec.training:
                held = self.held(unit)
                job = self._publish_job(unit, held)
                self._homes.updates[unit.spec.name] = self._gathering.submit(job)
        if wait:
            self.finish_updates()

    def _publish_job(self, unit: UnitState, held: list[torch.Tensor]) -> Callable[[], None]:
        return self._named("optimizer", unit, lambda: self._gather.publish(unit, held))

    def finish_updates(self) -> None:
        """Wait until all parameters are up to date."""
        self._homes.updates.clear()
        self._gathering.drain()

    def drain(self) -> None:
        """Wait for all communication."""
        self._reducing.drain()
        self.finish_updates()

    def discard_gradients(self) -> None:
        """Forget all gradients."""
        self.after_discard()
        self._reducing.drain()
        self._exposure.forget()
        for unit in self.units:
            unit.accumulated = unit.reduced = None
            for slot in unit.spec.training:
                slot.parameter.grad = None
        if self.levels.parameter != Level.N:
            fsdp2.discard_accumulated(self.model)

    def close(self) -> None:
        """End the communication threads."""
        self._reducing.close()
        self._gathering.close()
