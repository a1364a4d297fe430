"""Finds the last backward pass of a step in scripts that do not say which it is.

Strategies that keep gradients less sharded than the optimizer states save traffic only if inner
passes are known as such. A script that steps after k passes is taken to do so again; if it steps
earlier, the gradients are reduced at the step, with a message.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.messages import tell

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch
    from torch import nn

    from paro_advise.runtime.sharding.engine import Engine


# Kinds of passes, as they are told.
REDUCED, UNREDUCED = "that is reduced", "that is not reduced (no_sync)"


class Boundary:
    """Tells an engine which pass is the last.

    Args:
        engine: of the sharded model.
        optimizers: of the sharded model.
        is_gated: the script tells it itself.
        keeps_unreduced: the framework's ``zero_grad`` leaves gradients that are not reduced yet, as FSDP2's does.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_gated: bool,
        keeps_unreduced: bool = False,
    ) -> None:
        self._engine = engine
        self._optimizers = tuple(optimizers)
        self._is_gated = is_gated
        self._keeps_unreduced = keeps_unreduced
        self._passes = 0
        self._pending = False
        self._expected: int | None = None
        self._announced: bool | None = None if is_gated else True
        self._has_warned = False
        self._is_told = False
        engine.passes.exchange_nothing = lambda: self.meets_nobody
        engine.gradients.after_backward = self._after_backward
        engine.gradients.on_discard = self._on_discard
        engine.gradients.before_read = self.finish

    @contextmanager
    def told_by_script(self) -> Iterator[None]:
        """Say nothing inside, where the script has said it (``no_sync``); leave it to the script after a pass there.

        A rank may be inside alone, to evaluate: only backward passes, which all ranks run, make a difference.
        """
        was_told, self._is_told = self._is_told, True
        was_gated = self._is_gated
        try:
            yield
        finally:
            self._is_told = was_told
            if self._is_gated and not was_gated and not was_told:
                self._engine.gradients.set_synchronizes(enabled=True)  # as outside of DDP's no_sync

    def passing_of(self, module: nn.Module) -> str:
        """Return of which kind a pass of a model is that begins now, as far as the script says it.

        A pass in eval mode may be an evaluation of this rank alone that makes gradients. Where parameters are sharded
        it gathers them, which another rank would take for its own training pass.
        """
        kind = UNREDUCED if self._stays_here else REDUCED
        may_evaluate = not module.training and self._engine.levels.parameter != Level.N
        return f"{kind}, in eval mode" if may_evaluate else kind

    @property
    def meets_nobody(self) -> bool:
        """Tell whether a pass that begins now exchanges nothing: ranks may run different numbers of such."""
        levels = self._engine.levels
        return self._stays_here and levels.parameter == Level.N and levels.gradient == Level.N

    @property
    def _stays_here(self) -> bool:
        """Tell whether the script keeps the gradients of a pass that begins now from being reduced."""
        return (self._is_gated or self._is_told) and not self._engine.synchronizes

    def _after_backward(self) -> None:
        self._engine.passes.end_backward()
        self._passes += 1
        self._pending = not self._engine.synchronizes
        self._notice_script()
        self._announce()

    def _notice_script(self) -> None:
        """Leave it to the script if it has set it itself meanwhile."""
        if self._is_told or self._engine.synchronizes != self._announced:
            self._is_gated = True

    def _on_discard(self, names: Collection[str] | None) -> None:
        """Start counting again where a ``zero_grad`` forgets all gradients.

        Raises:
            UsageError: the framework's own would have left gradients that are about to be dropped.
        """
        if self._keeps_unreduced and self.is_local and (names is None or self._have_gradients(names)):
            raise UsageError(
                "gradients must be reduced before they are dropped, got zero_grad after a pass without gradient sync: "
                "FSDP2 itself keeps those and adds them to the next step's",
                hint="call zero_grad after each step only, or let the last pass before it be reduced",
            )
        if names is None:
            self.restart()

    def _have_gradients(self, names: Collection[str]) -> bool:
        return any(
            slot.name in names and self._engine.usage.is_noted(unit, place)
            for unit in self._engine.units
            for place, slot in enumerate(unit.spec.training)
        )

    def restart(self) -> None:
        """Start counting again: gradients were discarded, or the strategy changed."""
        self._passes = 0
        self._pending = False
        self._announce()

    def _announce(self) -> None:
        if self._is_gated or self._is_told:
            return
        levels = self._engine.levels
        # FSDP2 keeps whole gradients of sharded parameters itself and reduces them only during a backward pass.
        must_be_last = levels.gradient == Level.N and levels.parameter != Level.N
        # Those without a dimension show their gradients at once, which must be the mean of all ranks.
        must_be_last |= any(single.requires_grad for single in self._engine.gradients.singles.parameters)
        self._announced = must_be_last or self._expected is None or self._passes + 1 >= self._expected
        self._engine.gradients.set_synchronizes(enabled=self._announced)

    def finish(self) -> None:
        """Reduce the gradients of passes that were mistaken for inner ones, if there are any."""
        if self._is_gated or not self._pending:
            return
        self._engine.gradients.finish_accumulation()
        self._pending = False
        if not self._has_warned and dist.get_rank() == 0:
            self._has_warned = True
            tell(
                f"a step came after fewer than the usual {self._expected} backward passes; its "
                "gradients were reduced when they were clipped or the optimizer stepped"
            )

    @property
    def is_local(self) -> bool:
        """Tell whether the script itself has kept gradients of its last pass from being reduced."""
        is_forward_local = self._passes > 0 and not self._engine.gradients.has_synchronized_forward
        return self._is_gated and (self._pending or is_forward_local)

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether an optimizer is one of the sharded model's."""
        return any(optimizer is own for own in self._optimizers)

    def after_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Learn from a step; tell whether it was the last one of the sharded model's optimizers."""
        if not self.is_of(optimizer):
            return False
        if self._passes:
            self._expected = self._passes
        self.restart()
        return optimizer is self._optimizers[-1]
