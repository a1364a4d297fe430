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
        self._known = [False] * count  # of all ranks together, as far as this one has read
        self._counts: torch.Tensor | None = None

    def note(self, unit: UnitState, place: int) -> None:
        """Note that a parameter of a unit got a gradient on this rank."""
        self._here[self._first[unit.spec.name] + place] = True

    def is_used(self, unit: UnitState, place: int) -> bool:
        """Tell whether a parameter of a unit got a gradient on any rank, as they have agreed."""
        number = self._first[unit.spec.name] + place
        if not self._known[number] and self._counts is not None:
            # Only for a parameter without one on this rank the host waits for a device.
            self._known, self._counts = [value > 0 for value in self._counts.tolist()], None
        return self._known[number]

    def agree(self, channels: Channels) -> None:
        """Exchange the notes; all ranks call it at once."""
        world, count = channels.grid.world_size, len(self._here)
        self._known, self._counts = list(self._here), None
        if world == 1 or not count:
            return
        padding = [False] * (-count % world)
        # Pinned memory is copied beside the host.
        on_host = torch.tensor(self._here + padding, dtype=torch.float32, pin_memory=self._device.type != "cpu")
        notes = on_host.to(self._device, non_blocking=True)
        channels.sum_all(notes)
        self._counts = notes

    def clear(self) -> None:
        """Forget all notes."""
        self._here = [False] * len(self._here)
        self._known, self._counts = list(self._here), None
