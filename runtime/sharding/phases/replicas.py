"""Notices that ranks have changed their copies of one parameter differently.

Where a plan keeps copies of what a script's own framework shards, noise that each rank draws for itself, or a change on
rank 0 alone, would leave copies that differ, and each rank would train a model of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from paro_advise.errors import DivergedError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.sharding.parameters.owned import change_marker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot

# Small enough that 24 bits hold each piece exactly, whatever type a backend gathers in.
_PIECE_BITS, _PIECES = 20, 3
_FACTOR = 1_000_003  # an odd number: products modulo 2 ** 60 lose nothing
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element; of others pieces of eight


class Replicas:
    """The copies that ranks hold of each other's parameters."""

    def __init__(self) -> None:
        self._noted: dict[str, int] = {}
        self._is_changed = False  # on this rank
        self._is_doubtful = False  # on any

    def note(self, units: Sequence[UnitState]) -> None:
        """Remember the parameters as they are: all ranks have just made them alike."""
        self._noted = _versions(units)

    def note_one(self, slot: Slot) -> None:
        """Remember one parameter as it is."""
        self._noted[slot.name] = sum(change_marker(slot.parameter))

    def note_change(self) -> None:
        """Note that a script has changed some, or the optimizer's of them, since all were compared."""
        self._is_changed = True

    def are_changed(self, arrangement: Arrangement) -> bool:
        """Tell whether copies have been changed on this rank since all were compared, which is forgotten."""
        found, self._is_changed = self._is_changed, False
        return self.are_held(arrangement) and (found or self.count_changes(arrangement.units) != 0)

    def count_changes(self, units: Sequence[UnitState]) -> int:
        """Return how often this rank has changed the parameters, at rest, since they were noted."""
        return sum(_versions(units).values()) - sum(self._noted.values())

    def is_changed(self, slot: Slot) -> bool:
        """Tell whether this rank has changed a parameter since all were noted."""
        return sum(change_marker(slot.parameter)) != self._noted.get(slot.name)

    def hear(self, *, has_changes: bool) -> None:
        """Hear whether any rank has changed some."""
        self._is_doubtful = self._is_doubtful or has_changes

    def must_be_compared(self, arrangement: Arrangement) -> bool:
        """Tell whether copies may differ in a step, which is forgotten; all ranks find the same.

        Not in the pass before: adversarial training changes weights by a rank's own gradient for one, and back.
        """
        found, self._is_doubtful = self._is_doubtful, False
        return found and self.are_held(arrangement)

    def are_held(self, arrangement: Arrangement) -> bool:
        """Tell whether any rank holds what another one holds as well."""
        grid, level = arrangement.gathering.grid, arrangement.levels.parameter
        return grid.world_size > 1 and (level == Level.N or (level == Level.I and grid.num_groups > 1))

    def compare(self, arrangement: Arrangement) -> None:
        """Compare the copies; all ranks call it at once.

        Raises:
            DivergedError: some differ.
        """
        channels = arrangement.gathering
        own = torch.tensor(_digest(arrangement.units), dtype=torch.float32, device=arrangement.device)
        everybodys = own.new_empty(channels.grid.world_size * _PIECES)
        channels.gather_by_rank(everybodys, own)
        digests = list(map(tuple, everybodys.view(-1, _PIECES).tolist()))
        period = 1 if arrangement.levels.parameter == Level.N else channels.grid.group_size
        if any(digest != digests[rank % period] for rank, digest in enumerate(digests)):
            raise DivergedError(
                "all ranks must change a parameter in the same way where the plan keeps copies of it, got copies that "
                "differ since the script changed them",
                hint="draw noise from a generator that has the same seed on all ranks, make each change on all of "
                "them, or choose a strategy that shards parameters over all ranks (G..)",
            )


def _versions(units: Sequence[UnitState]) -> dict[str, int]:
    return {slot.name: sum(change_marker(slot.parameter)) for unit in units for slot in unit.spec.training}


def _digest(units: Sequence[UnitState]) -> list[float]:
    """Return a number of 60 bits over the bits of what this rank holds, in pieces."""
    sums = []
    for slot in (slot for unit in units for slot in unit.spec.training):
        held = slot.parameter.detach()
        local = held._local_tensor if isinstance(held, DTensor) else held  # noqa: SLF001 - to_local() makes a view
        sums.append(local.contiguous().view(_WORDS.get(local.element_size(), torch.int64)).sum(dtype=torch.int64))
    digest = 0
    for value in torch.stack(sums).tolist() if sums else ():
        digest = (digest * _FACTOR + value) % 2 ** (_PIECE_BITS * _PIECES)
    return [float(digest >> _PIECE_BITS * place & 2**_PIECE_BITS - 1) for place in range(_PIECES)]
