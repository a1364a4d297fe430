"""Refuses gradients of sharded parameters that nobody would take to the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch
from torch.autograd.function import _HookMixin
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.compiler import uncompiled
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import gradient_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.autograd.graph import Node

    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.torch_types import AnyFunction

_RETURN_TENSORS = (
    "return tensors (in tuples, dicts or dataclasses), or choose a strategy that replicates parameters (N..)"
)


def refuse_late(*_: object) -> NoReturn:
    """Refuse a gradient of a parameter that a switch has replaced.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "a backward pass must run under the strategy of its forward pass, got one from before a switch",
        hint="switch between two steps; drop the gradients with optimizer.zero_grad() to go on",
    )


def refuse_nested() -> NoReturn:
    """Refuse a backward pass whose end only reentrant checkpoints show.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "with sharded parameters a backward pass must go through a tensor that the model returned, got one that "
        "reentrant checkpoints end early, after which gradients would be lost",
        hint=f"use torch.utils.checkpoint with use_reentrant=False, {_RETURN_TENSORS}",
    )


def refuse_stray(units: Sequence[UnitState], model: nn.Module, *, synchronizes: bool) -> None:
    """Refuse gradients that did not come through the forward pass of their module, when a backward pass ends.

    Args:
        units: of the model.
        model: whose parameters are sharded.
        synchronizes: the pass was an accumulation boundary.

    Raises:
        UsageError: there is one; it would be lost.
    """
    for unit in units:
        for slot in unit.spec.training:
            if gradient_of(slot.parameter) is not None:
                raise UsageError(
                    f"a sharded parameter must get its gradient from the forward pass of its module, {slot.name} got "
                    "one past it (a penalty on weights, another method, a second backward pass inside one forward "
                    "pass, layers that reentrant checkpoints run twice), which would be lost",
                    hint="compute it inside forward, with use_reentrant=False where it is checkpointed, or choose a "
                    "strategy that replicates parameters (N..)",
                )
    if synchronizes and fsdp2.accumulated_bytes(model) > 0:
        raise UsageError(
            "a backward pass must reach each sharded unit once after all that its parameters are used for, got a "
            "gradient of one that was reduced before (a penalty on gradients and another forward pass in one loss, or "
            "one torch.autocast around several passes, which keeps its casts of parameters)",
            hint="call backward() for each forward pass, and enter autocast for each, or choose a strategy that "
            "replicates parameters (N..)",
        )


def refuse_unseen(units: Sequence[UnitState]) -> None:
    """Refuse to step after a backward pass that went through no tensor which a sharded model returned.

    Raises:
        UsageError: its gradients lie at gathered copies, where nobody takes them; or those from before the parameters
            were sharded wait for a pass.
    """
    for unit in units:
        if unit.left:
            names = ", ".join(unit.spec.training[place].name for place in sorted(unit.left))
            raise UsageError(
                "gradients from before the first training pass must be added to in that pass or dropped, got a step "
                f"with those of parameters that it did not use: {names}",
                hint="call zero_grad() before the first training pass",
            )
        for slot in unit.spec.training:
            if not isinstance(slot.parameter, DTensor) and gradient_of(slot.parameter) is not None:
                raise UsageError(
                    "with sharded parameters a backward pass must go through a tensor that the model returned, got an "
                    f"output that shows none, and a gradient of {slot.name} that would be lost",
                    hint=_RETURN_TENSORS,
                )


def has_node_hooks(parameter: torch.Tensor) -> bool:
    """Tell whether hooks stand on the node of the graph that adds to a parameter's gradient.

    Torch lists them nowhere; a hook that is put beside them shows them for a moment.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():  # noqa: SLF001 - as torch's own subclasses do it
        viewed = parameter.view_as(parameter).grad_fn
    if viewed is None:  # in inference mode
        return False
    node: Node = viewed.next_functions[0][0]  # type: ignore[assignment]  # it has one
    for register in (node.register_hook, node.register_prehook):
        handle = register(_never)
        is_alone = len(handle.hooks_dict_ref() or ()) == 1
        handle.remove()
        if not is_alone:
            return True
    return False


def _never(*_: object) -> None:
    """Stand where a hook would."""


class _CountedHooks:
    """Torch's function that puts a hook on a node, which counts them in this process."""

    def __init__(self, original: AnyFunction) -> None:
        self.original = original
        self.count = 0

    def __call__(self, hooks: object, hook: object) -> object:
        self.count += 1
        return self.original(hooks, hook)


class NodeHooks:
    """Refuses hooks on the nodes that add to the gradients of sharded parameters, which autograd never reaches.

    To look at each node in each step would cost some microseconds for a parameter, so it is done after a hook was
    put on any node only.
    """

    def __init__(self) -> None:
        found: object = _HookMixin._register_hook  # noqa: SLF001 - has no public name
        if not isinstance(found, _CountedHooks):
            found = _CountedHooks(_HookMixin._register_hook)  # noqa: SLF001 - the same
            setattr(_HookMixin, "_register_hook", found)  # noqa: B010 - an instance for a function
        self._counted = found
        self._seen = found.count

    def refuse(self, units: Sequence[UnitState]) -> None:
        """Refuse to step with such hooks.

        Raises:
            UsageError: there are some.
        """
        count = self._counted.count
        if count == self._seen:
            return
        for unit in units:
            for slot in unit.spec.training:
                if slot.parameter.requires_grad and has_node_hooks(slot.parameter):
                    raise UsageError(
                        "a sharded parameter must have no hook on the node that adds to its gradient, which would not "
                        f"be called, got some on {slot.name}'s",
                        hint="change parameter.grad between backward and step, or choose a strategy that replicates "
                        "parameters (N..)",
                    )
        self._seen = self._counted.count = count  # the looks counted themselves


def refuse_second_pass() -> NoReturn:
    """Refuse a second backward pass after one forward pass of DDP's.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "a backward pass that reaches parameters for the second time must have a forward pass of its own: DDP does not "
        "reduce its gradients, which stay on each rank, and replicas drift apart",
        hint="add the losses up and call backward once, or run the model again before the second backward",
    )


def check_output(unit: UnitState) -> Callable[[nn.Module, object, object], None]:
    """Return a hook that makes sure that FSDP2 notices when backward reaches a unit that it has freed."""

    @uncompiled
    def check(module: nn.Module, _: object, output: object) -> None:
        wants = torch.is_grad_enabled() and any(slot.parameter.requires_grad for slot in unit.spec.training)
        if wants and not fsdp2.tensors_with_gradient(output):
            raise UsageError(
                "a unit whose parameters are freed after forward must return a tensor that wants a gradient, alone or "
                f"in a tuple, list, dict or dataclass, got a {type(output).__name__} without one from "
                f"{type(module).__name__.removeprefix('FSDP')}",
                hint="return the loss or the hidden states, run passes that train nothing under torch.no_grad(), "
                "choose other units, or a strategy N..",
            )

    return check
