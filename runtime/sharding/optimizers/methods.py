"""What the classes of users' optimizers, and torch's own, do for the optimizer of a sharded model."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.base_methods import is_ours, stand_beneath
from paro_advise.runtime.sharding.optimizers.param_states import ParamStates

if TYPE_CHECKING:
    from collections import defaultdict
    from collections.abc import Callable

    from paro_advise.runtime.sharding.optimizers.plain_steps import PlainStep
    from paro_advise.runtime.torch_types import ParamGroup, StateDict


class Gradients(Protocol):
    """What an optimizer needs from the sharded model."""

    @property
    def keeps_shards(self) -> bool:
        """Tell whether state dicts hold this rank's shards, as the framework's do."""

    def are_waiting(self) -> bool:
        """Tell whether there are gradients that no step has used yet."""

    def before_step(self) -> None:
        """Bring the gradients to the optimizer's parameters."""

    def after_step(self) -> None:
        """Bring the updated parameters to the model."""

    def pause_step(self) -> None:
        """Let the model see what a step has changed so far, until ``before_step`` goes on with it."""

    def before_groups(self) -> None:
        """Bring what was changed by hand on the model's side to the optimizer's."""

    def discard_gradients(self, *, to_none: bool) -> None:
        """Forget all gradients; leave none or zeros."""

    def optimizer_state_dict(self) -> StateDict:
        """Return the state by qualified names."""

    def load_optimizer_state_dict(self, state: StateDict) -> None:
        """Take a state by qualified names."""


# Names of attributes of optimizers.
GRADIENTS, PLAIN_STEP, _WAS_ASKED = "_paro_gradients", "_paro_plain_step", "_paro_was_asked"


def gradients_for(optimizer: torch.optim.Optimizer) -> Gradients | None:
    """Return what brings gradients to an optimizer of a sharded model, None for others."""
    found: Gradients | None = optimizer.__dict__.get(GRADIENTS)
    return found


def _gradients_of(optimizer: torch.optim.Optimizer) -> Gradients:
    found = gradients_for(optimizer)
    assert found is not None
    return found


class ShardedOptimizer:
    """What the class of a user's optimizer gets; no base of it, which classes that begin with ABC would not take."""

    _paro_gradients: Gradients

    @property
    def param_groups(self) -> list[ParamGroup]:
        """Return the groups, whose parameters have what a script has changed on the model's side."""
        step: PlainStep | None = self.__dict__.get(PLAIN_STEP)
        if step is not None and step.is_asking() and (plain := step.groups) is not None:
            return plain
        self._paro_gradients.before_groups()
        groups: list[ParamGroup] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def state(self) -> defaultdict[torch.Tensor, StateDict]:
        """Return the states, by parameters of the optimizer or of the model."""
        step: PlainStep | None = self.__dict__.get(PLAIN_STEP)
        if step is not None and step.is_asking() and (plain := step.state) is not None:
            return plain
        states = self.__dict__["state"]
        if not isinstance(states, ParamStates):
            states = self.__dict__["state"] = ParamStates(states)
        return states

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        self.__dict__["state"] = states if isinstance(states, ParamStates) else ParamStates(states)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: a copy would step parameters that the model does not see.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "an optimizer under a strategy works on the parts of its model that this rank holds, got a copy of it",
            hint="keep or save optimizer.state_dict()",
        )


class _BaseMethods:
    """What torch's own methods do for an optimizer of a sharded model; overrides of the script's run, and call them."""

    @staticmethod
    def zero_grad(
        _: object,
        optimizer: torch.optim.Optimizer,
        set_to_none: bool = True,  # noqa: FBT001, FBT002 - as torch's
    ) -> None:
        """Forget all gradients."""
        _gradients_of(optimizer).discard_gradients(to_none=set_to_none)

    @staticmethod
    def state_dict(_: object, optimizer: torch.optim.Optimizer) -> StateDict:
        """Return the state by qualified names, as the script's hooks change it."""
        for before in optimizer._optimizer_state_dict_pre_hooks.values():  # noqa: SLF001 - hooks have no public names
            before(optimizer)
        found = _gradients_of(optimizer).optimizer_state_dict()
        for after in optimizer._optimizer_state_dict_post_hooks.values():  # noqa: SLF001
            changed = after(optimizer, found)
            found = found if changed is None else changed
        optimizer.__dict__[_WAS_ASKED] = True
        return found

    @staticmethod
    def load_state_dict(_: object, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
        """Take what ``state_dict`` returned, of the same strategy, as the script's hooks change it."""
        given = state_dict.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():  # noqa: SLF001
            changed = before(optimizer, given)
            given = given if changed is None else changed
        _gradients_of(optimizer).load_optimizer_state_dict(given)
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():  # noqa: SLF001
            after(optimizer)

    @staticmethod
    def add_param_group(_: object, __: torch.optim.Optimizer, ___: ParamGroup) -> None:
        """Refuse: the shards are laid out already."""
        raise UsageError(
            "an optimizer under a strategy must hold all that trains from the first pass on, got another group",
            hint="call add_param_group before training; where layers are unfrozen one by one, save and resume in a new "
            "job with more of them, or train without a plan",
        )


_TAKEN_OVER = ("zero_grad", "state_dict", "load_state_dict", "add_param_group")


def take_over_base_methods() -> None:
    """Put them in the place of torch's own, once in a process."""
    own = {name: getattr(_BaseMethods, name) for name in _TAKEN_OVER}
    stand_beneath(torch.optim.Optimizer, own, applies=lambda optimizer: gradients_for(optimizer) is not None)


def _told_whole(script: Callable[..., object]) -> Callable[..., object]:
    """Return a script's own ``state_dict``, which must not hold parts of states where torch's would hold whole ones.

    It raises UsageError where it does, since it has not asked torch's.
    """

    @functools.wraps(script)
    def state_dict(self: torch.optim.Optimizer, *args: object, **kwargs: object) -> object:
        self.__dict__[_WAS_ASKED] = False
        found = script(self, *args, **kwargs)
        if self.__dict__[_WAS_ASKED] or _gradients_of(self).keeps_shards:
            return found
        if _holds_parts(found):
            raise UsageError(
                f"the state of an optimizer under a strategy is whole in super().state_dict() alone, got parts of it "
                f"from {type(self).__name__}.state_dict()",
                hint="add to what super().state_dict() returns, or train without a plan",
            )
        return found

    return state_dict


def _holds_parts(value: object) -> bool:
    match value:
        case DTensor():
            return True
        case Mapping():
            return any(map(_holds_parts, value.values()))
        case list() | tuple() | set():
            return any(map(_holds_parts, value))
    return False


def members_for(cls: type) -> dict[str, object]:
    """Return what a class that is derived from that of a user's optimizer gets."""
    own = {name: member for name, member in vars(ShardedOptimizer).items() if callable(member) or _is_property(member)}
    told: Callable[..., object] = cls.state_dict  # type: ignore[attr-defined]  # optimizers have it
    return own if is_ours(told) else {**own, "state_dict": _told_whole(told)}


def _is_property(member: object) -> bool:
    return isinstance(member, property)
