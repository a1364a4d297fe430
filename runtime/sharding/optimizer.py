"""The user's optimizer, made to work on this rank's part of the optimizer states.

The object stays the same, so that schedulers made before still hold it; its parameters become
DTensors over the rows that this rank updates, its class a subclass that knows about our gradients
and checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from paro_advise.runtime.sharding.parameters.units import Slot


class Gradients(Protocol):
    """What an optimizer needs from the sharded model."""

    def before_step(self) -> None:
        """Bring the gradients to the optimizer's parameters."""

    def after_step(self) -> None:
        """Bring the updated parameters to the model."""

    def discard_gradients(self) -> None:
        """Forget all gradients."""

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return the state by qualified names."""

    def load_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state by qualified names."""


_GRADIENTS = "_paro_gradients"


class ShardedOptimizer:
    """Mixed into the class of a user's optimizer."""

    _paro_gradients: Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self._paro_gradients.discard_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Return the state by qualified names, with this rank's shards as DTensors."""
        return self._paro_gradients.optimizer_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned, of the same strategy."""
        self._paro_gradients.load_optimizer_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the shards are laid out already."""
        raise UsageError(
            "parameters must be in the optimizer before it is sharded, got another group",
            hint="call add_param_group before shard",
        )


class OptimizerShards:
    """The link between an optimizer and the parameters of a model.

    Attributes:
        optimizer: the user's.
        shards: the optimizer's parameter of each slot that it trains, by qualified name.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: Mapping[str, Slot]) -> None:
        """Remember which of the optimizer's groups each parameter is in.

        Raises:
            UsageError: the optimizer holds parameters that are not the model's, or none for some
                that train, or a state already.
        """
        self.optimizer = optimizer
        self.shards: dict[str, nn.Parameter] = {}
        names = {id(slot.parameter): name for name, slot in slots.items()}
        self.group_names: list[list[str]] = []
        for group in optimizer.param_groups:
            unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
            if unknown:
                raise UsageError(
                    f"the optimizer must hold parameters of the model, got one of shape {tuple(unknown[0].shape)} "
                    "that is none",
                    hint="make the optimizer from model.parameters() and shard both together",
                )
            trained = [parameter for parameter in group["params"] if slots[names[id(parameter)]].trains]
            self.group_names.append([names[id(parameter)] for parameter in trained])
        held = {name for group in self.group_names for name in group}
        missing = sorted(name for name, slot in slots.items() if slot.trains and name not in held)
        if missing:
            raise UsageError(
                f"every parameter that wants a gradient must be in the optimizer, got none for {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="set requires_grad=False for what is not trained",
            )
        if optimizer.state:
            raise UsageError(
                "an optimizer must be new when it is sharded, got one with a state",
                hint="shard first, then load the checkpoint",
            )

    def attach(self, gradients: Gradients) -> None:
        """Make the optimizer ours."""
        cls, optimizer = type(self.optimizer), self.optimizer
        if not isinstance(optimizer, ShardedOptimizer):
            optimizer.__class__ = type(f"Sharded{cls.__name__}", (ShardedOptimizer, cls), {})
            optimizer.register_step_pre_hook(lambda *_: gradients.before_step())
            optimizer.register_step_post_hook(lambda *_: gradients.after_step())
        setattr(optimizer, _GRADIENTS, gradients)

    def place(self, shards: dict[str, nn.Parameter]) -> None:
        """Give the optimizer new parameters, by name; the states stay with their names."""
        states = {name: self.optimizer.state.pop(old, None) for name, old in self.shards.items()}
        self.shards = shards
        for group, names in zip(self.optimizer.param_groups, self.group_names, strict=True):
            group["params"] = [shards[name] for name in names]
        for name, state in states.items():
            if state is not None:
                self.optimizer.state[shards[name]] = state

    def tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the state tensors of a parameter that are sharded like it."""
        shard = self.shards[name]
        for key, value in self.optimizer.state.get(shard, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == shard.shape:
                yield key, value

    def map_states(self, name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace the state tensors of a parameter that are sharded like it."""
        changed = {key: change(key, value) for key, value in self.tensors(name)}
        self.optimizer.state[self.shards[name]].update(changed)

    def ensure_state(self) -> None:
        """Let the optimizer make its states without moving any parameter.

        As torch's own checkpoint helpers do: one step with zero gradients and a learning rate of 0.
        """
        if self.optimizer.state:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for shard in self.shards.values():
            shard.grad = torch.zeros_like(shard)
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
        plain = type(self.optimizer).__mro__[2]
        hooks = self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks  # noqa: SLF001
        before, after = dict(hooks[0]), dict(hooks[1])
        for table in hooks:
            table.clear()
        plain.step(self.optimizer)  # type: ignore[attr-defined]
        hooks[0].update(before)
        hooks[1].update(after)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for shard in self.shards.values():
            shard.grad = None
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()
