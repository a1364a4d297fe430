"""Asks for the whole states of one model while other ranks go on, which come to help (attendance.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.policies.strategy import Level
from paro_advise.runtime.adapters.planned.attendance import (
    BACKWARD,
    BACKWARD_HINT,
    LOAD,
    LOAD_HINT,
    OF_MODEL,
    OPTIMIZER,
    PARAMETERS,
    UNIT,
    Attendance,
    changes_of,
)
from paro_advise.runtime.sharding.parameters.owned import is_in_backward
from paro_advise.runtime.sharding.states.whole_states import plain_optimizer_state, whole_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import StateDict

_GOES_BACKWARD, _AT_REST = "that goes backward", "at rest"


class AttendedReader:
    """Asks for the whole states of one model.

    Args:
        attendance: of this process.
        engine: of the model.
    """

    def __init__(self, attendance: Attendance, engine: Engine) -> None:
        self._attendance = attendance
        self._engine = engine
        self._of_model = f"{OF_MODEL}{attendance.add(engine)}"
        self._has_asked = False  # since a backward pass began

    def attach(self, *, evaluates_alone: bool) -> None:
        """Let the model ask.

        Args:
            evaluates_alone: rank 0 may run passes that the others do not.
        """
        self._engine.whole_reader = self
        self._engine.passes.before_backward = self.before_backward
        if evaluates_alone:
            self._engine.homes.before_gather = self.before_gather
            self._engine.passes.before_own_backward = self.before_own_backward

    def parameters(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Gather the parameters that train, unit by unit; nobody is needed for it where every rank holds all."""
        if self._engine.holds_all:
            yield from whole_parameters(self._engine)
            return
        self._has_asked = True
        with self._attendance.meeting(PARAMETERS + changes_of(self._engine) + self._of_model):
            yield from whole_parameters(self._engine)

    def optimizer_state(self) -> StateDict:
        """Gather the optimizer's state, in torch's own layout."""
        self._has_asked = True
        with self._attendance.meeting(OPTIMIZER + self._of_model):
            return plain_optimizer_state(self._engine)

    def before_load(self) -> None:
        """Bring all ranks together where the script loads weights, unless each rank holds and steps all of them."""
        if self._attendance.is_needed and self._engine.levels.optimizer != Level.N:
            self._attendance.meet(LOAD, LOAD_HINT)

    def before_own_backward(self) -> None:
        """Bring the others to a backward pass of a model that was called by itself, and not by DDP."""
        if self._attendance.is_needed:
            self._attendance.meet(BACKWARD, BACKWARD_HINT)

    def before_gather(self, unit: UnitState) -> None:
        """Bring the others to a gather of a unit's parameters that an evaluation needs; they may go on without it."""
        if is_in_backward():
            self._engine.passes.ask()
        if not self._attendance.is_needed or self._engine.passes.is_of_all:
            return
        place = next(place for place, other in enumerate(self._engine.units) if other is unit)
        hint = "run an evaluation on rank 0, or on all ranks with as many batches on each"
        self._has_asked = True
        changes = self._engine.edits.count_changes()
        self._attendance.meet(f"{UNIT}{place}{self._of_model}", hint, changes=changes)

    def before_backward(self) -> None:
        """Bring all ranks together where backward begins: what rank 0 has looked at since forward, all have gathered.

        What was kept for backward is freed on all of them where it is on rank 0, and where others have freed it as they
        helped; all gather it again.
        """
        homes, arrangement = self._engine.homes, self._engine.arrangement
        if self._has_asked:
            homes.rest(arrangement)
        self._has_asked = False
        rests = all(homes.are_at_rest(arrangement, unit) for unit in self._engine.units)
        if self._attendance.attend(_GOES_BACKWARD, _AT_REST if rests else "") == _AT_REST and not rests:
            homes.rest(arrangement)
