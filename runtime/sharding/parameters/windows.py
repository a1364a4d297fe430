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
# Those whose shards, where they are uneven, torch takes for as many elements as an even division would give.
_RESHAPES = frozenset(("flatten", "ravel", "reshape", "reshape_as", "unflatten", "view", "view_as"))


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
            "a plain tensor, or after a backward pass inside of it (a penalty on the distance to other weights, a "
            "layer that is called without the block that holds it, two losses in one training_step), whose gradient "
            "would be lost",
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
        self._seen = _version(origin._local_tensor)  # noqa: SLF001 - to_local() makes a view
        self._before: torch.Tensor | None = None

    def prepare(self, *, writes: bool) -> None:
        """Bring the value up to date before it is used again, and remember it where it may be changed."""
        now = _version(self.origin._local_tensor)  # noqa: SLF001
        if writes or now != self._seen:
            with torch.no_grad():
                self.value.detach().copy_(WholeReads.whole(self.origin))
            self._seen = now
        self.remember(writes=writes)

    def remember(self, *, writes: bool) -> None:
        """Remember the value where it may be changed."""
        self._before = self.value.detach().clone() if writes else None

    def write_back(self) -> None:
        """Give the shards the elements that have been changed since ``prepare``, and no others.

        Raises:
            UsageError: it has another shape now.
        """
        before, self._before = self._before, None
        if before is None:
            return
        if self.value.shape != self.origin.shape:
            raise UsageError(
                f"a sharded tensor must keep its shape, {tuple(self.origin.shape)}, got {tuple(self.value.shape)} "
                "by a change in place",
                hint="work on a copy, tensor.full_tensor(), and copy_ the result back",
            )
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documentation names it so
            value = self.value.detach()
            if any(place.is_partial() for place in self.origin.placements):
                self.origin._local_tensor, self.origin._spec = _reduce_partial(self.origin, value)  # noqa: SLF001
            else:
                is_same = (value == before) | (value.isnan() & before.isnan())
                self.origin.copy_(torch.where(like(is_same, self.origin), self.origin, like(value, self.origin)))
        self._seen = _version(self.origin._local_tensor)  # noqa: SLF001

    def shares(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is a view of the whole value."""
        is_dense = tensor.layout == torch.strided and self.value.layout == torch.strided
        return is_dense and tensor.untyped_storage().data_ptr() == self.value.untyped_storage().data_ptr()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - has no public name


def _reduce_partial(origin: DTensor, value: torch.Tensor) -> tuple[torch.Tensor, Result]:
    """Return what a sum that is not yet taken over all ranks becomes once it is."""
    made = distribute_tensor(value, origin.device_mesh, src_data_rank=None)
    return made._local_tensor, made._spec  # noqa: SLF001 - has no public name


def _writes(func: AnyFunction, kwargs: Keywords) -> bool:
    """Tell whether a function may change what it is given: in place, into an output, by a collective."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (not name.endswith("__") or name.startswith(("__set", "__i")))
    return in_place or kwargs.get("out") is not None or _communicates(func)


def _communicates(func: AnyFunction) -> bool:
    return str(getattr(func, "__module__", "")).startswith(dist.__name__)


class Window(torch.Tensor):
    """A view of the whole value of a sharded tensor; what a script writes into it goes to the shards."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Call a function of torch's on the whole value."""
        kwargs = kwargs or {}
        seen_from = [item.__dict__[_SEEN_FROM] for item in tree_leaves((args, kwargs)) if isinstance(item, Window)]
        wholes = list({id(whole): whole for whole in seen_from}.values())
        writes = _writes(func, kwargs)
        for whole in wholes:
            whole.prepare(writes=writes)
        # In a step DTensors mix with no plain tensors by themselves; those that are written to stay what they are.
        takes_whole = not writes or (bool(args) and isinstance(args[0], Window) and kwargs.get("out") is None)

        def plain(value: Result) -> Result:
            return gathered(value) if takes_whole and isinstance(value, DTensor) else _plain(value)

        found = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        return _conclude(func, found, wholes)

    @property
    def data(self) -> torch.Tensor:
        """Return a view without autograd that is one of the same value."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write values of its shape."""
        with torch.no_grad():
            self.copy_(value)


def _plain(value: Result) -> Result:
    if isinstance(value, Window):
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return value.as_subclass(torch.Tensor)
    return value


def _conclude(func: AnyFunction, found: Result, wholes: list[_Whole]) -> Result:
    """Write back what a function has changed; return what it returned, views as windows."""
    if _communicates(func) and hasattr(found, "wait"):
        found.wait()
    for whole in wholes:
        whole.write_back()

    def seen(value: Result) -> Result:
        if not isinstance(value, torch.Tensor):
            if hasattr(value, "setflags"):  # an array of NumPy over this memory, whose changes nobody would see
                value.setflags(write=False)
            return value
        for whole in wholes if type(value) is torch.Tensor else ():
            if value is whole.value:
                return whole.origin
            if whole.shares(value):
                window = value.as_subclass(Window)
                window.__dict__[_SEEN_FROM] = whole
                return window
        return value

    return tree_map(seen, found)


def by_whole_values(func: AnyFunction, args: Arguments, kwargs: Keywords) -> Result:
    """Call a function of torch's on the whole values of DTensors; write what it changes into their shards."""
    wholes: dict[int, _Whole] = {}
    writes = _writes(func, kwargs)

    def whole(value: Result) -> Result:
        if not isinstance(value, DTensor):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = _Whole(value)
            wholes[id(value)].remember(writes=writes)
        return wholes[id(value)].value

    args, kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    return _conclude(func, func(*args, **kwargs), list(wholes.values()))


def cuts_through_shards(func: AnyFunction, args: Arguments, found: Result) -> bool:
    """Tell whether torch has returned a copy where a view of a plain tensor was asked for, or a sum of truth values."""
    is_truth = isinstance(found, DTensor) and found.dtype == torch.bool
    if is_truth and any(place.is_partial() for place in found.placements):
        return True
    if getattr(func, "__name__", "") not in _VIEWS or not (args and isinstance(args[0], DTensor)):
        return False
    first = next((item for item in tree_leaves(found) if isinstance(item, DTensor)), None)
    return first is not None and _count_of_shards(first) < _count_of_shards(args[0])


def sets_elements(func: AnyFunction, args: Arguments) -> bool:
    """Tell whether a function sets elements by places, of which other ranks may hold some; masks are of one layout."""
    if getattr(func, "__name__", "") != "__setitem__" or not isinstance(args[0], DTensor):
        return False
    place = args[1]
    return not (isinstance(place, DTensor) or place is Ellipsis or place == slice(None))


def reshapes_unevenly(func: AnyFunction, args: Arguments) -> bool:
    """Tell whether a function gives a tensor whose ranks hold numbers of elements that differ another shape."""
    if getattr(func, "__name__", "") not in _RESHAPES or not (args and isinstance(args[0], DTensor)):
        return False
    return any(len(lengths) > 1 for lengths in _lengths_of_shards(args[0]))


def may_be_empty(tensor: DTensor) -> bool:
    """Tell whether some rank may hold no element of a tensor; all ranks tell alike."""
    return any(0 in lengths for lengths in _lengths_of_shards(tensor))


def _lengths_of_shards(tensor: DTensor) -> list[set[int]]:
    """Return which lengths the ranks hold of each dimension: each mesh dimension cuts what the last one has left."""
    found = [{size} for size in tensor.shape]
    for ranks, kind in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if kind.is_shard() and ranks > 1:
            dimension = getattr(kind, "dim", 0)
            found[dimension] = {length for size in found[dimension] for length in _lengths_of_pieces(size, ranks)}
    return found


def _lengths_of_pieces(size: int, ranks: int) -> set[int]:
    """Return which lengths torch.chunk cuts a size into; ranks that are left without a piece have none."""
    piece = max(-(-size // ranks), 1)
    return {max(0, min(piece, size - piece * rank)) for rank in range(ranks)}


def _count_of_shards(tensor: DTensor) -> int:
    return sum(place.is_shard() for place in tensor.placements)
