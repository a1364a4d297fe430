"""Steps of torch's own optimizers over plain tensors: each rank's rows, without DTensors around them.

What acts on each element alone makes the same of the rows as of the DTensors over them, bit for bit, and torch's
dispatch of a DTensor costs the host more than the arithmetic of a small parameter (`benchmarks/bench_host.py`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from paro_advise.runtime.sharding.parameters.owned import as_plain_tensor, gradient_of

if TYPE_CHECKING:
    from paro_advise.runtime.sharding.optimizers.param_states import ParamStates
    from paro_advise.runtime.torch_types import ParamGroup, StateDict

# Their arithmetic meets no two elements of a parameter, and no two parameters.
_ELEMENT_BY_ELEMENT = frozenset(
    (
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    )
)
_OF_STEPS = frozenset(cls.__module__ for cls in _ELEMENT_BY_ELEMENT) | {torch.optim.Adam.__module__}
_OF_A_SCALER = ("grad_scale", "found_inf")  # attributes that torch's GradScaler lends to fused optimizers


class PlainStep:
    """A step under way: what torch's own code reads in the place of parameters, gradients and states.

    It is made when that code first asks, behind all that hooks of a script may change before.

    Args:
        optimizer: whose step it is.
        states: its own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, states: ParamStates) -> None:
        self._optimizer = optimizer
        self._states = states
        self._is_made = False
        self._shards: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._given: list[StateDict] = []
        self._state: defaultdict[torch.Tensor, StateDict] = defaultdict(dict)
        self._groups: list[ParamGroup] | None = None

    @property
    def groups(self) -> list[ParamGroup] | None:
        """Return the optimizer's groups with plain tensors as parameters, None where a step must see DTensors."""
        if not self._is_made:
            self._is_made = True
            groups: list[ParamGroup] = self._optimizer.__dict__["param_groups"]
            if _may_be_plain(self._optimizer, groups, self._states):
                self._groups = [{**group, "params": [*map(self._plain, group["params"])]} for group in groups]
        return self._groups

    @property
    def state(self) -> defaultdict[torch.Tensor, StateDict] | None:
        """Return the states by these tensors, None where a step must see DTensors."""
        return None if self.groups is None else self._state

    @staticmethod
    def is_asking(depth: int = 2) -> bool:
        """Tell whether the caller of a property's getter is a step of torch's, and not a script or one of its hooks."""
        return sys._getframe(depth).f_globals.get("__name__") in _OF_STEPS  # noqa: SLF001 - inspect's is slower by far

    def _plain(self, shard: torch.Tensor) -> torch.Tensor:
        gradient = gradient_of(shard)
        if gradient is None:
            return shard
        plain = _rows(shard).detach()
        plain.grad = _rows(gradient)
        given = self._states.get(shard)
        rows = {key: _rows(value) if isinstance(value, DTensor) else value for key, value in (given or {}).items()}
        if rows:
            self._state[plain] = rows
        self._shards.append((shard, plain))
        self._given.append(rows.copy())
        return plain

    def end(self) -> None:
        """Bring what the step has made to the optimizer's parameters and states."""
        for (shard, plain), given in zip(self._shards, self._given, strict=True):
            made = {key: value for key, value in self._state[plain].items() if given.get(key) is not value}
            if made:
                self._states[shard].update({key: _laid_out(shard, plain, value) for key, value in made.items()})
        increment_version([shard for shard, _ in self._shards if isinstance(shard, DTensor)])


def _may_be_plain(optimizer: torch.optim.Optimizer, groups: list[ParamGroup], states: ParamStates) -> bool:
    if type(optimizer).__bases__[0] not in _ELEMENT_BY_ELEMENT:
        return False
    if any(getattr(optimizer, name, None) is not None for name in _OF_A_SCALER):
        return False
    if any(group.get("differentiable") for group in groups):
        return False
    return all(_are_rows_alike(shard, states) for group in groups for shard in group["params"])


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else as_plain_tensor(tensor)  # noqa: SLF001 - to_local() makes a view


def _are_rows_alike(shard: torch.Tensor, states: ParamStates) -> bool:
    """Tell whether rows of a parameter, its gradient and its states stand for the same rows of the whole."""
    gradient = gradient_of(shard)
    if gradient is None:
        return True
    held = [value for value in (states.get(shard) or {}).values() if isinstance(value, DTensor)]
    if not isinstance(shard, DTensor):
        return not held and not isinstance(gradient, DTensor) and gradient.dtype == shard.dtype
    if not isinstance(gradient, DTensor) or _rows(gradient).dtype != _rows(shard).dtype:
        return False
    return all(
        value._spec is shard._spec or (value.device_mesh, value.placements) == (shard.device_mesh, shard.placements)  # noqa: SLF001 - told at once for most
        for value in (gradient, *held)
    )


def _laid_out(shard: torch.Tensor, plain: torch.Tensor, value: object) -> object:
    """Return what a step has put into a state, in the layout of its parameter where it has rows of that one."""
    if not isinstance(value, torch.Tensor) or not isinstance(shard, DTensor) or value.shape != plain.shape:
        return value
    return DTensor.from_local(
        value, shard.device_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
