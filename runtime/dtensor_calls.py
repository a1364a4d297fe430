"""Calls that mix DTensors with whole tensors, in torch's own dispatcher: it lets them meet, and change each other.

Means of weights that a script of FSDP2 keeps from before the plan are such DTensors, where parameters are whole now.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils as layouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paro_advise.runtime.torch_types import AnyFunction, Arguments, Result

MIXED = "mixed torch.Tensor and DTensor"
STAYS = "require placement changes"  # in torch's words for a change in place that would cut the changed tensor anew
# Torch 2.13's names for what it does when an operator has run, for how it finds layouts before, and for what it asks
# of each layout then.
_END_OF_CALL = "_dispatch_fast_path_python_tail"
_LAYOUTS_OF_CALL = "_propagate_op_sharding_dispatch_slow_path"
_HAS_ROWS_FOR_ALL = "is_tensor_shardable"


def let_dtensors_meet_plain_tensors(*, enabled: bool) -> None:
    """Let a script's own DTensors, such as means of weights from before the plan, meet parameters that are now whole.

    Torch takes plain tensors to be equal on all ranks then, as ``implicit_replication`` in
    ``torch.distributed.tensor.experimental`` does for a block.
    """
    # The context manager that sets the same ends with False.
    DTensor._op_dispatcher._allow_implicit_replication = enabled  # noqa: SLF001


@contextmanager
def meeting_plain_tensors(*, enabled: bool) -> Iterator[None]:
    """Let them meet, or not, for a while."""
    before = DTensor._op_dispatcher._allow_implicit_replication  # noqa: SLF001
    if before is enabled:
        yield
        return
    let_dtensors_meet_plain_tensors(enabled=enabled)
    try:
        yield
    finally:
        let_dtensors_meet_plain_tensors(enabled=before)


def let_dtensors_mix() -> None:
    """Let DTensors change plain tensors in place that torch takes to be equal on all ranks, and these change DTensors.

    Torch fails after the former, and before the latter where a DTensor has fewer rows than there are ranks. Single
    values are always taken to be equal, as the norm that an optimizer adds up over parameters. Call it before DTensors
    are used: torch keeps what it calls here from the first time on.
    """
    dispatcher = DTensor._op_dispatcher  # noqa: SLF001
    if _END_OF_CALL in dispatcher.__dict__:
        return
    dispatcher.__dict__[_END_OF_CALL] = partial(_end_call, getattr(dispatcher, _END_OF_CALL))
    again = _Again()
    setattr(layouts, _HAS_ROWS_FOR_ALL, partial(_has_rows, again, getattr(layouts, _HAS_ROWS_FOR_ALL)))
    dispatcher.__dict__[_LAYOUTS_OF_CALL] = partial(_find_layouts, again, getattr(dispatcher, _LAYOUTS_OF_CALL))


class _Again(threading.local):
    """Whether this thread looks for a layout once more, in which ranks may hold no row."""

    takes_empty = False


def _has_rows(again: _Again, otherwise: Callable[..., bool], *args: Result, **kwargs: Result) -> bool:
    return again.takes_empty or otherwise(*args, **kwargs)


def _end_call(otherwise: AnyFunction, operator: object, args: Arguments, *rest: Result) -> Result:
    """Return what an operator has changed in place, where that is a plain tensor; else do as torch does."""
    _kwargs, _mesh, sharding, _found, _takes_part, is_in_place, _has_out = rest
    spec = sharding.output_spec
    if is_in_place and spec is not None and type(spec) is DTensorSpec and not isinstance(args[0], DTensor):
        if spec.is_replicated():
            return args[0]
        raise RuntimeError(f"{operator}: {MIXED}, of which the first one is plain, changed in place and not whole")
    return otherwise(operator, args, *rest)


def _find_layouts(again: _Again, otherwise: Callable[..., Result], *call: Result) -> Result:
    """Find the layouts for an operator; once more with ranks that hold no row, where no other way is left.

    Torch takes no such layout into account, but for tensors that all have it already.
    """
    try:
        return otherwise(*call)
    except RuntimeError as error:
        if STAYS not in str(error):
            raise
    again.takes_empty = True
    try:
        return otherwise(*call)
    finally:
        again.takes_empty = False
