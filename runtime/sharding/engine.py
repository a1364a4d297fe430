"""Ties a model, its optimizer and the procedure of a strategy together.

Four objects do the work: an Arrangement says what lies where under the present strategy, ParameterHomes keeps
parameters, GradientReducer takes gradients to the optimizer, UpdatePublisher brings updates back.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paro_advise.policies.strategy import Level, Strategy
from paro_advise.runtime.sharding.arrangement import Arrangement, Communicators
from paro_advise.runtime.sharding.gradients import GradientReducer
from paro_advise.runtime.sharding.homes import ParameterHomes
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.replicated import ReplicatedUnits, cast_inputs
from paro_advise.runtime.sharding.updates import UpdatePublisher

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.exchange.channels import Channels, GroupGrid
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.units import UnitSpec
    from paro_advise.runtime.sharding.settings import Settings


class Engine:
    """A sharded model at work.

    Attributes:
        model, specs, shards, settings, device: as given.
        arrangement: what lies where under the present strategy.
        homes, gradients, updates: see this module.
    """

    # A model's hooks keep its engine; a strong reference from here would keep both for ever.
    _of_model: ClassVar[weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]]] = weakref.WeakKeyDictionary()

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
        self._communicators = Communicators()
        self._handles: list[RemovableHandle] = []
        self.gradients = GradientReducer(model, settings, shards)
        self.homes = ParameterHomes(model, settings, self.gradients.deliver)
        self.updates = UpdatePublisher(len(specs), self.homes)
        # Threads outlive whoever started them.
        for queue in (self.gradients.queue, self.updates.queue):
            weakref.finalize(self, queue.close).atexit = False
        self.set_strategy(strategy, grid)

    @classmethod
    def find(cls, model: nn.Module) -> Engine | None:
        """Return the engine of a sharded model, None for any other one."""
        known = cls._of_model.get(model)
        return known() if known else None

    def register(self) -> None:
        """Let ``find`` know the engine of this model."""
        self._of_model[self.model] = weakref.ref(self)

    def set_strategy(self, strategy: Strategy, grid: GroupGrid) -> None:
        """Choose levels and groups; parameters are placed afterwards."""
        self.arrangement = Arrangement(self.specs, strategy, grid, self.device, self._communicators)
        self.gradients.arrange(self.arrangement)
        self.updates.arrange(self.arrangement)

    # ---- the present arrangement --------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """Return the strategy as asked for."""
        return self.arrangement.strategy

    @property
    def levels(self) -> Strategy:
        """Return the strategy with level I only where it differs from N and G."""
        return self.arrangement.levels

    @property
    def grid(self) -> GroupGrid:
        """Return the groups."""
        return self.arrangement.grid

    @property
    def units(self) -> list[UnitState]:
        """Return the units; the root last."""
        return self.arrangement.units

    @property
    def reducing(self) -> Channels:
        """Return the channels of gradients."""
        return self.arrangement.reducing

    @property
    def gathering(self) -> Channels:
        """Return the channels of parameters."""
        return self.arrangement.gathering

    @property
    def optimizer_device(self) -> torch.device:
        """Return where the optimizer's parameters and states are."""
        return torch.device("cpu") if self.settings.offload_optimizer else self.device

    @property
    def synchronizes(self) -> bool:
        """Tell whether the next backward pass is an accumulation boundary."""
        return self.gradients.synchronizes

    # ---- beginning and ending -----------------------------------------------------------------

    def settle(self, unit: UnitState, masters: list[torch.Tensor] | None) -> None:
        """Bring a unit to rest, and the optimizer's rows to it: its own ones, or views where None."""
        self.homes.home(self.arrangement, unit)
        self.homes.bind_masters(self.arrangement, unit, masters)

    def place_shards(self) -> None:
        """Give the optimizer its rows of all units as parameters."""
        shards = {}
        for unit in self.units:
            for place, (slot, master) in enumerate(zip(unit.spec.training, unit.masters, strict=True)):
                shards[slot.name] = nn.Parameter(self.arrangement.as_sharded(unit, place, master))
        self.shards.place(shards)

    def start(self) -> None:
        """Begin to take gradients, once all units are at rest."""
        if self.levels.parameter == Level.N:
            self._start_replicated()
        # Registered last and put first: nothing may read parameters or add gradients before.
        for unit in self.units:
            hook = self._before_forward(unit)
            self._handles.append(unit.spec.module.register_forward_pre_hook(hook, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._after_forward))
        for unit in self.units:
            for slot in unit.spec.training:
                if slot.parameter.dtype != self.settings.gradient_dtype(slot):
                    # Whole gradients are then added up in the type they are reduced in; FSDP2 does
                    # that itself and puts its own on the parameter for a moment.
                    is_whole = self.levels.parameter == Level.N
                    slot.parameter.grad_dtype = self.settings.gradient_dtype(slot) if is_whole else None

    def _start_replicated(self) -> None:
        order = self.arrangement.forward_order
        self.gradients.replicated = ReplicatedUnits(
            [unit.spec for unit in order],
            lambda place: self.gradients.deliver_whole(order[place]),
            self.gradients.queue_callback,
        )
        if self.settings.param_dtype is not None:
            hook = cast_inputs(self.settings.param_dtype)
            for unit in self.units:
                module = unit.spec.module
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))

    def stop(self) -> None:
        """Undo ``start`` and take parameters out of FSDP2; slots keep what they hold at rest."""
        self.gradients.queue.drain()
        self.updates.finish()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.gradients.replicated:
            self.gradients.replicated.detach()
            self.gradients.replicated = None
        self.homes.give_up(self.arrangement)

    # ---- forward and backward -----------------------------------------------------------------

    def _before_forward(self, unit: UnitState) -> Callable[..., None]:
        return lambda *_: self.updates.wait_for(unit)

    def _after_forward(self, _: nn.Module, __: object, output: object) -> None:
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
            self.gradients.hide()
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._begin_backward)  # type: ignore[no-untyped-call]  # as torch declares it

    def _begin_backward(self, _: torch.Tensor) -> None:
        self.gradients.hide()

    # ---- what the optimizer calls -------------------------------------------------------------

    def before_step(self) -> None:
        """Bring the gradients to the optimizer's parameters."""
        self.gradients.collect(self.optimizer_device)

    def after_step(self) -> None:
        """Bring the updated parameters to the model."""
        if self.settings.offload_optimizer:
            for shard in self.shards.shards.values():
                shard.grad = None
        self.updates.publish(wait=not self.settings.overlap_updates)
