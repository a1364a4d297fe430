"""Refuses gradients of sharded parameters that nobody would take to the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters import fsdp2
from paro_advise.runtime.sharding.parameters.owned import gradient_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from paro_advise.runtime.sharding.exchange.procedure import UnitState

_RETURN_TENSORS = (
    "return tensors (in tuples, dicts or dataclasses), or choose a strategy that replicates parameters (N..)"
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
                    "pass), which would be lost",
                    hint="compute it inside forward, or choose a strategy that replicates parameters (N..)",
                )
    if synchronizes and fsdp2.accumulated_bytes(model) > 0:
        raise UsageError(
            "a backward pass must reach each sharded unit once after all that its parameters are used for, got a "
            "gradient of one that was reduced before (a penalty on gradients and another forward pass in one loss)",
            hint="call backward() for each forward pass, or choose a strategy that replicates parameters (N..)",
        )


def refuse_unseen(units: Sequence[UnitState]) -> None:
    """Refuse to step after a backward pass that went through no tensor which a sharded model returned.

    Raises:
        UsageError: its gradients lie at gathered copies, where nobody takes them.
    """
    for unit in units:
        for slot in unit.spec.training:
            if not isinstance(slot.parameter, DTensor) and gradient_of(slot.parameter) is not None:
                raise UsageError(
                    "with sharded parameters a backward pass must go through a tensor that the model returned, got an "
                    f"output that shows none, and a gradient of {slot.name} that would be lost",
                    hint=_RETURN_TENSORS,
                )
