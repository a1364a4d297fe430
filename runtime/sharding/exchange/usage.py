"""Which parameters got a gradient on any rank: those that none used have none, and optimizers leave them alone.

A reduction fills the place of a missing gradient with zeros, which weight decay and momentum would act on.

With the notes go digests of what a rank has gathered and reduced. Where parameters are sharded, each unit that runs is
a collective: ranks that run different units of one size (experts, layers left out at random) would compute with each
other's weights, and nothing else would notice.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import torch

from paro_advise.errors import DivergedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paro_advise.runtime.sharding.exchange.channels import Channels
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import UnitSpec

# Five bits a piece: the sum of their squares is exact in float32 up to 16,384 ranks (31 ** 2 * 16,384 < 2 ** 24).
_PIECE_BITS, _PIECES = 5, 6
_MODULUS = 2 ** (_PIECE_BITS * _PIECES) - 35  # a prime
_FACTOR = 1_000_003  # a prime; any that is no divisor of the modulus spreads the numbers


class Missing(Enum):
    """What a script's framework gives the optimizer for a parameter that no rank used."""

    NONE = "no gradient, as torch, DDP and FSDP2"
    ZEROS_IN_USED_UNITS = "zeros where its unit has any, as FSDP1, which keeps a unit's gradients in one tensor"
    ZEROS = "zeros, as DeepSpeed"


class Usage:
    """Notes of all ranks since the gradients were last forgotten.

    Args:
        units: of the model.
        device: that the backend communicates from.

    Attributes:
        missing: what a parameter that no rank used has.
    """

    def __init__(self, units: Sequence[UnitSpec], device: torch.device) -> None:
        self.missing = Missing.NONE
        self._first: dict[str, int] = {}
        self._numbers = {unit.name: number for number, unit in enumerate(units, 1)}
        self._gathered = self._delivered = 0
        count = 0
        for unit in units:
            self._first[unit.name] = count
            count += len(unit.training)
        self._device = device
        self._here = [False] * count
        self._known = [False] * count  # of all ranks together, as far as this one has read
        self._counts: torch.Tensor | None = None
        self._forgotten: set[int] = set()  # since the last exchange
        self._copied: _OnHost | None = None  # the digests of all ranks together, of the last exchange
        self._unchecked: _OnHost | None = None
        self._world_size = 1

    def note(self, unit: UnitState, place: int) -> None:
        """Note that a parameter of a unit got a gradient on this rank."""
        self._here[self._first[unit.spec.name] + place] = True

    def forget(self, unit: UnitState, place: int) -> None:
        """Forget that a parameter of a unit got gradients: one that it gets no more is none, and no zeros."""
        number = self._first[unit.spec.name] + place
        self._here[number] = self._known[number] = False
        self._forgotten.add(number)  # a device's counts are not waited for here, nor written to one by one

    def is_noted(self, unit: UnitState, place: int) -> bool:
        """Tell whether a parameter of a unit got a gradient on this rank."""
        return self._here[self._first[unit.spec.name] + place]

    def note_gather(self, unit: UnitState) -> None:
        """Note that this rank takes part in a gather of a unit's sharded parameters."""
        self._gathered = (self._gathered * _FACTOR + self._numbers[unit.spec.name]) % _MODULUS

    def note_delivery(self, unit: UnitState) -> None:
        """Note that this rank takes part in a reduction of a unit whose parameters are sharded."""
        self._delivered = (self._delivered * _FACTOR + self._numbers[unit.spec.name]) % _MODULUS

    def is_used(self, unit: UnitState, place: int) -> bool:
        """Tell whether a parameter of a unit got a gradient on any rank, as they have agreed."""
        first = self._first[unit.spec.name]
        match self.missing:
            case Missing.ZEROS:
                return True
            case Missing.ZEROS_IN_USED_UNITS:
                return any(self._is_known(first + number) for number in range(len(unit.spec.training)))
            case _:
                return self._is_known(first + place)

    def _is_known(self, number: int) -> bool:
        if not self._known[number] and self._counts is not None:
            # Only for a parameter without one on this rank the host waits for a device.
            self._known, self._counts = [value > 0 for value in self._counts.tolist()], None
            for forgotten in self._forgotten:
                self._known[forgotten] = False
        return self._known[number]

    def agree(self, channels: Channels, *, is_changed: bool = False) -> None:
        """Exchange the notes; all ranks call it at once.

        Args:
            channels: of the ranks.
            is_changed: this rank has changed parameters by hand.
        """
        world, count = channels.grid.world_size, len(self._here)
        self._known, self._counts = list(self._here), None
        self._forgotten.clear()
        if world == 1 or not count:
            return
        pieces = [*_pieces(self._gathered), *_pieces(self._delivered)]
        self._gathered = self._delivered = 0
        told = [*map(float, self._here), *pieces, *(piece * piece for piece in pieces), float(is_changed)]
        told += [0.0] * (-len(told) % world)
        # Pinned memory is copied beside the host.
        on_host = torch.tensor(told, dtype=torch.float32, device="cpu", pin_memory=self._device.type != "cpu")
        notes = on_host.to(self._device, non_blocking=True)
        channels.sum_all(notes)
        self._counts = notes[:count]
        digests = notes[count : count + 4 * _PIECES + 1]
        self._world_size = world
        if self._device.type == "cpu":
            self._unchecked = _OnHost(digests)
        else:
            # To read a device's tensor lets the host wait for all that it has been asked to do: it looks at what was
            # copied in the exchange before.
            self._unchecked, self._copied = self._copied, _OnHost.copied(digests)

    def check_order(self) -> bool:
        """Check that all ranks ran the same units up to the last exchange of notes, on devices up to the one before.

        Returns:
            whether any had changed its parameters by hand.

        Raises:
            DivergedError: they have not.
        """
        found, self._unchecked = self._unchecked, None
        if found is None:
            return False
        *sums, num_changed = found.read()
        _check_alike(sums, self._world_size)
        return bool(num_changed > 0)

    def clear(self) -> None:
        """Forget all notes."""
        self._here = [False] * len(self._here)
        self._known, self._counts = list(self._here), None


class _OnHost(NamedTuple):
    """Numbers in the host's memory.

    Attributes:
        values: one dimension.
        arrived: when a device has copied them there; None where they are there.
    """

    values: torch.Tensor
    arrived: torch.Event | None = None

    @classmethod
    def copied(cls, values: torch.Tensor) -> _OnHost:
        """Let a device copy them beside the host, on the stream that the caller works on."""
        on_host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
        on_host.copy_(values, non_blocking=True)
        return cls(on_host, torch.accelerator.current_stream(values.device).record_event())

    def read(self) -> list[float]:
        """Return them; waits for their copy, and for nothing that the device does after it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        found: list[float] = self.values.tolist()
        return found


def _pieces(digest: int) -> list[float]:
    return [float(digest >> _PIECE_BITS * place & 2**_PIECE_BITS - 1) for place in range(_PIECES)]


def _check_alike(sums: list[float], world: int) -> None:
    """Check that all ranks have the same digests: their squares then have the least sum that their sum allows.

    Args:
        sums: of the pieces over all ranks, then of their squares.
        world: number of ranks.

    Raises:
        DivergedError: some differ.
    """
    half = len(sums) // 2
    if any(int(total) ** 2 != world * int(squares) for total, squares in zip(sums[:half], sums[half:], strict=True)):
        raise DivergedError(
            "all ranks must run the same units of a sharded model in the same order, got ranks that ran others",
            hint="run every expert or layer on all ranks, if need be with a weight of zero, or choose a strategy that "
            "replicates parameters (N..)",
        )
