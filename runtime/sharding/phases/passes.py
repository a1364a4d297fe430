"""Which passes of a model all ranks make together, and which one rank may make alone.

Where a script's framework lets every rank hold the whole model (DDP), rank 0 may evaluate by itself. All ranks meet
where a training pass begins by the script's wrapper. A pass of the wrapped module by itself may be one rank's own, also
one that makes gradients, as of a script that forgets ``no_grad``: others need to be asked to each of its gathers, and
to a backward pass of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import is_in_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn


class RankPasses:
    """The passes of one model.

    Attributes:
        is_training: a forward pass that makes gradients is under way.
        exchange_nothing: tells whether passes stay on their rank now, so that each may make as many as it likes.
        before_own_backward: called before a backward pass that may be this rank's alone; None where ranks make all
            passes together.
        before_backward: called once where backward begins, through sharded units, of passes before which ranks met.
    """

    def __init__(self, model: nn.Module) -> None:
        self.is_training = False
        self.before_own_backward: Callable[[], None] | None = None
        self.before_backward: Callable[[], None] = lambda: None
        self.exchange_nothing: Callable[[], bool] = lambda: False
        self._units = fsdp2.PassedUnits(model)
        self._is_met = False
        self._num_met = 0  # since the last backward pass
        self._has_asked = False
        self._awaits_backward = False

    def meet(self) -> None:
        """Say that the next pass begins by the script's wrapper, where all ranks meet."""
        self._is_met = self._awaits_backward = True
        self._num_met += 1

    @property
    def may_be_alone(self) -> bool:
        """Tell whether the forward pass under way may be this rank's alone, whether it makes gradients or not."""
        return self.before_own_backward is not None and not self._is_met

    @property
    def ends_alone(self) -> bool:
        """Tell whether what this forward pass has gathered is freed behind it; one that backward repeats is needed."""
        return self.may_be_alone and not is_in_backward()

    @property
    def is_of_all(self) -> bool:
        """Tell whether all ranks train now, and gather in one order."""
        return is_in_backward() or (self.is_training and not self.may_be_alone)

    def begin(self) -> None:
        """Say that the model's forward begins."""
        self.is_training = torch.is_grad_enabled()

    def begin_unit(self) -> None:
        """Say that a unit's forward begins: backward of all ranks gathers ahead in the order of those that all make."""
        if not is_in_backward():
            trains = torch.is_grad_enabled() or self.is_training
            self._units.begin(evaluates=not trains or self.may_be_alone)

    def end(self, outputs: Iterable[torch.Tensor]) -> None:
        """Say that the model's forward ends with these outputs; others are asked before backward meets them."""
        for output in outputs if self.may_be_alone else ():
            output.register_hook(lambda _: self.ask())  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def leave(self) -> None:
        """Say that the model's forward is over, also by an exception."""
        self.is_training = self._is_met = False

    def begin_backward(self) -> None:
        """Say that backward begins, as often as a sharded unit tells: rank 0 may have looked since forward."""
        if self._awaits_backward:
            self._awaits_backward = False
            self.before_backward()
            self._units.begin(evaluates=False)

    def end_backward(self) -> None:
        """Say that a backward pass has ended."""
        self._num_met, self._has_asked = 0, False

    def ask(self) -> None:
        """Ask the others once in a backward pass that may be this rank's alone.

        Where all make it, none of them gathers ahead: what they have evaluated before is not alike.
        """
        if self.before_own_backward is None or self._num_met or self._has_asked:
            return
        if not self.exchange_nothing():
            self._has_asked = True
            self.before_own_backward()
            self._units.forget()
