"""Takes gradients from backward passes to the optimizer's level, and shows them there."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.ho_ring.spans import Span
from paro_advise.runtime.sharding.exchange.exposure import Exposure
from paro_advise.runtime.sharding.exchange.host_copies import copies_on_host
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure
from paro_advise.runtime.sharding.exchange.usage import Missing
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import (
    gradient_of,
    is_in_backward,
    is_in_nested_backward,
    set_gradient,
)
from paro_advise.runtime.sharding.phases import lost_gradients
from paro_advise.runtime.sharding.phases.replicas import Replicas
from paro_advise.runtime.sharding.phases.singles import Singles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from torch import nn

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.executor import Executor, Submission
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.exchange.usage import Usage
    from paro_advise.runtime.sharding.optimizers.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.replicated import ReplicatedUnits
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.sharding.parameters.whole import WholeTensor
    from paro_advise.runtime.sharding.settings import Settings


class GradientReducer:
    """Reduces the gradients of a model's units.

    Attributes:
        synchronizes: the next backward pass is an accumulation boundary.
        singles: parameters without a dimension, which are averaged whole.
        reduces_once: the framework reduces one backward pass after a forward pass; those of more stay with their rank.
        is_of_fsdp2: for the script, parameters are DTensors of FSDP2's.
        has_synchronized_forward: that was so in the last forward pass, by which such a framework goes.
        replicas: the copies of parameters that ranks hold.
        replicated: collects the gradients of parameters that are kept whole; None with FSDP2.
        before_backward, after_backward: called when a backward pass makes its first gradient, and at its end.
        on_discard: called with the names of those whose gradients are forgotten, None for all.
        before_read: called when a script looks at a gradient.
        executor: of reductions.

    Args:
        side_executor: that of updates; it uses the channels of parameters, which are idle at the end of backward.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        shards: OptimizerShards,
        usage: Usage,
        executor: Executor,
        side_executor: Executor,
    ) -> None:
        self._model = model
        self._settings = settings
        self._shards = shards
        self.executor, self._side_executor = executor, side_executor
        self.synchronizes = True
        self.reduces_once = False
        self.is_of_fsdp2 = False
        self.singles = Singles(())
        self.has_synchronized_forward = True
        self.replicated: ReplicatedUnits | None = None
        self.before_backward: Callable[[], None] = lambda: None
        self.after_backward: Callable[[], None] = lambda: None
        self.on_discard: Callable[[Collection[str] | None], None] = lambda _: None
        self.before_read: Callable[[], None] = lambda: None
        self._callback_queued = False
        self._is_end_awaited = False  # by a callback of the outermost backward pass
        self._sums_of_singles: torch.Tensor | None = None
        self._has_run_forward = False  # since the last backward pass that was reduced
        self._is_output_reached = False  # by the backward pass under way
        self._made: set[str] = set()  # names of parameters that have got gradients since the last forward pass
        self._exposure = Exposure()
        self._are_zeroed = False  # since the last backward pass
        # Kept over a switch: gradients that were set to zero before it are still there, for weight decay to act on.
        self._usage = usage
        self._node_hooks = lost_gradients.NodeHooks()
        self.replicas = Replicas()

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

    def deliver(self, unit: UnitState, gradients: list[torch.Tensor | None]) -> None:
        """Take the gradients of a unit from FSDP2.

        Args:
            unit: whose gradients.
            gradients: this rank's, of the parameters that train; None for those without one.

        Raises:
            UsageError: they come from a forward pass under another strategy.
        """
        if not any(unit is known for known in self._arrangement.units):
            lost_gradients.refuse_late()
        if any(slot.parameter.requires_grad for slot in unit.spec.training):
            self.queue_callback()
            self._usage.note_delivery(unit)
            self._note_made(unit, gradients)
            self._take(unit, gradients)

    def note_gather(self, unit: UnitState) -> None:
        """Note that this rank takes part in a gather of a unit's parameters."""
        self._usage.note_gather(unit)

    def deliver_whole(self, unit: UnitState) -> None:
        """Take the gradients of a unit that is kept whole."""
        gradients = [gradient_of(slot.parameter) for slot in unit.spec.training]
        self._note_made(unit, gradients)
        if not gradients or (self._arrangement.levels.gradient == Level.N and not self.synchronizes):
            return
        for slot in unit.spec.training:
            self._exposure.release(slot.parameter)
        self._take(unit, gradients)

    def _take(self, unit: UnitState, gradients: list[torch.Tensor | None]) -> None:
        unit.add_left(gradients)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                self._usage.note(unit, place)
        with torch.no_grad(), self.executor.meeting():
            dtype = self._settings.gradient_dtype(unit.spec.training[0])
            whole = self._procedure.whole_buffer(unit, gradients, dtype, self._arrangement.device)
            gradients.clear()  # their memory may serve the next unit
        last = self.synchronizes
        self._submit(unit, lambda: self._procedure.add(unit, whole, last=last))

    def _note_made(self, unit: UnitState, gradients: list[torch.Tensor | None]) -> None:
        pairs = zip(unit.spec.training, gradients, strict=True)
        self._made.update(slot.name for slot, gradient in pairs if gradient is not None)

    def _submit(self, unit: UnitState, job: Callable[[], None]) -> None:
        name = self._arrangement.span_name("gradient", unit)

        def run() -> None:
            with Span(name):
                job()

        self.executor.submit(run)

    def queue_callback(self) -> None:
        """Make sure that the end of this backward pass is noticed."""
        if not self._callback_queued:
            if self.synchronizes and self._is_output_reached and not self._has_run_forward:
                lost_gradients.refuse_second_pass()
            self.before_backward()
            # Not earlier: between a forward and its backward, or in a validation pass, the user may still
            # clip, step or clear what the passes before have left.
            self.hide()
            self._callback_queued = True
            if not self._is_end_awaited:
                Variable._execution_engine.queue_callback(self._end_unwatched)  # noqa: SLF001 - as FSDP and DDP do

    def begin_forward(self) -> None:
        """Forget a backward pass that an exception has left before its end."""
        self._is_end_awaited = False

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notice where the backward pass through the whole model ends.

        Parts that are checkpointed with ``use_reentrant=True`` have passes of their own, which end before it.

        Args:
            outputs: of the model, which want gradients.
        """
        for output in (item for item in outputs if not item.is_leaf):  # a parameter would keep the hook
            output.register_hook(self._await_end)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def keep_whole(self, singles: Singles) -> None:
        """Average the gradients of parameters without a dimension; a pass may reach no others."""
        self.singles = singles
        me = weakref.ref(self)

        def begin(_: torch.Tensor) -> None:
            if (reducer := me()) is not None:
                reducer.queue_callback()

        for parameter in singles.parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(begin)  # type: ignore[no-untyped-call]  # torch's

    def arm(self, outputs: Iterable[torch.Tensor]) -> None:
        """Notice where a backward pass goes through the whole model, to refuse a second one after a forward pass.

        Args:
            outputs: of the model, which want gradients.
        """
        if self.reduces_once:
            self._has_run_forward = True
            self._made.clear()
            self.has_synchronized_forward = self.synchronizes
            for output in (item for item in outputs if not item.is_leaf):
                output.register_hook(self._note_output)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _note_output(self, _: torch.Tensor) -> None:
        self._is_output_reached = True

    def _await_end(self, _: torch.Tensor) -> None:
        if not self._is_end_awaited and not self._callback_queued:
            self._is_end_awaited = True
            Variable._execution_engine.queue_callback(self._queue_last)  # noqa: SLF001

    def _queue_last(self) -> None:
        # FSDP2's own callback, which may come after this one, delivers what the root has.
        Variable._execution_engine.queue_callback(self._end_awaited)  # noqa: SLF001

    def _end_awaited(self) -> None:
        self._is_end_awaited = False
        if self._callback_queued:
            self._end_backward()

    def _end_unwatched(self) -> None:
        if self._arrangement.levels.parameter != Level.N and is_in_nested_backward():
            self._callback_queued = False
            lost_gradients.refuse_nested()
        self._end_backward()

    def _end_backward(self) -> None:
        if self.replicated:
            self.replicated.finish()
        self._callback_queued = self._are_zeroed = False
        self._refuse_stray()
        told = self._tell_usage() if self.synchronizes else None
        self._is_output_reached = False
        # DDP reduces the first pass after a forward pass that was outside of no_sync(), wherever it is itself.
        slots = (slot for unit in self._arrangement.units for slot in unit.spec.training)
        is_made = all(slot.name in self._made for slot in slots if slot.parameter.requires_grad)
        self._has_run_forward &= not (is_made and (self.synchronizes or self.has_synchronized_forward))
        self.executor.drain()
        if told is not None:
            self._finish_frozen()
            told.wait()
            self._check_ranks()
            self._expose()
        self.after_backward()

    def _finish_frozen(self) -> None:
        """Bring on what was added up for units that have been frozen since: they deliver nothing any more."""
        for unit in reversed(self._arrangement.units):
            if unit.accumulated is not None:
                self._submit(unit, partial(self._procedure.finish, unit))
        self.executor.drain()

    def _tell_usage(self) -> Submission:
        """Exchange which parameters got gradients beside the last reductions, whose links have time for it."""
        # Profiles show it as a part of the root's gradients.
        name = self._arrangement.span_name("gradient", self._arrangement.units[-1])
        channels = self._arrangement.gathering
        with torch.no_grad(), self._side_executor.meeting():
            sums = self.singles.gradients(channels.grid.world_size)
        # DDP leaves it to scripts that their replicas stay alike, and so does a strategy that shards nothing.
        may_differ = self.reduces_once and self._arrangement.levels.optimizer == Level.N
        is_changed = self.replicas.are_changed(self._arrangement) and not may_differ

        def run() -> None:
            with Span(name):
                self._usage.agree(channels, is_changed=is_changed)
                if sums is not None:
                    channels.sum_all(sums)

        self._sums_of_singles = sums
        return self._side_executor.submit(run)

    def _check_ranks(self) -> None:
        """Check that all ranks ran the same units, and hear whether one has changed parameters by hand.

        Raises:
            DivergedError: ranks ran others.
        """
        self.replicas.hear(has_changes=self._usage.check_order())

    def compare_replicas(self, publish: Callable[[], None]) -> None:
        """Compare copies of parameters before a step, if a script has changed some, once all have been published.

        Raises:
            DivergedError: they differ between ranks.
        """
        if self.replicas.must_be_compared(self._arrangement):
            publish()
            self._side_executor.submit(partial(self.replicas.compare, self._arrangement)).wait()

    def finish_accumulation(self) -> None:
        """Bring the gradients of passes that were no boundaries to the optimizer's level, without another pass.

        Raises:
            UsageError: gradients are whole and parameters are not: FSDP2 then holds them.
        """
        levels = self._arrangement.levels
        if self._fsdp2_holds_them:
            raise UsageError(f"gradients of {levels} must be brought on by a backward pass")
        self.executor.drain()
        before, self.synchronizes = self.synchronizes, True
        for unit in reversed(self._arrangement.units):
            if levels.gradient == Level.N:
                self.deliver_whole(unit)
            elif unit.accumulated is not None:
                self._submit(unit, partial(self._procedure.finish, unit))
        told = self._tell_usage()
        self.executor.drain()
        told.wait()
        self.synchronizes = before
        self._check_ranks()
        self._expose()

    def _expose(self) -> None:
        if self._sums_of_singles is not None:
            factor = self._arrangement.units[-1].divide_factor or self._arrangement.gathering.grid.world_size
            self.singles.take(self._sums_of_singles, factor, self._usage.missing)
            self._sums_of_singles = None
        for unit, place, slot, view in self._reduced_gradients():
            is_frozen = not slot.parameter.requires_grad and self._usage.missing != Missing.NONE
            if is_frozen or not self._usage.is_used(unit, place):
                continue  # reached by no rank's backward pass; frozen after one it keeps its gradient
            gradient = self._arrangement.as_sharded(unit, place, view)
            shard = slot.parameter if self._settings.offload_optimizer else self._shards.shards[slot.name]
            self._exposure.show(slot.parameter, shard, gradient)

    def _reduced_gradients(self) -> Iterator[tuple[UnitState, int, Slot, torch.Tensor]]:
        """Return each reduced gradient with its unit, its place there, and its slot."""
        for unit in self._arrangement.units:
            if unit.reduced is not None:
                views = self._procedure.gradient_views(unit)
                for place, (slot, view) in enumerate(zip(unit.spec.training, views, strict=True)):
                    yield unit, place, slot, view

    def show_as(self, kind: type[WholeTensor]) -> None:
        """Let sharded gradients be of this class for the script."""
        self._exposure.kind = kind

    def set_aside(self) -> None:
        """Take gradients that wait for a step off the parameters for a forward pass, as it needs."""
        self._exposure.set_aside()

    def put_back(self) -> None:
        """Show the gradients again that a forward pass had set aside."""
        self._exposure.put_back()

    def hide(self) -> None:
        """Take the gradients back, with what the user did to them, so that more can be added."""
        self._exposure.hide()
        if self._exposure.discarded:
            self._exposure.discarded = False
            for unit in self._arrangement.units:
                unit.reduced = None

    def collect(self) -> None:
        """Bring the gradients to the optimizer's parameters, before it steps."""
        self._exposure.collect()
        if self._settings.offload_optimizer:
            found = [one for one in self._reduced_gradients() if gradient_of(one[2].parameter) is not None]
            copies = copies_on_host([view for *_, view in found])
            for (unit, place, slot, _), there in zip(found, copies, strict=True):
                set_gradient(self._shards.shards[slot.name], self._arrangement.as_sharded(unit, place, there))
        self._exposure.set_mixing(enabled=False)
        self._shards.set_stepping(enabled=True)

    def after_step(self) -> None:
        """Show them to the script again."""
        self._exposure.set_mixing(enabled=True)
        self._shards.set_stepping(enabled=False)

    @property
    def is_broken_off(self) -> bool:
        """Tell whether a backward pass has begun that will never end, for an exception has left it."""
        return self._callback_queued and not is_in_backward()

    @property
    def are_waiting(self) -> bool:
        """Tell whether there are gradients that no step has used yet."""
        units = self._arrangement.units
        if self._are_zeroed and not any(unit.reduced is not None and bool(unit.reduced.any()) for unit in units):
            return False
        return (
            any(unit.accumulated is not None or unit.reduced is not None for unit in units)
            or any(gradient_of(slot.parameter) is not None for unit in units for slot in unit.spec.training)
            or (self._fsdp2_holds_them and fsdp2.accumulated_bytes(self._model) > 0)
        )

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Tell whether a gradient that a script sets on a parameter now is what the next step uses.

        It is while the gradient is on show, and where whole gradients add up on the parameters themselves.
        """
        levels = self._arrangement.levels
        adds_up_there = levels.gradient == Level.N and levels.parameter == Level.N and not self.synchronizes
        return adds_up_there or self._exposure.shows(parameter)

    def refuse_hidden(self, parameter: torch.Tensor) -> None:
        """Refuse to show no gradient where DDP would show this rank's: that of a pass in ``no_sync``.

        Raises:
            UsageError: there is one, which adds up elsewhere.
        """
        found = self._arrangement.place_of(parameter) if self.reduces_once else None
        if found is not None and found[0].accumulated is not None and self._usage.is_noted(*found):
            raise UsageError(
                "a gradient of a pass in no_sync() cannot be read where the plan shards gradients, got a read of one",
                where=found[0].spec.training[found[1]].name,
                hint="read it after a pass that is reduced, or choose a strategy that replicates gradients (.N.)",
            )

    def _refuse_stray(self) -> None:
        if self._arrangement.levels.parameter != Level.N:
            lost_gradients.refuse_stray(self._arrangement.units, self._model, synchronizes=self.synchronizes)

    def refuse_unseen(self) -> None:
        """Refuse to step after a backward pass that went through no tensor which a sharded model returned."""
        if self._arrangement.levels.parameter != Level.N:
            lost_gradients.refuse_unseen(self._arrangement.units)
            self._node_hooks.refuse(self._arrangement.units)

    def drop(self, parameter: torch.Tensor) -> None:
        """Forget what was added up for one parameter, as ``parameter.grad = None`` does."""
        self.executor.drain()
        self._exposure.let_go(parameter)
        if (found := self._arrangement.place_of(parameter)) is None:
            return
        if self._fsdp2_holds_them:
            fsdp2.discard_accumulated(found[0].spec.module, parameter)
        self._procedure.forget(*found)
        self._usage.forget(*found)

    def discard_of(self, names: Collection[str], *, to_none: bool = True) -> None:
        """Forget the gradients of some parameters, by name, as their optimizer's ``zero_grad`` does."""
        self.on_discard(names)
        for unit in self._arrangement.units:
            for slot, parameter in unit.at_rest():
                if not slot.trains or slot.name not in names:
                    continue
                if to_none or parameter.grad is None:
                    parameter.grad = None  # which drops what adds up elsewhere
                else:
                    parameter.grad.zero_()

    def discard(self, *, to_none: bool = True) -> None:
        """Forget all gradients, and a backward pass that an exception has left.

        Args:
            to_none: parameters have none then, else zeros, on which optimizers act.
        """
        units = self._arrangement.units
        adds_up = self._fsdp2_holds_them and fsdp2.accumulated_bytes(self._model) > 0
        adds_up |= any(unit.accumulated is not None or unit.left for unit in units)
        stays = not (to_none or adds_up or self.is_broken_off)
        if not is_in_backward():
            if self._callback_queued and self.replicated:
                self.replicated.abandon()
            self._callback_queued = self._is_end_awaited = False
            if not self.replicated and not fsdp2.is_resting(self._model):
                fsdp2.recover(self._model)
        self.on_discard(None)
        self.executor.drain()
        self._are_zeroed = stays and self._exposure.zero(unit.reduced for unit in units if unit.reduced is not None)
        if self._are_zeroed:
            return
        self._exposure.forget(to_none=to_none)
        if to_none:
            self._usage.clear()
        for unit in units:
            unit.forget_gradients()
            for slot in unit.spec.training:
                set_gradient(slot.parameter, None)
        if self._arrangement.levels.parameter != Level.N:
            fsdp2.discard_accumulated(self._model)
