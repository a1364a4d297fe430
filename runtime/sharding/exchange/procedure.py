"""What happens to the gradients and the updated parameters of one unit (docs/strategies.md, procedure).

Gradients are delivered once per micro-batch (or, where they stay whole, once per step), brought to
their level and added up there; at the accumulation boundary they go on to the optimizer's level.
After the optimizer's step the updated parameters go back to the parameters' level.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paro_advise.core.collective import Op
from paro_advise.errors import UsageError
from paro_advise.policies.procedure import Scope, procedure_of
from paro_advise.policies.strategy import Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from paro_advise.policies.procedure import Hops
    from paro_advise.policies.strategy import Strategy
    from paro_advise.runtime.sharding.exchange.channels import Channels
    from paro_advise.runtime.sharding.parameters.layout import UnitLayout
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec


@dataclass(slots=True, kw_only=True)
class UnitState:
    """One unit under a strategy.

    Attributes:
        spec: the unit.
        layout: of the parameters that train.
        masters: the optimizer's rows of each trained parameter, in the layout's order, each one piece of
            memory; views of the model's own parameters where both have one type and such a view is possible.
        separate: some of the masters have memory of their own.
        homes: the memory of each parameter, in the order of the unit's slots, where all ranks hold it whole.
        parameters: the model's objects over it.
        accumulated: sum of this step's gradients at their level, not yet divided.
        sent_in: the type in which the passes' gradients were reduced; what is added up may be wider.
        reduced: gradients at the optimizer's level, the mean over all ranks; what clipping and the
            optimizer see.
        divide_factor: what sums over all ranks are divided by; None for the number of ranks.
        left: whole gradients that this rank's parameters had before they were sharded, by place; the first pass that
            is reduced adds to them, as to those of passes in ``no_sync``.
    """

    spec: UnitSpec
    layout: UnitLayout
    masters: list[torch.Tensor] = field(default_factory=list)
    separate: bool = False
    homes: list[torch.Tensor] = field(default_factory=list)
    parameters: list[nn.Parameter] = field(default_factory=list)
    accumulated: torch.Tensor | None = None
    sent_in: torch.dtype | None = None
    reduced: torch.Tensor | None = None
    divide_factor: float | None = None
    left: dict[int, torch.Tensor] = field(default_factory=dict)

    def forget_gradients(self) -> None:
        """Have none, whole or reduced."""
        self.accumulated = self.reduced = None
        self.left.clear()

    def add_left(self, gradients: list[torch.Tensor | None]) -> None:
        """Add what was left to the gradients of a pass, which then holds all."""
        for place, left in self.left.items():
            gradient = gradients[place]
            gradients[place] = left if gradient is None else left + gradient
        self.left.clear()

    def at_rest(self) -> list[tuple[Slot, nn.Parameter]]:
        """Return all parameters as they are between passes, when no gathered copy stands in their place."""
        # Before they are placed, nothing is gathered.
        parameters = self.parameters or [slot.parameter for slot in self.spec.slots]
        return list(zip(self.spec.slots, parameters, strict=True))


class UnitProcedure:
    """The collectives of a strategy.

    Args:
        strategy: levels; I only where groups are larger than one rank and smaller than the world.
        channels: the groups.
    """

    def __init__(self, strategy: Strategy, channels: Channels) -> None:
        self._strategy = strategy
        self._hops = procedure_of(strategy)
        self._channels = channels
        self._world_size = channels.grid.world_size

    def add(self, unit: UnitState, whole: torch.Tensor, *, last: bool) -> None:
        """Take the gradients of one backward pass.

        Args:
            unit: whose gradients.
            whole: this rank's gradients of the unit: m slabs, or one flat piece where the optimizer states are
                whole. Overwritten.
            last: this is the accumulation boundary.
        """
        if self._strategy.gradient == Level.N:
            # Only called at the boundary: until then they add up where they are.
            self._finish(unit, self._reduce(unit, whole, self._hops.synchronise))
            return
        part = self._reduce(unit, whole, self._hops.reduce)
        if unit.accumulated is None:
            unit.accumulated, unit.sent_in = part, part.dtype
        else:
            # As in FSDP2, where each pass's sum comes in the optimizer's type: many sums in bf16 would lose digits.
            kept_in = torch.promote_types(part.dtype, unit.masters[0].dtype) if unit.masters else part.dtype
            unit.accumulated = unit.accumulated.to(kept_in).add_(part)
        if last:
            self.finish(unit)

    def finish(self, unit: UnitState) -> None:
        """Bring what was added up at the gradients' level to the optimizer's."""
        part, unit.accumulated = unit.accumulated, None
        assert part is not None
        if self._hops.synchronise and unit.sent_in is not None:
            part = part.to(unit.sent_in)
        self._finish(unit, self._reduce(unit, part, self._hops.synchronise))

    def _finish(self, unit: UnitState, total: torch.Tensor) -> None:
        total.div_(unit.divide_factor or self._world_size)
        if unit.masters:
            total = total.to(unit.masters[0].dtype)
        if unit.reduced is None:
            unit.reduced = total
        else:
            unit.reduced.add_(total)

    def _reduce(self, unit: UnitState, gradients: torch.Tensor, hops: Hops) -> torch.Tensor:
        """Take gradients through collectives; those that keep a size work in place."""
        channels = self._channels
        for hop in hops:
            match hop.op, hop.scope:
                case Op.REDUCE_SCATTER, Scope.INSIDE:
                    gradients = channels.reduce_inside(gradients)
                case Op.REDUCE_SCATTER, Scope.ACROSS:
                    gradients = channels.reduce_across(gradients)
                case Op.REDUCE_SCATTER, Scope.WORLD:
                    gradients = channels.reduce_all(gradients)
                case Op.ALL_REDUCE, Scope.ACROSS:
                    channels.sum_across(gradients)
                case Op.ALL_REDUCE, Scope.WORLD:
                    channels.sum_all(gradients)
                case _:
                    raise UsageError(
                        f"gradients of {self._strategy} must go by collectives that we run, got {hop}",
                        where=unit.spec.name or "the root",
                    )
        return gradients

    def publishes(self, unit: UnitState) -> bool:
        """Tell whether updated parameters are elsewhere than where the model has them."""
        return unit.separate or self._strategy.optimizer != self._strategy.parameter

    def publish(self, unit: UnitState, held: Sequence[torch.Tensor]) -> None:
        """Bring updated parameters from the optimizer's level to the parameters'.

        Args:
            unit: whose parameters.
            held: what the rank holds of each trained parameter, flat; written.
        """
        strategy, layout, channels = self._strategy, unit.layout, self._channels
        if not held:
            return
        if strategy.optimizer == strategy.parameter:
            if unit.separate:
                for target, master in zip(held, unit.masters, strict=True):
                    target.copy_(master.reshape(-1), non_blocking=True)
            return
        first = held[0]
        if strategy.optimizer == Level.I:
            slab = first.new_empty(layout.slab_elements)
            _pack(layout.views_of_band(slab), unit.masters)
            slabs = first.new_empty(channels.grid.group_size * slab.numel())
            channels.gather_inside(slabs, slab)
            layout.spread(slabs, held)
            return
        piece = first.new_empty(layout.slice_elements)
        _pack(layout.views_of_slice(piece), unit.masters)
        if strategy.parameter == Level.N:
            buffer = first.new_empty(channels.grid.world_size * piece.numel())
            channels.gather_all(buffer, piece)
            layout.spread(buffer, held)
        else:
            slab = first.new_empty(channels.grid.num_groups * piece.numel())
            channels.gather_across(slab, piece)
            layout.unnest(slab, held)

    def forget(self, unit: UnitState, place: int) -> None:
        """Clear what has been left, added up and reduced for one parameter of a unit."""
        unit.left.pop(place, None)
        if unit.accumulated is not None:
            unit.layout.view_of(unit.accumulated, place, sliced=self._strategy.gradient == Level.G).zero_()
        if unit.reduced is not None:
            self.gradient_views(unit)[place].zero_()

    def gradient_views(self, unit: UnitState) -> list[torch.Tensor]:
        """Return the reduced gradient of each trained parameter, shaped like its master."""
        assert unit.reduced is not None
        match self._strategy.optimizer:
            case Level.N:
                views = list(
                    torch.split(unit.reduced[: _whole_elements(unit)], [s.shape.numel() for s in unit.spec.training])
                )
            case Level.I:
                views = unit.layout.views_of_band(unit.reduced)
            case _:
                views = unit.layout.views_of_slice(unit.reduced)
        return [view[: master.numel()].view(master.shape) for view, master in zip(views, unit.masters, strict=True)]

    def whole_buffer(
        self, unit: UnitState, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return whole gradients as ``add`` wants them, on the model's device: the optimizer may be on the host."""
        if self._strategy.optimizer != Level.N:
            size = self._channels.grid.group_size * unit.layout.slab_elements
            buffer = torch.empty(size, dtype=dtype, device=device)
            unit.layout.fill(buffer, gradients)
            return buffer
        count = _whole_elements(unit)
        padded = -(-count // self._world_size) * self._world_size
        buffer = torch.empty(padded, dtype=dtype, device=device)
        buffer[count:].zero_()
        sizes = [slot.shape.numel() for slot in unit.spec.training]
        for place, gradient in zip(torch.split(buffer[:count], sizes), gradients, strict=True):
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient.reshape(-1))
        return buffer


def _whole_elements(unit: UnitState) -> int:
    return sum(slot.shape.numel() for slot in unit.spec.training)


def _pack(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to the starts of places; what is behind them is padding that nobody reads."""
    for place, tensor in zip(places, tensors, strict=True):
        place[: tensor.numel()].copy_(tensor.reshape(-1), non_blocking=True)
        place[tensor.numel() :].zero_()
