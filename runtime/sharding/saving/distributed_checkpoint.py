"""The optimizer of a sharded model, as torch.distributed.checkpoint's helpers look at it.

``get_state_dict``, ``get_optimizer_state_dict`` and those that set them take for granted that an optimizer holds
the parameters of the model. Ours holds its own rows of them. So the helpers get a view: the model's parameters in
the optimizer's groups, and the state by their places there. Checked with torch 2.13.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paro_advise.runtime.import_hooks import when_imported
from paro_advise.runtime.sharding.engine import Engine
from paro_advise.runtime.sharding.module import ShardedModule
from paro_advise.runtime.sharding.optimizers.param_states import lay_out
from paro_advise.runtime.sharding.states.whole_states import fsdp2_optimizer_state, part_of

if TYPE_CHECKING:
    from types import ModuleType

    from paro_advise.runtime.torch_types import AnyFunction, StateDict

_MODULE = "torch.distributed.checkpoint.state_dict"
_HELPERS = ("_get_optim_state_dict", "_load_optim_state_dict")


class _View(torch.optim.Optimizer):
    """An optimizer over the model's own parameters, in the order of the user's groups."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        shards, groups = engine.shards, engine.shards.groups_of(optimizer)
        if not engine.gradients.are_waiting:
            shards.ensure_state()
        models = {slot.name: slot.parameter for unit in engine.units for slot in unit.spec.slots} | shards.ignored
        self._engine, self._of, self._names = engine, optimizer, shards.all_names[groups]
        # What Optimizer.__init__ does beside this would count as a new optimizer of the script.
        self.param_groups = [
            {**group, "params": [models[name] for name in names]}
            for group, names in zip(shards.optimizer.param_groups[groups], shards.all_names[groups], strict=True)
        ]
        held, own = shards.optimizer.state, {name for names in shards.group_names[groups] for name in names}
        self.state = defaultdict(
            dict,
            {
                models[name]: lay_out(shard, held[shard])
                for name, shard in shards.held.items()
                if name in own and shard in held
            },
        )

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing: the helpers step optimizers without a state, to let them make one."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take off the gradients that the helpers have made for that step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> StateDict:
        """Return the state by the places of the parameters."""
        reader = self._engine.whole_reader
        found = reader.optimizer_state() if reader else fsdp2_optimizer_state(self._engine)
        return part_of(self._engine, found, self._of)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take a state, by names or places, in the order of the groups.

        The helpers name parameters without what wrappers and compilers put into names, so their order tells whose is
        whose, as for any optimizer.
        """
        ours = [name for names in self._names for name in names]
        given = state_dict["param_groups"]
        saved = [key for group in given for key in group["params"]]
        if len(saved) == len(ours) and set(saved).isdisjoint(range(len(ours))):
            own = dict(zip(saved, ours, strict=True))
            groups = [{**group, "params": [own[key] for key in group["params"]]} for group in given]
            state = {own.get(key, key): value for key, value in state_dict["state"].items()}
            state_dict = {**state_dict, "state": state, "param_groups": groups}
        self._of.load_state_dict(state_dict)


def let_helpers_see_optimizers() -> None:
    """Give torch's helpers a view of sharded optimizers, once they are imported."""
    when_imported(_MODULE, _replace)


def _replace(module: ModuleType) -> None:
    for name in _HELPERS:
        helper = getattr(module, name)
        if not isinstance(helper, _WithViews):
            setattr(module, name, _WithViews(helper))


class _WithViews:
    """One of torch's helpers, called with views of sharded optimizers."""

    def __init__(self, helper: AnyFunction) -> None:
        self._helper = helper
        functools.update_wrapper(self, helper)

    def __call__(
        self, model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], *args: Any, **kwargs: Any
    ) -> Any:
        return self._helper(model, tuple(_view_of(model, optimizer) for optimizer in optimizers), *args, **kwargs)


def _view_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the view of a sharded optimizer of this model; others as they are."""
    for part in model.modules():
        engine = Engine.find(part) if isinstance(part, ShardedModule) else None
        own = engine.shards.behind(optimizer) if engine is not None else None
        if engine is not None and own is not None:
            return _View(engine, own)
    return optimizer
