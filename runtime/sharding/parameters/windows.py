"""Views of sharded tensors, and functions that torch cannot run on shards, by way of the whole tensor.

Torch returns a copy where a view of a DTensor would cut through its shards (``weight[3]`` of rows that other ranks
hold): what is written there is lost. Other functions it does not know for DTensors at all. Here both act on the
whole tensor, which all ranks gather at the same line; what they change is written into the shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters.reading import WholeReads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paro_advise.runtime.torch_types import AnyFunction, Arguments, Keywords, Result

_SEEN_FROM = "_paro_seen_from"
# They return views of plain tensors.
_VIEW_NAMES = (
    "__getitem__ chunk diagonal expand expand_as flatten hsplit narrow ravel reshape reshape_as select split "
    "split_with_sizes squeeze tensor_split unbind unflatten unfold unsqueeze view view_as vsplit"
)
_VIEWS = frozenset(_VIEW_NAMES.split())


def like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a target's whole shape as a DTensor of its layout, where the target is one."""
    if isinstance(target, DTensor) and not isinstance(tensor, DTensor):
        return distribute_tensor(tensor, target.device_mesh, target.placements, src_data_rank=None)
    return tensor


class _OneWay(torch.autograd.Function):
    """The whole value of a DTensor, to compute with but not to train by: its gradient would reach no reduction."""

    @staticmethod
    def forward(ctx: object, tensor: DTensor) -> torch.Tensor:  # noqa: ARG004 - autograd passes it
        """Gather it."""
        return WholeReads.whole(tensor).view(tensor.shape)

    @staticmethod
    def backward(ctx: object, *gradients: Result) -> Result:  # noqa: ARG004 - autograd passes them
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a sharded parameter must be used inside the forward pass of its module, one was used outside of it with "
            "a plain tensor (a penalty on the distance to other weights), whose gradient would be lost",
            hint="compute it inside forward, or choose a strategy that replicates parameters (N..)",
        )


def gathered(tensor: DTensor) -> torch.Tensor:
    """Return the whole value, which all ranks gather at the same line; a gradient that reaches it is refused."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: torch.Tensor = _OneWay.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return found
    return WholeReads.whole(tensor)


class _Whole:
    """A whole value beside the shards that it was gathered from."""

    def __init__(self, origin: DTensor) -> None:
        self.origin = origin
        value = gathered(origin)
        # Of replicated tensors the value is their memory itself.
        self.value = value if value.requires_grad else value.clone()
        self._version = self.value._version  # noqa: SLF001 - has no public name

    def write_back(self, *, always: bool) -> None:
        """Give the shards what has been written into the whole value or a view of it.

        Args:
            always: whether or not torch has noted a change.

        Raises:
            UsageError: it has another shape now.
        """
        if self.value._version == self._version and not always:  # noqa: SLF001
            return
        if self.value.shape != self.origin.shape:
            raise UsageError(
                f"a sharded tensor must keep its shape, {tuple(self.origin.shape)}, got {tuple(self.value.shape)} "
                "by a change in place",
                hint="work on a copy, tensor.full_tensor(), and copy_ the result back",
            )
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documentation names it so
            if any(place.is_partial() for place in self.origin.placements):
                self.origin._local_tensor, self.origin._spec = _replicated(self.origin, self.value)  # noqa: SLF001
            else:
                self.origin.copy_(like(self.value.detach(), self.origin))
        self._version = self.value._version  # noqa: SLF001

    def shares(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a view of the whole value."""
        return tensor.untyped_storage().data_ptr() == self.value.untyped_storage().data_ptr()


def _replicated(origin: DTensor, value: torch.Tensor) -> tuple[torch.Tensor, Result]:
    """Return what a sum that is not yet taken over all ranks becomes once it is."""
    made = distribute_tensor(value.detach(), origin.device_mesh, src_data_rank=None)
    return made._local_tensor, made._spec  # noqa: SLF001 - has no public name


class Window(torch.Tensor):
    """A view of the whole value of a sharded tensor; what a script writes into it goes to the shards."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Call a function of torch's on the whole value."""
        kwargs = kwargs or {}
        wholes = [item.__dict__[_SEEN_FROM] for item in tree_leaves((args, kwargs)) if isinstance(item, Window)]
        found = func(*tree_map(_plain, args), **tree_map(_plain, kwargs))
        return _concluded(func, found, list({id(whole): whole for whole in wholes}.values()))


def _plain(value: Result) -> Result:
    if isinstance(value, Window):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return value.as_subclass(torch.Tensor)
    return value


def _concluded(func: AnyFunction, found: Result, wholes: list[_Whole]) -> Result:
    """Write back what a function has changed; return what it returned, views as windows."""
    communicates = str(getattr(func, "__module__", "")).startswith(dist.__name__)
    if communicates and hasattr(found, "wait"):
        found.wait()
    for whole in wholes:
        whole.write_back(always=communicates)  # collectives note no change

    def seen(value: Result) -> Result:
        if not isinstance(value, torch.Tensor):
            if hasattr(value, "setflags"):  # an array of NumPy over this memory, whose changes nobody would see
                value.setflags(write=False)
            return value
        for whole in wholes if type(value) is torch.Tensor else ():
            if value is whole.value:
                return whole.origin
            if whole.shares(value) and not value.requires_grad:
                window = value.as_subclass(Window)
                window.__dict__[_SEEN_FROM] = whole
                return window
        return value

    return tree_map(seen, found)


def by_whole_values(func: AnyFunction, args: Arguments, kwargs: Keywords) -> Result:
    """Call a function of torch's on the whole values of DTensors; write what it changes into their shards."""
    wholes: dict[int, _Whole] = {}

    def whole(value: Result) -> Result:
        if not isinstance(value, DTensor):
            return value
        known = wholes.setdefault(id(value), None) or _Whole(value)  # type: ignore[arg-type]
        wholes[id(value)] = known
        return known.value

    args, kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    return _concluded(func, func(*args, **kwargs), list(wholes.values()))


def cuts_through_shards(func: AnyFunction, args: Arguments, found: Result) -> bool:
    """Tell whether torch has returned a copy where a view of a plain tensor was asked for."""
    if getattr(func, "__name__", "") not in _VIEWS or not isinstance(args[0], DTensor):
        return False
    first = next((item for item in tree_leaves(found) if isinstance(item, DTensor)), None)
    return first is not None and _count_of_shards(first) < _count_of_shards(args[0])


def _count_of_shards(tensor: DTensor) -> int:
    return sum(place.is_shard() for place in tensor.placements)
