"""Parameters that only an optimizer holds: this rank's rows, or whole ones of another type or place than the model's.

For a script each is the model's parameter: what is set, frozen, hooked or read on one counts for the other.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Self

from torch.distributed.tensor import DTensor

from paro_advise.runtime.sharding.parameters.owned import (
    Gathered,
    Owned,
    OwnedTensor,
    as_plain_tensor,
    gradient_of,
    has_keeper,
    is_of_script,
    keeper_of,
    let_lists_hold,
    resting_of,
    set_gradient,
)
from paro_advise.runtime.sharding.parameters.whole import WholeTensor

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.torch_types import AnyFunction

_PLACE = "_paro_place"  # of the model's parameter that one of the optimizer stands for


class _OfOptimizer(Owned):
    """A parameter that only the optimizer holds: whether it trains is asked of the model's and said to it."""

    @property
    def requires_grad(self) -> bool:
        """Tell whether the model's parameter wants a gradient."""
        found: bool = self._of_model().requires_grad
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Freeze the model's parameter, or let it loose, as scripts do that train the parts of groups in turn."""
        self._of_model().requires_grad = value

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient as the model's parameter shows it, of which scripts take both to be one."""
        found = gradient_of(self)
        resting = self.of_model()
        keeper = keeper_of(resting)
        if found is not None or keeper is None:
            return found
        keeper.before_read()
        found = gradient_of(self)
        if found is None:
            found = gradient_of(resting)
        if found is None:
            keeper.refuse_hidden(resting)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None also drops what micro-batches have added up elsewhere.

        Raises:
            UsageError: one waits at the model's parameter that cannot be replaced before it is reduced.
        """
        resting = self.of_model()
        keeper = keeper_of(resting)
        if keeper is not None and value is None:
            keeper.drop(resting)
            set_gradient(resting, None)
        elif keeper is not None and (keeper.keeps(resting) or gradient_of(resting) is not None):
            resting.grad = value  # from where it comes here before the step
            if isinstance(value, DTensor) != isinstance(self, DTensor):
                value = None
        set_gradient(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:  # noqa: FBT001, FBT002 - as torch's own
        """Do the same and return the parameter."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: AnyFunction) -> RemovableHandle:
        """Hook the gradient of the model's parameter.

        Raises:
            UsageError: that one is sharded.
        """
        handle: RemovableHandle = self._of_model().register_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def __getattr__(self, name: str) -> object:
        """Return what a script has set on the model's parameter, as a factor on its learning rate."""
        if is_of_script(name) and _PLACE in self.__dict__:
            of_model = self._of_model()
            if name in of_model.__dict__ or isinstance(of_model, Gathered):
                return getattr(of_model, name)
        raise AttributeError(f"a parameter has no attribute {name!r}", name=name, obj=self)

    def of_model(self) -> torch.Tensor:
        """Return the parameter at rest that this one stands for."""
        return resting_of(self._of_model())

    def _of_model(self) -> torch.Tensor:
        known: tuple[weakref.ref[nn.Module], str] | None = self.__dict__.get(_PLACE)
        module = known[0]() if known is not None else None
        found = module._parameters.get(known[1]) if known is not None and module is not None else None  # noqa: SLF001 - without a module's own look-up
        return as_plain_tensor(self) if found is None else found


class OwnedShard(_OfOptimizer, WholeTensor):
    """This rank's rows of a parameter of the optimizer."""


class _SteppingShard(_OfOptimizer, DTensor):
    """The same in a step of the optimizer, which mixes them with no plain tensors."""

    @property
    def grad(self) -> torch.Tensor | None:
        """Return what the step has been given."""
        return gradient_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        set_gradient(self, value)


class _OwnedWholeOfOptimizer(_OfOptimizer, OwnedTensor):
    """A parameter of the optimizer that every rank holds whole."""


def owned_by_optimizer(parameter: nn.Parameter, module: nn.Module, attribute: str) -> nn.Parameter:
    """Make a parameter ours, in place, that an optimizer holds in place of one of the model.

    Args:
        parameter: of the optimizer.
        module, attribute: where the model's stands.
    """
    is_sharded = isinstance(parameter, DTensor)
    parameter.__class__ = OwnedShard if is_sharded else _OwnedWholeOfOptimizer  # type: ignore[assignment]
    parameter.__dict__[_PLACE] = (weakref.ref(module), attribute)
    return parameter


def is_of_optimizer(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is one that only an optimizer under a strategy holds."""
    return isinstance(parameter, Owned) and not has_keeper(parameter)


def set_stepping(parameter: torch.Tensor, *, enabled: bool) -> None:
    """Say that a step of the optimizer begins or has ended, for a parameter of its own."""
    if isinstance(parameter, (OwnedShard, _SteppingShard)):
        parameter.__class__ = _SteppingShard if enabled else OwnedShard


let_lists_hold(OwnedShard, _SteppingShard, _OwnedWholeOfOptimizer)
