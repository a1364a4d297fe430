"""The user's optimizer, made to work on this rank's part of the optimizer states.

The object stays the same, so that schedulers made before still hold it; its parameters become
DTensors over the rows that this rank updates, its class a subclass that knows about our gradients
and checkpoints.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import increment_version

from paro_advise.errors import UsageError
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.mixins import derived
from paro_advise.runtime.sharding.optimizers.methods import GRADIENTS, PLAIN_STEP, members_for, take_over_base_methods
from paro_advise.runtime.sharding.optimizers.param_states import ParamStates, lay_out
from paro_advise.runtime.sharding.optimizers.parameters import set_stepping
from paro_advise.runtime.sharding.optimizers.plain_steps import PlainStep
from paro_advise.runtime.sharding.parameters.draws import let_steps_draw_whole
from paro_advise.runtime.sharding.parameters.owned import gradient_of, set_gradient
from paro_advise.runtime.sharding.parameters.whole import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paro_advise.runtime.sharding.optimizers.methods import Gradients
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import Arguments, Keywords, ParamGroup, StateDict


def called_within(
    closure: Callable[[], object], before: Callable[[], object], after: Callable[[], object], *, is_under_way: bool
) -> Callable[[], object]:
    """Return what stands for a closure in a step, whenever and as often as the optimizer calls it.

    Args:
        closure: the script's.
        before: called ahead of it where the optimizer may have changed something.
        after: called once it has made gradients.
        is_under_way: the optimizer may have changed something before the first call.
    """

    def call() -> object:
        nonlocal is_under_way
        if is_under_way:
            before()
        found = closure()
        after()
        is_under_way = True
        return found

    return call


def closure_of(args: Arguments, kwargs: Keywords) -> Callable[[], object] | None:
    """Return the closure among the arguments of a step, the optimizer itself among them; None without one."""
    found: Callable[[], object] | None = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
    return found


def with_closure(closure: Callable[[], object], args: Arguments, kwargs: Keywords) -> tuple[Arguments, Keywords]:
    """Return the arguments of a step with another closure in the place of theirs."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


@uncompiled
def _before_step(
    gradients: Gradients, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Keywords
) -> tuple[Arguments, Keywords] | None:
    """Bring gradients to an optimizer: those that wait for the step, and those that its closure makes."""
    closure = closure_of(args, kwargs)
    are_waiting = closure is None or gradients.are_waiting()
    begin = partial(_begin, gradients, optimizer)
    if are_waiting:
        begin()
    if closure is None:
        return None
    stand_in = called_within(closure, gradients.pause_step, begin, is_under_way=are_waiting)
    return with_closure(stand_in, args, kwargs)


def _begin(gradients: Gradients, optimizer: torch.optim.Optimizer) -> None:
    gradients.before_step()
    states = optimizer.state
    assert isinstance(states, ParamStates)
    optimizer.__dict__[PLAIN_STEP] = PlainStep(optimizer, states)


@uncompiled
def _end_plain(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Bring what a step has made to the optimizer, if it was one over plain tensors."""
    step: PlainStep | None = optimizer.__dict__.pop(PLAIN_STEP, None)
    if step is not None:
        step.end()


@uncompiled
def _after_step(gradients: Gradients, *_: object) -> None:
    gradients.after_step()


def _leave_uncompiled(optimizer: torch.optim.Optimizer) -> None:
    """Let ``optimizer.step = torch.compile(optimizer.step)`` run as it is: torch cannot trace our tensors."""
    original = getattr(optimizer.__dict__.get("step"), "_torchdynamo_orig_callable", None)
    if original is not None:
        optimizer.__dict__["step"] = original


def _step_alone(optimizer: torch.optim.Optimizer) -> None:
    """Step as the user's class does, without hooks."""
    plain = type(optimizer).__bases__[0]
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
    before, after = dict(hooks[0]), dict(hooks[1])
    for table in hooks:
        table.clear()
    plain.step(optimizer)  # type: ignore[attr-defined]
    hooks[0].update(before)
    hooks[1].update(after)


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers over the parameters of one model, as one: groups one after the other, one state.

    It never steps; each of them does when the script says so.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # What Optimizer.__init__ does beside this would count as a new optimizer of the script.
        self.optimizers = tuple(optimizers)
        self.state = ParamStates()

    @property
    def param_groups(self) -> list[ParamGroup]:  # type: ignore[override]  # an attribute of torch's
        """Return the groups of all."""
        return [group for optimizer in self.optimizers for group in optimizer.__dict__["param_groups"]]

    def join(self) -> None:
        """Let all work on one state from now on; each looks only for its own parameters there."""
        for optimizer in self.optimizers:
            optimizer.state = self.state


class OptimizerShards:
    """The link between the optimizers and the parameters of a model.

    Attributes:
        optimizers: the user's.
        optimizer: the user's, or all of them as one.
        shards: the optimizer's parameter of each slot that it trains, by qualified name.
        ignored: parameters that it holds and no strategy moves, by qualified name.
        group_names, all_names: qualified names in each group, of what it holds now and of all that were in it.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        slots: Mapping[str, Slot],
        ignored: Mapping[str, nn.Parameter],
    ) -> None:
        """Remember which of the optimizers' groups each parameter is in.

        Raises:
            UsageError: the optimizers hold parameters that are not the model's, one twice, or none for some
                that train.
        """
        self.optimizers = tuple(optimizers)
        self.optimizer = optimizer = optimizers[0] if len(optimizers) == 1 else JointOptimizer(optimizers)
        self.shards: dict[str, nn.Parameter] = {}
        self._is_stepping = False
        names = {id(slot.parameter): name for name, slot in slots.items()}
        names |= {id(parameter): name for name, parameter in ignored.items()}
        self.group_names: list[list[str]] = []
        self.all_names: list[list[str]] = []
        for group in optimizer.param_groups:
            unknown = [parameter for parameter in group["params"] if id(parameter) not in names]
            if unknown:
                raise UsageError(
                    f"the optimizer must hold parameters of the model, got one of shape {tuple(unknown[0].shape)} "
                    "that is none",
                    hint="make the optimizer from model.parameters() and shard both together",
                )
            self.all_names.append([names[id(parameter)] for parameter in group["params"]])
            # Of its own parameters a rank may let some train later; one without a dimension stays as it is.
            own = {name for name, item in ignored.items() if item.dim() or item.requires_grad}
            self.group_names.append(
                [name for name in self.all_names[-1] if name in own or (name not in ignored and slots[name].trains)]
            )
        # Scripts walk their groups, where what does not train stays; a step sees only what trains.
        self._frozen = {
            names[id(parameter)]: parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if names[id(parameter)] in slots and not slots[names[id(parameter)]].trains
        }
        self._with_frozen: list[tuple[ParamGroup, list[torch.Tensor], list[torch.Tensor]]] = []
        held = Counter(name for group in self.all_names for name in group)
        twice = [name for name, count in held.items() if count > 1]
        if twice:
            raise UsageError(f"a parameter must be in one group of one optimizer, got {twice[0]} in {held[twice[0]]}")
        missing = sorted(name for name, slot in slots.items() if slot.trains and name not in held)
        if missing:
            raise UsageError(
                f"every parameter that wants a gradient must be in the optimizer, got none for {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="set requires_grad=False for what is not trained",
            )
        self.ignored = {name: parameter for name, parameter in ignored.items() if name in held}
        self._given = {
            names[id(parameter)]: state
            for one in self.optimizers
            for parameter, state in one.state.items()
            if names.get(id(parameter)) in slots
        }

    def attach(self, gradients_for: Callable[[torch.optim.Optimizer], Gradients]) -> None:
        """Make the optimizers ours."""
        take_over_base_methods()
        for optimizer in self.optimizers:
            cls, gradients = type(optimizer), gradients_for(optimizer)
            if GRADIENTS not in optimizer.__dict__:
                _leave_uncompiled(optimizer)
                optimizer.__class__ = derived(cls, (cls,), members_for(cls))
                setattr(optimizer, GRADIENTS, gradients)
                optimizer.register_step_pre_hook(partial(_before_step, gradients))
                optimizer.register_step_post_hook(partial(_after_step, gradients))
                first = optimizer.register_step_post_hook(_end_plain)
                # Hooks of the script see the states, and change them.
                optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]  # noqa: SLF001 - hooks have no public order
            setattr(optimizer, GRADIENTS, gradients)

    def behind(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
        """Return which of the optimizers is one, or is wrapped by one that shows its groups; None for others."""
        groups = [id(group) for group in optimizer.param_groups]
        for one in self.optimizers:
            if groups and id(one.__dict__["param_groups"][0]) in groups:
                return one
        return None

    def groups_of(self, optimizer: torch.optim.Optimizer) -> slice:
        """Return which of all groups are those of one optimizer."""
        first = 0
        for one in self.optimizers:
            count = len(one.__dict__["param_groups"])
            if one is optimizer:
                return slice(first, first + count)
            first += count
        return slice(0, first)

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer holds now, by qualified name."""
        return {**self.shards, **self.ignored}

    def place(self, shards: dict[str, nn.Parameter]) -> None:
        """Give the optimizer new parameters, by name; the states stay with their names."""
        own = {
            name: state
            for one in self.optimizers
            for name, parameter in self.ignored.items()
            if (state := one.state.get(parameter))
        }
        if isinstance(self.optimizer, JointOptimizer):
            self.optimizer.join()
        states = {name: self.optimizer.state.pop(old, None) for name, old in self.shards.items()} | own
        self.optimizer.state.clear()
        self.shards = shards
        held = self.held
        shown = {name: current(parameter) for name, parameter in self._frozen.items()} | held
        self._with_frozen = []
        for group, names, trained in zip(self.optimizer.param_groups, self.all_names, self.group_names, strict=True):
            group["params"] = [shown[name] for name in names]
            if len(trained) < len(names):
                self._with_frozen.append((group, group["params"], [held[name] for name in trained]))
        for name, state in states.items():
            if state is not None:
                self.optimizer.state[held[name]] = state

    def discard_ignored(self, optimizer: torch.optim.Optimizer, *, to_none: bool) -> None:
        """Forget the gradients of one optimizer's parameters that no strategy moves."""
        for name in (name for names in self.group_names[self.groups_of(optimizer)] for name in names):
            gradient = self.ignored[name].grad if name in self.ignored else None
            if gradient is not None and to_none:
                self.ignored[name].grad = None
            elif gradient is not None:
                gradient.detach_().zero_()

    @property
    def given(self) -> dict[str, StateDict]:
        """Return the states that the optimizer had before it was sharded, by name."""
        return self._given

    def take_given(self, name: str, own_rows: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Go on from the state that the optimizer had before.

        Args:
            name: of a parameter.
            own_rows: cuts this rank's part out of a tensor of the parameter's shape.
        """
        state = self._given.pop(name, None)
        if not state:
            return
        shape = self.shards[name].shape
        self.optimizer.state[self.shards[name]] = {
            key: own_rows(value) if isinstance(value, torch.Tensor) and value.shape == shape else value
            for key, value in state.items()
        }

    def tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the state tensors of a parameter that are sharded like it."""
        shard = self.shards[name]
        for key, value in lay_out(shard, self.optimizer.state.get(shard, {})).items():
            if isinstance(value, torch.Tensor) and value.shape == shard.shape:
                yield key, value

    @property
    def is_stepping(self) -> bool:
        """Tell whether a step of the optimizer is under way."""
        return self._is_stepping

    def set_stepping(self, *, enabled: bool) -> None:
        """Let parameters and states mix with plain tensors, or with single values only: a step is quicker so."""
        if enabled or self._is_stepping:
            let_steps_draw_whole(
                enabled=enabled
            )  # another model's step may have ended it, where an exception has left one
        if enabled == self._is_stepping:
            return
        self._is_stepping = enabled
        self._show_frozen(enabled=not enabled)
        for optimizer in () if enabled else self.optimizers:
            _end_plain(optimizer)
        for shard in self.shards.values():
            set_stepping(shard, enabled=enabled)
        for optimizer in self.optimizers:
            states = optimizer.state
            assert isinstance(states, ParamStates)
            states.set_stepping(enabled=enabled)

    def _show_frozen(self, *, enabled: bool) -> None:
        """Let groups hold what does not train, or only what a step may change."""
        for group, whole, trained in self._with_frozen:
            group["params"] = whole if enabled else trained

    def pause_step(self) -> None:
        """Show parameters as between steps, and as changed: operations on lists of DTensors raise no version."""
        self.set_stepping(enabled=False)
        increment_version([*self.shards.values()])

    def map_states(self, name: str, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace the state tensors of a parameter that are sharded like it."""
        changed = {key: change(key, value) for key, value in self.tensors(name)}
        self.optimizer.state[self.shards[name]].update(changed)

    def ensure_state(self) -> None:
        """Let each optimizer that has no states make them, without moving any parameter.

        As torch's own checkpoint helpers do: one step with zero gradients and a learning rate of 0.
        """
        for optimizer in self.optimizers:
            groups, of = optimizer.__dict__["param_groups"], self.groups_of(optimizer)
            shards = [self.held[name] for names in self.group_names[of] for name in names]
            if not any(shard in self.optimizer.state for shard in shards):
                self._show_frozen(enabled=False)
                _make_state(optimizer, groups, shards)
                self._show_frozen(enabled=True)
                for shard in shards:
                    state = self.optimizer.state.get(shard, {})
                    if isinstance(state.get("step"), torch.Tensor):
                        state["step"].zero_()


def _make_state(optimizer: torch.optim.Optimizer, groups: list[ParamGroup], shards: Sequence[torch.Tensor]) -> None:
    rates = [group["lr"] for group in groups]
    gradients = [gradient_of(shard) for shard in shards]
    for shard in shards:
        set_gradient(shard, torch.zeros_like(shard))
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    _step_alone(optimizer)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for shard, gradient in zip(shards, gradients, strict=True):
        set_gradient(shard, gradient)
