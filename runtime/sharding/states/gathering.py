"""Makes some parameters of a sharded model whole for a while, as DeepSpeed's ``GatheredParameters`` does."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.sharding.states.summoning import passes_checked, whole_values, without_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.exchange.procedure import UnitState
    from paro_advise.runtime.sharding.parameters.units import Slot


@dataclass(frozen=True, slots=True)
class _Shown:
    """A parameter that is whole for a while.

    Attributes:
        slot: where it is.
        own: what fills the slot otherwise.
        whole: what fills it for now; the same where parameters are not sharded.
    """

    slot: Slot
    own: nn.Parameter
    whole: nn.Parameter


class _Whole(TorchFunctionMode):
    """Lets a script work on whole parameters by the tensors that it holds."""

    def __init__(self, whole: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._whole = whole

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        """Call a function of torch with whole parameters in the place of what the script holds."""
        args, named = tree_map(lambda item: self._whole.get(id(item), item), (args, kwargs or {}))
        return func(*args, **named)


@contextmanager
def gathered_parameters(
    engine: Engine, wanted: Collection[str], kept: Mapping[int, torch.Tensor], *, forgets_changes: bool
) -> Iterator[None]:
    """Let some parameters be whole until the end of the context, also by the tensors that a script holds.

    All ranks enter and leave at once. Passes without gradients run on what is whole where that is all of the model.

    Args:
        engine: of the model.
        wanted: names of its parameters.
        kept: by the ids of today's parameters, the tensors that the script takes for them.
        forgets_changes: see ``unchanged``.

    Raises:
        UsageError: see ``unchanged``.
    """
    engine.show_parameters()
    engine.edits.before_step()
    is_sharded = engine.levels.parameter != Level.N
    shown = [item for unit in engine.units for item in _show(engine, unit, wanted)]
    with ExitStack() as stack:
        if is_sharded:
            stack.enter_context(_passes_limited(engine, len(shown)))
        stack.enter_context(_filling(engine, shown))
        stack.enter_context(_Whole({id(kept.get(id(item.own), item.own)): item.whole for item in shown}))
        if not (is_sharded and forgets_changes):  # then what is shown is dropped with its changes
            stack.enter_context(unchanged([item.whole for item in shown], forgets_changes=forgets_changes))
        yield


@contextmanager
def unchanged(parameters: Sequence[torch.Tensor], *, forgets_changes: bool) -> Iterator[None]:
    """Let whole parameters be afterwards what they are now.

    DeepSpeed's optimizer keeps copies of its own: what a script changes here lasts at most until the next step.

    Args:
        parameters: all ranks', in the same order.
        forgets_changes: undo changes; else refuse them.

    Raises:
        UsageError: a rank has changed some; on all ranks.
    """
    before = [parameter.detach().clone() for parameter in parameters]
    yield
    is_changed = [not torch.equal(now.data, then) for now, then in zip(parameters, before, strict=True)]
    if forgets_changes:
        for parameter, then, differs in zip(parameters, before, is_changed, strict=True):
            if differs:
                parameter.data.copy_(then)
        return
    flag = torch.tensor(float(any(is_changed)), device=parameters[0].device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    if flag:
        raise UsageError(
            "gathered parameters of a model in training must stay as they are, got changes, which DeepSpeed keeps "
            "until the next step and a plan for good",
            hint="change them before deepspeed.initialize",
        )


@contextmanager
def same_on_all_ranks(parameters: Sequence[torch.Tensor], source: int | None) -> Iterator[None]:
    """Let whole parameters afterwards be what one rank has made of them.

    Args:
        parameters: all ranks', in the same order.
        source: the rank; None to undo all changes.
    """
    if source is None:
        with unchanged(parameters, forgets_changes=True):
            yield
        return
    yield
    for parameter in parameters:
        dist.broadcast(parameter.data, source)


def _show(engine: Engine, unit: UnitState, wanted: Collection[str]) -> list[_Shown]:
    if not any(slot.name in wanted for slot in unit.spec.slots):
        return []
    values: list[nn.Parameter] = [slot.parameter for slot in unit.spec.slots]
    if engine.levels.parameter != Level.N:
        gathered = zip(unit.spec.slots, whole_values(engine, unit), strict=True)
        values = [nn.Parameter(value.to(slot.dtype), requires_grad=slot.trains) for slot, value in gathered]
    return [
        _Shown(slot, slot.parameter, value)
        for slot, value in zip(unit.spec.slots, values, strict=True)
        if slot.name in wanted
    ]


@contextmanager
def _filling(engine: Engine, shown: Collection[_Shown]) -> Iterator[None]:
    for item in shown:
        item.slot.fill(item.whole)
    engine.is_summoned = True
    try:
        yield
    finally:
        engine.is_summoned = False
        for item in shown:
            item.slot.fill(item.own)


@contextmanager
def _passes_limited(engine: Engine, num_shown: int) -> Iterator[None]:
    """Let passes run on whole parameters where all are, and refuse them elsewhere."""
    if num_shown == sum(len(unit.spec.slots) for unit in engine.units):
        with without_sharding(engine):
            yield
        return
    with passes_checked(engine, _refuse_pass):
        yield


def _refuse_pass(*_: object) -> None:
    raise UsageError(
        "a pass while parameters are gathered needs all of the model's, got some of them",
        hint="gather all parameters of the model for it, or run it outside of GatheredParameters",
    )
