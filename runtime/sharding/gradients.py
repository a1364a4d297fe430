"""Takes gradients from backward passes to the optimizer's level, and shows them there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.ho_ring.spans import Span
from paro_advise.runtime.sharding.exchange.channels import Queue
from paro_advise.runtime.sharding.exchange.exposure import Exposure
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure
from paro_advise.runtime.sharding.parameters import fsdp2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.replicated import ReplicatedUnits
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.sharding.settings import Settings


class GradientReducer:
    """Reduces the gradients of a model's units.

    Attributes:
        synchronizes: the next backward pass is an accumulation boundary.
        replicated: collects the gradients of parameters that are kept whole; None with FSDP2.
        after_backward: called at the end of each backward pass.
        after_discard: called when all gradients are forgotten.
        queue: the thread of reductions.
    """

    def __init__(self, model: nn.Module, settings: Settings, shards: OptimizerShards) -> None:
        self._model = model
        self._settings = settings
        self._shards = shards
        self.queue = Queue("a reduction of gradients")
        self.synchronizes = True
        self.replicated: ReplicatedUnits | None = None
        self.after_backward: Callable[[], None] = lambda: None
        self.after_discard: Callable[[], None] = lambda: None
        self._callback_queued = False
        self._exposure = Exposure()

    def arrange(self, arrangement: Arrangement) -> None:
        """Work under a strategy from now on."""
        self._arrangement = arrangement
        self._procedure = UnitProcedure(arrangement.levels, arrangement.reducing)

    @property
    def _fsdp2_holds_them(self) -> bool:
        """Tell whether whole gradients rest inside FSDP2, whose parameters are sharded."""
        levels = self._arrangement.levels
        return levels.gradient == Level.N and levels.parameter != Level.N

    def set_synchronizes(self, *, enabled: bool) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        self.synchronizes = enabled
        if self._fsdp2_holds_them:
            fsdp2.set_gradient_sync(self._model, enabled=enabled)

    def deliver(self, unit: UnitState, whole: torch.Tensor) -> None:
        """Take the gradients of a unit from FSDP2."""
        self.queue_callback()
        self._submit_addition(unit, whole)

    def deliver_whole(self, unit: UnitState) -> None:
        """Take the gradients of a unit that is kept whole."""
        whole_gradients = self._arrangement.levels.gradient == Level.N
        if not unit.spec.training or (whole_gradients and not self.synchronizes):
            return
        gradients = [slot.parameter.grad for slot in unit.spec.training]
        with torch.no_grad():
            dtype = self._settings.gradient_dtype(unit.spec.training[0])
            whole = self._procedure.whole_buffer(unit, gradients, dtype)
        for slot in unit.spec.training:
            slot.parameter.grad = None
        self._submit_addition(unit, whole)

    def _submit_addition(self, unit: UnitState, whole: torch.Tensor) -> None:
        last = self.synchronizes
        self._submit(unit, lambda: self._procedure.add(unit, whole, last=last))

    def _submit(self, unit: UnitState, job: Callable[[], None]) -> None:
        name = self._arrangement.span_name("gradient", unit)

        def run() -> None:
            with Span(name):
                job()

        self.queue.submit(run)

    def queue_callback(self) -> None:
        """Make sure that the end of this backward pass is noticed."""
        if not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self._end_backward)  # noqa: SLF001 - as FSDP and DDP do

    def _end_backward(self) -> None:
        if self.replicated:
            self.replicated.finish()
        self._callback_queued = False
        self.queue.drain()
        if self.synchronizes:
            self._expose()
        self.after_backward()

    def finish_accumulation(self) -> None:
        """Bring the gradients of passes that were no boundaries to the optimizer's level, without another pass.

        Raises:
            UsageError: gradients are whole and parameters are not: FSDP2 then holds them.
        """
        levels = self._arrangement.levels
        if self._fsdp2_holds_them:
            raise UsageError(f"gradients of {levels} must be brought on by a backward pass")
        self.queue.drain()
        before, self.synchronizes = self.synchronizes, True
        for unit in reversed(self._arrangement.units):
            if levels.gradient == Level.N:
                self.deliver_whole(unit)
            elif unit.accumulated is not None:
                self._submit(unit, partial(self._procedure.finish, unit))
        self.queue.drain()
        self.synchronizes = before
        self._expose()

    def _expose(self) -> None:
        for unit, place, slot, view in self._reduced():
            gradient = self._arrangement.as_sharded(unit, place, view)
            shard = slot.parameter if self._settings.offload_optimizer else self._shards.shards[slot.name]
            self._exposure.show(slot.parameter, shard, gradient)

    def _reduced(self) -> Iterator[tuple[UnitState, int, Slot, torch.Tensor]]:
        """Return each reduced gradient with its unit, its place there, and its slot."""
        for unit in self._arrangement.units:
            if unit.reduced is not None:
                views = self._procedure.gradient_views(unit)
                for place, (slot, view) in enumerate(zip(unit.spec.training, views, strict=True)):
                    yield unit, place, slot, view

    def hide(self) -> None:
        """Take the gradients back, with what the user did to them, so that more can be added."""
        self._exposure.hide()
        if self._exposure.discarded:
            self._exposure.discarded = False
            for unit in self._arrangement.units:
                unit.reduced = None

    def collect(self, optimizer_device: torch.device) -> None:
        """Bring the gradients to the optimizer's parameters, before it steps."""
        self._exposure.collect()
        if self._settings.offload_optimizer:
            for unit, place, slot, view in self._reduced():
                if slot.parameter.grad is not None:
                    there = view.to(optimizer_device, copy=True)
                    self._shards.shards[slot.name].grad = self._arrangement.as_sharded(unit, place, there)

    def discard(self) -> None:
        """Forget all gradients."""
        self.after_discard()
        self.queue.drain()
        self._exposure.forget()
        for unit in self._arrangement.units:
            unit.accumulated = unit.reduced = None
            for slot in unit.spec.training:
                slot.parameter.grad = None
        if self._arrangement.levels.parameter != Level.N:
            fsdp2.discard_accumulated(self._model)
