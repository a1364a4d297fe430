"""Brings updated parameters from the optimizer's level back to the parameters'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.runtime.ho_ring.spans import Span
from paro_advise.runtime.sharding.exchange.procedure import UnitProcedure

if TYPE_CHECKING:
    from collections.abc import Callable

    from paro_advise.runtime.sharding.arrangement import Arrangement
    from paro_advise.runtime.sharding.exchange.executor import Executor, Submission
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.phases.homes import ParameterHomes


class UpdatePublisher:
    """Publishes updates unit by unit, in forward order.

    Attributes:
        executor: of gathers.
    """

    def __init__(self, homes: ParameterHomes, executor: Executor) -> None:
        self.executor = executor
        self._homes = homes
        self._under_way: dict[str, Submission] = {}
        self._last: dict[str, Submission] = {}

    def arrange(self, arrangement: Arrangement) -> None:
        """Work under a strategy from now on."""
        self._arrangement = arrangement
        self._procedure = UnitProcedure(arrangement.levels, arrangement.gathering)

    def publish(self, *, wait: bool = True) -> None:
        """Bring the optimizer's rows to the parameters' level."""
        for unit in self._arrangement.forward_order:
            if unit.spec.training and self._procedure.publishes(unit):
                self._under_way[unit.spec.name] = self._last[unit.spec.name] = self.executor.submit(self._job(unit))
        if wait:
            self.finish()

    def publish_unit(self, unit: UnitState) -> None:
        """Bring one unit's rows to the parameters' level, and wait for it."""
        if unit.spec.training and self._procedure.publishes(unit):
            self.executor.submit(self._job(unit)).wait()

    def _job(self, unit: UnitState) -> Callable[[], None]:
        held = self._homes.held(self._arrangement, unit)
        name = self._arrangement.span_name("optimizer", unit)

        def run() -> None:
            with Span(name):
                self._procedure.publish(unit, held)

        return run

    def wait_for(self, unit: UnitState) -> None:
        """Wait until the parameters of one unit are up to date."""
        update = self._under_way.pop(unit.spec.name, None)
        if update is not None:
            update.wait()

    def before_copy(self, unit: UnitState) -> None:
        """Wait for the last update of one unit on the stream that copies it, which is FSDP2's own."""
        update = self._last.get(unit.spec.name)
        if update is not None:
            update.wait()

    @property
    def is_under_way(self) -> bool:
        """Tell whether updates may still be written."""
        return bool(self._under_way)

    def finish(self) -> None:
        """Wait until all parameters are up to date."""
        self.executor.drain()
        self._under_way.clear()
