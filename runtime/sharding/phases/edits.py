"""Takes over what a script changes by hand, between passes and steps, to parameters.

A parameter may lie in two places: where the model computes with it, and where the optimizer updates it. The
script may change either (a clamp, a mean of past weights, a sharpness-aware step); the other one must follow
before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.utils import stateless

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.sharding.parameters.owned import change_marker
from paro_advise.runtime.sharding.parameters.reading import runs_inside

if TYPE_CHECKING:
    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.optimizers.optimizer import OptimizerShards
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.sharding.phases.homes import ParameterHomes
    from paro_advise.runtime.sharding.phases.replicas import Replicas
    from paro_advise.runtime.sharding.phases.updates import UpdatePublisher


class Edits:
    """Compares parameters with what they were when both places last agreed.

    All ranks run one program, so that each decides alike; nothing is exchanged to find out.

    Args:
        homes: where the model's parameters rest.
        shards: the optimizer's.
        updates: brings the optimizer's to the model.
        replicas: the copies of the model's that ranks hold.
    """

    def __init__(
        self, homes: ParameterHomes, shards: OptimizerShards, updates: UpdatePublisher, replicas: Replicas
    ) -> None:
        self._homes = homes
        self._shards = shards
        self._updates = updates
        self._replicas = replicas
        self._agreed: dict[str, tuple[int, ...]] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._saved: dict[str, torch.Tensor] = {}

    def arrange(self, arrangement: Arrangement) -> None:
        """Work under a strategy from now on."""
        self._arrangement = arrangement
        self._saved.clear()

    def to_save(self, unit: UnitState, place: int) -> torch.Tensor:
        """Return the optimizer's rows of a parameter for a state dict; what is loaded into them is noticed."""
        name, master = unit.spec.training[place].name, unit.masters[place]
        if name not in self._saved or self._saved[name].data_ptr() != master.data_ptr():
            # One memory, but a version that no change of the model's own parameter raises: one rank alone may make it.
            self._saved[name] = master.data
        return self._saved[name]

    def note(self, unit: UnitState) -> None:
        """Remember that a unit's parameters agree."""
        for place, slot in enumerate(unit.spec.training):
            self._agreed[slot.name] = self._versions(slot.name)
            if unit.separate and unit.masters[place].device != self._arrangement.device:
                self._sums[slot.name] = _checksum(self._homes.rows_of_optimizer(self._arrangement, unit, place))

    def note_all(self) -> None:
        """Remember that all parameters agree."""
        for unit in self._arrangement.units:
            self.note(unit)
        self._replicas.note(self._arrangement.units)

    def count_changes(self) -> int:
        """Return how often this rank has changed the model's parameters, at rest, since they were all noted."""
        return self._replicas.count_changes(self._arrangement.units)

    def is_changed(self, slot: Slot) -> bool:
        """Tell whether this rank has changed a parameter of the model, at rest, since all were noted."""
        return self._replicas.is_changed(slot)

    def note_sent(self, slot: Slot) -> None:
        """Remember a parameter as a collective of the script has made it, alike on all ranks."""
        self._replicas.note_one(slot)

    def before_forward(self, unit: UnitState) -> None:
        """Bring what was changed on the optimizer's side to the model, before a unit is used.

        Raises:
            UsageError: a parameter wants a gradient that did not when the model was sharded.
        """
        self._bring_home(unit)
        if any(self._is_changed(slot.name) for slot in unit.spec.training):
            self._replicas.note_change()
            self._updates.publish_unit(unit)
            self.note(unit)

    def leave_given_weights(self, unit: UnitState) -> bool:
        """Tell whether a unit holds weights of the script's for a while, which stay as they are.

        Raises:
            UsageError: those of the model are sharded, and a gather would put them in place of the others; or they wait
                for what was changed at the optimizer.
        """
        if not self._homes.holds_others(self._arrangement, unit):
            return False
        if self._arrangement.levels.parameter != Level.N:
            raise UsageError(
                "a pass must use the model's own weights where they are sharded, got others (functional_call)",
                hint="copy them into the model and back, or choose a strategy that replicates parameters (N..)",
            )
        if any(self._is_changed(slot.name) for slot in unit.spec.training):
            raise UsageError(
                "weights changed at the optimizer must reach the model before it runs with some others, got none yet",
                hint="call model.state_dict() or list model.named_parameters() between the two",
            )
        return True

    def publish(self) -> None:
        """Bring what was changed on the optimizer's side to the whole model."""
        for unit in self._arrangement.forward_order:
            self.before_forward(unit)

    def before_step(self) -> None:
        """Bring what was changed on the model's side to the optimizer, before it steps."""
        self._updates.finish()
        has_copies = self._arrangement.levels.optimizer != Level.G
        if self.count_changes() or (has_copies and any(map(self._is_changed, self._agreed))):
            self._replicas.note_change()
        for unit in self._arrangement.units:
            self._bring_home(unit)
        self.absorb()

    def absorb(self) -> None:
        """Bring what was changed on the model's side to the optimizer's copy, where it has one."""
        if self._updates.is_under_way:
            return
        for unit in self._arrangement.units:
            if unit.separate and self._homes.are_at_rest(self._arrangement, unit):
                for place, slot in enumerate(unit.spec.training):
                    if not self._is_changed(slot.name):
                        self._absorb(unit, place)

    def _is_changed(self, name: str) -> bool:
        return self._versions(name) != self._agreed.get(name)

    def _versions(self, name: str) -> tuple[int, ...]:
        saved = self._saved.get(name)
        return *change_marker(self._shards.shards[name]), saved._version if saved is not None else 0  # noqa: SLF001

    def _bring_home(self, unit: UnitState) -> None:
        """Put values of tensors that a script has assigned into the memory that the strategy uses."""
        self._homes.refuse_others(self._arrangement, unit)
        # A pass that makes no gradients may be of what trains elsewhere, such as an adapter that others compare with.
        for slot in unit.spec.slots if torch.is_grad_enabled() else ():
            if not slot.trains and slot.parameter.requires_grad:
                raise UsageError(
                    f"a parameter must want its gradient when the model is sharded, got {slot.name}, which wants "
                    "one since then",
                    where=slot.name,
                    hint="let it train before the model is sharded; it may be frozen and let loose after that",
                )
        if self._arrangement.levels.parameter == Level.N:
            self._homes.bring_home(unit)

    def _absorb(self, unit: UnitState, place: int) -> None:
        """Give the optimizer's copy the elements in which the model's parameter is no longer its rounded value."""
        name, master = unit.spec.training[place].name, unit.masters[place]
        held = self._homes.rows_of_optimizer(self._arrangement, unit, place)
        if held.data_ptr() == master.data_ptr():
            return
        if name in self._sums and torch.equal(_checksum(held), self._sums[name]):
            return  # over the bus to the host only what was changed
        there = held.to(master.device)
        torch.where(there == master.to(there.dtype), master, there.to(master.dtype), out=master)


def weights_are_given() -> bool:
    """Tell whether ``functional_call`` runs here: the modules hold tensors of the script's until it returns."""
    return runs_inside(stateless)


def _checksum(values: torch.Tensor) -> torch.Tensor:
    """Return two sums over the bits of a tensor, the second one weighted by place, modulo 2 ** 64."""
    bits = values.contiguous().view(torch.uint8).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return torch.stack((bits.sum(), (bits.view(-1) * places).sum()))
