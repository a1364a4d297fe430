"""What a forward pass returns of its parameters themselves: a scale, rows of an embedding, a head's weight.

A replicated parameter's memory stays. That of a gathered one is freed after the pass, or after backward, while the
script goes on with what it was given: it would read memory that is gone. So it gets copies, which autograd follows to
the parameters, and which are refused once the parameters have changed.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.torch_types import AnyFunction, Arguments, Result


class _Given(NamedTuple):
    """A copy that a script has got, and its version then."""

    copy: weakref.ref[torch.Tensor]
    version: int


class ReturnedViews:
    """The copies that scripts hold of one model's parameters."""

    def __init__(self) -> None:
        self._given: list[_Given] = []

    def hook_of(self, unit: UnitState) -> Callable[[nn.Module, object, object], object]:
        """Return a forward hook of a unit whose parameters are gathered for the pass."""

        def replace_views(_: nn.Module, __: object, output: object) -> object:
            replaced = _replaced(output, lambda tensor: self._copy_of(unit, tensor))
            return None if replaced is output else replaced

        return replace_views

    def check(self) -> None:
        """Look at the copies before parameters change.

        Raises:
            UsageError: a script has changed one, which plain DDP would take for a change of the parameter.
        """
        for known, version in self._given:
            given = known()
            if given is not None and not given.is_inference() and given._version != version:  # noqa: SLF001 - has no public name
                raise UsageError(
                    "what forward returns of a sharded parameter must not be changed in place, got a change, which the "
                    "parameter would not see",
                    hint="change the parameter itself, or choose a strategy that replicates parameters (N..)",
                )

    def retire(self) -> None:
        """Refuse reads of all copies from now on: in plain PyTorch they would follow the parameters."""
        for known, _ in self._given:
            given = known()
            if given is not None:
                given.__class__ = _RetiredView
        self._given = []

    def _copy_of(self, unit: UnitState, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of what lies in the memory of one of the unit's gathered parameters, others as they are."""
        # What an operation has made for itself lies nowhere else.
        if not (tensor.is_leaf or tensor._is_view() or tensor.is_inference()):  # noqa: SLF001 - has no public name
            return tensor
        if isinstance(tensor, DTensor) or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        place = tensor.untyped_storage().data_ptr()
        if all(place != _storage_of(slot.parameter) for slot in unit.spec.slots):
            return tensor
        given = tensor.clone() if torch.is_grad_enabled() else tensor.detach().clone()
        self._given = [known for known in self._given if known.copy() is not None]
        self._given.append(_Given(weakref.ref(given), 0 if given.is_inference() else given._version))  # noqa: SLF001
        return given


def _storage_of(parameter: torch.Tensor) -> int | None:
    if isinstance(parameter, DTensor):  # at rest
        return None
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documentation names it so
        return parameter.untyped_storage().data_ptr()


def _replaced(output: Result, made: Callable[[torch.Tensor], torch.Tensor]) -> Result:
    """Return an output with its tensors replaced, the same object where none is another one."""
    if isinstance(output, torch.Tensor):
        return made(output)
    leaves, structure = tree_flatten(output)
    if len(leaves) == 1 and leaves[0] is output:
        is_value = dataclasses.is_dataclass(output) and not isinstance(output, type)
        return _with_fields_replaced(output, made) if is_value else output
    found = [_replaced(leaf, made) for leaf in leaves]
    return (
        output if all(new is old for new, old in zip(found, leaves, strict=True)) else tree_unflatten(found, structure)
    )


def _with_fields_replaced(output: Result, made: Callable[[torch.Tensor], torch.Tensor]) -> Result:
    before = {field.name: getattr(output, field.name, None) for field in dataclasses.fields(output)}
    after = {name: _replaced(value, made) for name, value in before.items()}
    if all(after[name] is value for name, value in before.items()):
        return output
    changed = copy.copy(output)
    for name, value in after.items():
        object.__setattr__(changed, name, value)  # it may be frozen
    return changed


class _RetiredView(torch.Tensor):
    """A copy of values that a parameter no longer has."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: object = None
    ) -> NoReturn:
        """Refuse to be read.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "what forward returned of a sharded parameter must be read before the next step, got a read after it, when "
            "it would have changed with the parameter",
            hint="read the parameter itself, or keep a clone",
        )
