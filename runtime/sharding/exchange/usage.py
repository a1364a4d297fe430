"""Which parameters got a gradient on any rank: those that none used have none, and optimizers leave them alone.

A reduction fills the place of a missing gradient with zeros, which weight decay and momentum would act on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.sharding.exchange.channels import Channels
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import UnitSpec


class Usage:
    """Notes of all ranks since the gradients were last forgotten.

    Args:
        units: of the model.
        device: that the backend communicates from.
    """

    def __init__(self, units: Sequence[UnitSpec], device: torch.device) -> None:
        self._first: dict[str, int] = {}
        count = 0
        for unit in units:
            self._first[unit.name] = count
            count += len(unit.training)
        self._device = device
        self._here = [False] * count
        self._anywhere = [False] * count

    def note(self, unit: UnitState, place: int) -> None:
        """Note that a parameter of a unit got a gradient on this rank."""
        self._here[self._first[unit.spec.name] + place] = True

    def is_used(self, unit: UnitState, place: int) -> bool:
        """Tell whether a parameter of a unit got a gradient on any rank."""
        return self._anywhere[self._first[unit.spec.name] + place]

    def agree(self, channels: Channels) -> None:
        """Exchange the notes; all ranks call it at once."""
        world = channels.grid.world_size
        count = len(self._here)
        if world == 1 or not count:
            self._anywhere = list(self._here)
            return
        notes = torch.zeros(-(-count // world) * world, device=self._device)
        notes[:count] = torch.tensor(self._here, dtype=notes.dtype)
        channels.sum_all(notes)
        self._anywhere = [value > 0 for value in notes[:count].tolist()]

    def clear(self) -> None:
        """Forget all notes."""
        self._here = [False] * len(self._here)
        self._anywhere = [False] * len(self._anywhere)
