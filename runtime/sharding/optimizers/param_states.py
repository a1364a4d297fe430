"""The optimizer's states by parameter, as a script looks them up."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Self

import torch
from torch.distributed.tensor import DTensor

from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.parameters.whole import allow_mixing, current, forbid_mixing
from paro_advise.runtime.sharding.parameters.windows import like
from paro_advise.runtime.torch_types import StateDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from paro_advise.runtime.torch_types import Result

_SHARD = "_paro_shard"


def lead_to_shard(parameter: nn.Parameter, shard: nn.Parameter) -> None:
    """Let states of a model's parameter be found by it, although the optimizer holds its own rows of it."""
    parameter.__dict__[_SHARD] = weakref.ref(shard)


class ParamStates(defaultdict[torch.Tensor, StateDict]):
    """States by the optimizer's parameters; those of the model lead to them, as do those of before.

    The tensors mix with plain ones of their whole shape, but in a step, whose functions are dearer then.
    """

    def __init__(self, states: Mapping[torch.Tensor, StateDict] | None = None) -> None:
        super().__init__(dict, states or {})
        self._is_stepping = False
        self._shown: dict[torch.Tensor, StateDict] = {}
        self._lent: list[StateDict] = []  # shown before the step that is under way

    def set_stepping(self, *, enabled: bool) -> None:
        """Say that a step begins or has ended."""
        self._is_stepping = enabled
        for state in () if enabled else self._lent:
            _let_mix(state)  # the script may have kept it
        if enabled:
            for shard, state in self._shown.items():
                if super().get(shard) is state:  # else it is that of another parameter by now
                    _take_back(shard, state)
            self._lent = list(self._shown.values())
            self._shown.clear()

    def _key(self, key: torch.Tensor) -> torch.Tensor:
        if self._is_stepping or super().__contains__(key):
            return key
        key = current(key)
        reference = getattr(key, _SHARD, None)  # some optimizers keep more under a name
        shard = reference() if reference is not None else None
        return key if shard is None else shard

    def _show(self, key: torch.Tensor, state: Result) -> Result:
        if not self._is_stepping and isinstance(state, dict) and isinstance(key, torch.Tensor):
            self._shown[key] = state
            _let_mix(state)
        return state

    def __getitem__(self, key: torch.Tensor) -> StateDict:
        """Return the state of a parameter."""
        key = self._key(key)
        state = super().__getitem__(key)
        self._show(key, state)
        return state

    def __setitem__(self, key: torch.Tensor, value: StateDict) -> None:
        """Replace the state of a parameter."""
        key = self._key(key)
        super().__setitem__(key, value)
        self._show(key, value)

    def __delitem__(self, key: torch.Tensor) -> None:
        """Forget the state of a parameter."""
        key = self._key(key)
        self._shown.pop(key, None)
        super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        """Tell whether a parameter has a state."""
        return super().__contains__(self._key(key) if isinstance(key, torch.Tensor) else key)

    def get(self, key: torch.Tensor, default: Result = None) -> Result:
        """Return the state of a parameter, or something else where it has none."""
        key = self._key(key)
        return self._show(key, super().get(key, default))

    def pop(self, key: torch.Tensor, *default: Result) -> Result:
        """Forget and return the state of a parameter."""
        key = self._key(key)
        self._shown.pop(key, None)
        return super().pop(key, *default)

    def clear(self) -> None:
        """Forget all states."""
        self._shown.clear()
        super().clear()

    def update(self, *args: Result) -> None:
        """Take states of several parameters."""
        given: dict[torch.Tensor, StateDict] = dict(*args)
        for key, value in given.items():
            self[key] = value

    def __ior__(self, other: Result) -> Self:  # type: ignore[override,misc]  # torch's stubs know dicts of one kind
        """Take states of several parameters."""
        self.update(other)
        return self

    def __reduce__(self) -> Result:
        """Return what a plain dictionary of states is copied and saved as."""
        return defaultdict, (dict, dict(super().items()))

    def copy(self) -> Result:
        """Return a plain dictionary of the same states."""
        return defaultdict(dict, super().items())

    __copy__ = copy

    def setdefault(self, key: torch.Tensor, default: Result = None) -> Result:
        """Return the state of a parameter, after giving it one where it has none."""
        key = self._key(key)
        return self._show(key, super().setdefault(key, default))

    def items(self) -> Result:  # torch's stubs name a class of dict's own
        """Return the optimizer's parameters and their states."""
        for key, state in super().items():
            self._show(key, state)
        return super().items()

    def values(self) -> Result:
        """Return the states."""
        self.items()
        return super().values()


def _let_mix(state: StateDict) -> None:
    for value in state.values():
        if isinstance(value, torch.Tensor):
            allow_mixing(value)


def _take_back(shard: torch.Tensor, state: StateDict) -> None:
    """Let a state be what a step needs: DTensors of the parameter's layout, which mix with no plain tensors."""
    lay_out(shard, state)
    for value in state.values():
        if isinstance(value, torch.Tensor):
            forbid_mixing(value)


def lay_out(shard: torch.Tensor, state: StateDict) -> StateDict:
    """Give tensors that a script has put into a state the layout of their parameter; return the state.

    All ranks call it at once. Whoever reads states between steps must see no whole tensor among rows.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape:
            state[name] = _laid_out_as(shard, value)
    return state


def _laid_out_as(shard: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return a value that a script has put into a state, whole or laid out in another way, as a step needs it."""
    if isinstance(value, DTensor) and isinstance(shard, DTensor) and not _are_alike(value, shard):
        value = WholeReads.whole(value)
    return like(value, shard)


def _are_alike(value: DTensor, shard: DTensor) -> bool:
    return (value.device_mesh, value.placements) == (shard.device_mesh, shard.placements)
