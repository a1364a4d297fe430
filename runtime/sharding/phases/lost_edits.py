"""Refuses what a script changes on parameters while they are gathered, or in a framework that would forget it.

Whoever clamps or normalises a weight inside ``forward`` changes this rank's copy. Of a sharded parameter that copy is
freed after use; nothing would be left of the change. An ``Embedding`` with ``max_norm`` does so as well.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters.owned import change_marker, is_in_backward, mark_as_gathered

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot


class GatheredCopies:
    """The copies of a unit's sharded parameters that FSDP2 fills for each pass; a gather leaves versions alone."""

    def __init__(self, unit: UnitState) -> None:
        self._unit = unit
        self._known: dict[str, tuple[weakref.ref[nn.Parameter], tuple[int, ...]]] = {}

    def begin(self) -> None:
        """Look at what the model computes with now.

        Raises:
            UsageError: the script has changed one since it was made.
        """
        for slot, resting in self._unit.at_rest():
            copy = slot.parameter
            known = self._known.get(slot.name)
            if known is not None and known[0]() is copy:
                _refuse_change(slot.name, copy, known[1])
            elif not isinstance(copy, DTensor):
                if type(copy) is nn.Parameter:
                    mark_as_gathered(copy, resting)
                self._known[slot.name] = weakref.ref(copy), change_marker(copy)

    def end(self) -> None:
        """Look at all that were ever registered.

        Raises:
            UsageError: the script has changed one.
        """
        for name, (reference, before) in self._known.items():
            copy = reference()
            if copy is not None:
                _refuse_change(name, copy, before)


def _refuse_change(name: str, copy: nn.Parameter, before: tuple[int, ...]) -> None:
    if change_marker(copy) != before:
        raise UsageError(
            f"a parameter that a plan shards must not be changed while it is gathered, got {name}, of which nothing "
            "would be left",
            where=name,
            hint="change it after optimizer.step(), or choose a strategy that replicates parameters (N..)",
        )


class WholeInForward:
    """A unit's whole parameters during its forward pass, in scripts whose own framework shards them.

    Args:
        slots: of the unit.
        stays: the framework keeps the unit gathered until backward, as FSDP does the root.
    """

    def __init__(self, slots: Iterable[Slot], *, stays: bool) -> None:
        self._slots = tuple(slots)
        self._stays = stays
        self._before: list[tuple[int, ...]] = []

    def begin(self) -> None:
        """Remember them.

        Raises:
            UsageError: see ``check``.
        """
        self.check()
        # A forward pass that backward runs again, for activations that were dropped, may end where it has them all.
        self._before = [] if is_in_backward() else [change_marker(slot.parameter) for slot in self._slots]

    def end(self) -> None:
        """Compare them at the end of the forward pass.

        Raises:
            UsageError: see ``check``.
        """
        self.check()
        if not (self._stays and torch.is_grad_enabled()):
            self._before = []

    def begin_backward(self) -> None:
        """Compare them as backward begins.

        Raises:
            UsageError: see ``check``.
        """
        self.check()
        self._before = []

    def check(self) -> None:
        """Compare them with what they were when the pass began.

        Raises:
            UsageError: the script has changed one, which the framework would forget.
        """
        before, self._before = self._before, []
        for slot, version in zip(self._slots, before, strict=False):
            if change_marker(slot.parameter) != version:
                raise UsageError(
                    "a parameter must not be changed while it is gathered (in a forward pass, from there to backward, "
                    "from unshard to reshard), got one: this script's framework, which shards it, forgets the change, "
                    "and a plan that replicates it does not",
                    where=slot.name,
                    hint="change it after optimizer.step()",
                )
        self._before = before
