"""Shows reduced gradients where users look for them, and takes back what they did to them.

Clipping, unscaling and logging read and scale ``parameter.grad`` of the model or of the optimizer.
Both get one DTensor over this rank's rows, so that torch's own functions see the global gradient.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters.owned import gradient_of, set_gradient
from paro_advise.runtime.sharding.parameters.whole import WholeTensor, allow_mixing, forbid_mixing
from paro_advise.runtime.sharding.parameters.windows import like

if TYPE_CHECKING:
    from collections.abc import Iterable


class Exposure:
    """The gradients that are on show.

    Attributes:
        discarded: the user has set all of them to None.
        kind: what sharded ones are shown as.
    """

    def __init__(self) -> None:
        self._shown: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.discarded = False
        self.kind: type[WholeTensor] = WholeTensor
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._released: dict[int, weakref.ref[torch.Tensor]] = {}  # by the parameter's id

    def show(self, parameter: torch.Tensor, shard: torch.Tensor, gradient: torch.Tensor) -> None:
        """Show a gradient on a model's parameter and on the optimizer's.

        Args:
            parameter: of the model.
            shard: of the optimizer.
            gradient: the optimizer's rows of it; its memory is shared with the reduced gradients.
        """
        # Detached it is no view to torch, which lets nobody detach views in place.
        gradient = gradient if isinstance(gradient, DTensor) else gradient.detach()
        released = self._released.pop(id(parameter), None)
        kept = released() if released is not None else None
        if kept is not None:
            gradient = _move(kept, gradient)
        if isinstance(gradient, DTensor):
            gradient = allow_mixing(gradient, self.kind)
        set_gradient(parameter, gradient)
        if shard is not parameter:
            set_gradient(shard, gradient)
        self._shown.append((parameter, shard, gradient))

    def release(self, parameter: torch.Tensor) -> None:
        """Take a gradient off a parameter of the model to which more is added later.

        Torch would add to it in place: where a script keeps it, it becomes what is shown next.
        """
        gradient = gradient_of(parameter)
        known = self._released.get(id(parameter))
        if gradient is not None and (known is None or known() is None):
            self._released[id(parameter)] = weakref.ref(gradient)
        set_gradient(parameter, None)

    def let_go(self, parameter: torch.Tensor) -> None:
        """Leave a gradient that was taken off a parameter to whoever keeps it: the next one is another."""
        self._released.pop(id(parameter), None)

    def shows(self, parameter: torch.Tensor) -> bool:
        """Tell whether the gradient of a model's parameter, or of the optimizer's, is on show."""
        return any(parameter is shown or parameter is shard for shown, shard, _ in self._shown)

    def collect(self) -> None:
        """Take over what the user did on either side, before the optimizer steps or more is added.

        Raises:
            UsageError: a gradient was replaced by a tensor of another kind.
        """
        self.put_back()  # a script may go backward, and step, inside the forward pass of what it has wrapped
        for parameter, shard, gradient in self._shown:
            theirs, of_optimizer = gradient_of(parameter), gradient_of(shard)
            if theirs is None:
                set_gradient(shard, None)
            elif theirs is not gradient:
                _copy(gradient, theirs)
                set_gradient(shard, gradient)
            elif of_optimizer is not None and of_optimizer is not gradient:
                _copy(gradient, of_optimizer)
                set_gradient(shard, gradient)

    def set_mixing(self, *, enabled: bool) -> None:
        """Let gradients mix with plain tensors, or not: an optimizer's step meets none, and calls are dearer then."""
        for _, _, gradient in self._shown:
            if enabled:
                allow_mixing(gradient, self.kind)
            else:
                forbid_mixing(gradient)

    def set_aside(self) -> None:
        """Take sharded gradients off whole parameters for a forward pass, whose compiler can make nothing of them."""
        for parameter, _, _ in self._shown:
            gradient = gradient_of(parameter)
            if isinstance(gradient, DTensor) and not isinstance(parameter, DTensor):
                self._aside.append((parameter, gradient))
                set_gradient(parameter, None)

    def put_back(self) -> None:
        """Show again what was set aside."""
        while self._aside:
            set_gradient(*self._aside.pop())

    def hide(self) -> None:
        """Take all gradients off the parameters, with what the user did to them."""
        if not self._shown:
            return
        self.collect()
        gone = [gradient_of(parameter) is None or gradient_of(shard) is None for parameter, shard, _ in self._shown]
        self.discarded = all(gone)
        for (parameter, shard, gradient), is_gone in zip(self._shown, gone, strict=True):
            if is_gone:
                _local(gradient).zero_()
            self.release(parameter)
            set_gradient(shard, None)
        self._shown = []

    def zero(self, reduced: Iterable[torch.Tensor]) -> bool:
        """Make the gradients on show zero, which optimizers act on; tell whether there are any.

        Args:
            reduced: the memory that they share.
        """
        self.put_back()
        for parameter, shard, gradient in self._shown:
            now = None if gradient_of(parameter) is None else gradient  # in place of what the script may have put there
            set_gradient(parameter, now)
            set_gradient(shard, now)
        for memory in (*reduced, *(_local(gradient) for _, _, gradient in self._shown)):
            memory.zero_()
        return bool(self._shown)

    def forget(self, *, to_none: bool = True) -> None:
        """Take all gradients off the parameters.

        Args:
            to_none: what a script keeps of them stays as it is, else it becomes zero.
        """
        for parameter, shard, _ in self._shown:
            self.release(parameter)
            set_gradient(shard, None)
        self._shown = []
        if to_none:
            self._released.clear()
        for released in self._released.values():
            kept = released()
            if kept is not None:
                _local(kept).zero_()
        self._aside = []  # forgotten inside a forward pass, too


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() makes a view


def _move(kept: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that a script has kept, with the memory of the one that is to be shown in its place."""
    if isinstance(kept, DTensor) and isinstance(gradient, DTensor):
        kept._local_tensor, kept._spec = gradient._local_tensor, gradient._spec  # noqa: SLF001 - as DTensor's own
        return kept
    if isinstance(kept, DTensor) or isinstance(gradient, DTensor) or kept.requires_grad:
        return gradient
    if (kept.shape, kept.dtype, kept.device) != (gradient.shape, gradient.dtype, gradient.device):
        return gradient
    kept.data = gradient
    return kept


def _laid_out_as(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a gradient that a script has put together in the layout of the one shown; all ranks do the same."""
    if not isinstance(source, DTensor) or not isinstance(target, DTensor):
        return source
    if source.device_mesh == target.device_mesh:
        return source.redistribute(placements=target.placements)
    return like(source.full_tensor(), target)  # made from the parameter, whose ranks are others


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.shape == target.shape:
        source = _laid_out_as(like(source, target), target)
    if isinstance(source, DTensor) != isinstance(target, DTensor) or _local(source).shape != _local(target).shape:
        raise UsageError(
            "a gradient must keep its kind when it is replaced, "
            f"expected a {type(target).__name__} like the one shown, got a {type(source).__name__}",
            hint="change parameter.grad in place",
        )
    with torch.no_grad():
        _local(target).copy_(_local(source))
