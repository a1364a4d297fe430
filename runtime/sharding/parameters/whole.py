"""DTensors that meet plain tensors, as the gradients and parameters of a script that knows no DTensor.

A mean of past weights, a saved copy, noise that is added to a gradient are plain tensors of the whole shape.
Torch refuses to mix both kinds; here the plain one is cut where a DTensor is written, and the DTensor is gathered,
by all ranks at the same line, where a plain one is.
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from paro_advise.errors import UsageError
from paro_advise.runtime.dtensor_calls import MIXED, STAYS, meeting_plain_tensors
from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.parameters.windows import (
    Window,
    by_whole_values,
    cuts_through_shards,
    gathered,
    like,
    may_be_empty,
    reshapes_unevenly,
    sets_elements,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import AnyFunction, Arguments, Keywords, Result

# Torch's own, below what is put in its place here.
_DATA: Any = torch._C.TensorBase.__dict__["data"]  # noqa: SLF001
_REQUIRES_GRAD: Any = torch._C.TensorBase.__dict__["requires_grad"]  # noqa: SLF001
_DISPATCH_KEYS: Any = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)  # noqa: SLF001
# What torch calls for each element of a list that it makes a tensor of.
_AS_NUMBERS = frozenset(
    getattr(torch.Tensor, name) for name in ("__float__", "__int__", "__index__", "__bool__", "__complex__", "item")
)
# In messages that follow from shapes and layouts, which all ranks have alike.
OF_LAYOUTS = (
    MIXED,
    "Sharding propagation failed",
    "sharding strategy registered",
    "unevenly sharded",
    "different meshes",
    STAYS,
    "is not supported for tensor subclasses",
    "Cannot find device mesh",
)
# They fail on no element at all.
_EXTREMES = frozenset(("amax", "amin", "aminmax", "argmax", "argmin", "kthvalue", "median", "mode", "quantile", "topk"))
_OF_EXTREMES = ("max", "min")  # how parts of them meet, in torch's words
_SUMS = frozenset(("sum", "nansum"))
_PART_OF_NORM = "_NormPartial"  # torch 2.13's name of the layout of a norm whose parts have not met yet
_UNUSED = "appears to not have been used in the graph"
_SLOT = "_paro_slot"
_OF_LISTS = "_foreach_"  # in the names of functions that take lists of tensors, also in those for mixed precision
_IN_PLACE = re.compile(
    r"[a-z0-9]_$|^__(?:setitem|i(?:add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__$"
)
# Functions that draw, in place or not.
_DRAWS = (
    "alpha_dropout bernoulli bernoulli_ binomial cauchy_ dropout exponential_ feature_alpha_dropout "
    "feature_dropout geometric_ log_normal_ multinomial normal normal_ poisson rand_like randint_like randn_like "
    "random_ rrelu rrelu_ uniform_"
)
_RANDOM = frozenset(_DRAWS.split())
# A script that finds a fault in its shard stops or skips a step: that is right with one of any shard.
_TELLS_OF_FAULTS = frozenset(
    getattr(home, name) for home in (torch, torch.Tensor) for name in ("isnan", "isinf", "isfinite")
)


def _is_dispatch_off() -> bool:
    """Tell whether torch reads numbers into a tensor that it makes: torch.tensor([...]), which knows no DTensors."""
    found: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(_DISPATCH_KEYS[0])  # noqa: SLF001 - has no public name
    return found


@contextmanager
def _dispatching() -> Iterator[None]:
    """Let DTensors compute where torch has switched them off."""
    switch = torch._C._dispatch_tls_set_dispatch_key_excluded  # noqa: SLF001
    before = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _DISPATCH_KEYS]  # noqa: SLF001
    for key in _DISPATCH_KEYS:
        switch(key, False)  # noqa: FBT003 - takes no names
    try:
        yield
    finally:
        for key, is_off in zip(_DISPATCH_KEYS, before, strict=True):
            switch(key, is_off)


def made_by_autograd() -> UsageError:
    """Return the error of a gradient that would have to come from outside of ``backward``."""
    return UsageError(
        "gradients of sharded parameters must be made by loss.backward(), got torch.autograd.grad",
        hint="choose a strategy that replicates parameters (N..)",
    )


def _by_autograd(args: Arguments, kwargs: Keywords) -> Result:
    """Call ``torch.autograd.grad``; refuse that sharded parameters have none because a copy of theirs was used."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    of_each = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    makes_zeros = kwargs.get("materialize_grads", False)
    used = {**kwargs, "materialize_grads": False, "allow_unused": True} if makes_zeros else kwargs
    gradients = _on_shards(torch.autograd.grad, args, used)
    for tensor, gradient in zip(of_each, gradients, strict=True):
        if gradient is None and isinstance(tensor, WholeTensor):
            tensor.refuse_none()
    if makes_zeros:
        return tuple(
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(of_each, gradients, strict=True)
        )
    return gradients


class WholeTensor(DTensor):
    """A DTensor that mixes with plain tensors of its whole shape."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Call a function of torch's; once more with tensors of one kind, or whole ones, where it refuses."""
        kwargs = kwargs or {}
        if func in _AS_NUMBERS and _is_dispatch_off():
            with _dispatching():
                return cls.__torch_function__(func, types, args, kwargs)
        known = func in _TELLS_OF_FAULTS or not any(issubclass(kind, FrameworksShard) for kind in types)
        result = WholeTensor if known else FrameworksShard
        if known and all(issubclass(kind, SavedShard) for kind in types if issubclass(kind, WholeTensor)):
            result = SavedShard
        if any(issubclass(kind, _StandIn) for kind in types):
            args, kwargs = tree_map(current, args), tree_map(current, kwargs)
        if any(issubclass(kind, Window) for kind in types):
            return Window.__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass(), meeting_plain_tensors(enabled=False):  # noqa: SLF001 - torch's documentation names it so
            try:
                if func is torch.autograd.grad:
                    return _as_whole(_by_autograd(args, kwargs), result)
                return _as_whole(_counted(func, args, kwargs, _on_shards(func, args, kwargs)), result)
            except (torch.OutOfMemoryError, dist.DistError):
                raise
            except (RuntimeError, ValueError) as error:
                if not _is_raised_everywhere(error, args, kwargs):
                    raise
                if _UNUSED in str(error):
                    raise made_by_autograd() from None
                return _as_whole(by_whole_values(func, args, kwargs), result)

    def refuse_none(self) -> None:
        """Accept that no pass has used this tensor, as far as torch.autograd.grad can tell."""

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """Return this rank's rows.

        Raises:
            UsageError: a script for FSDP2 asks, which would give it other rows.
        """
        WholeReads.refuse_local(self)
        return super().to_local(**kwargs)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return the rows one by one."""
        return iter(self.unbind(0))

    def __format__(self, spec: str) -> str:
        """Return a single value in a format, as torch does for plain tensors."""
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    @property
    def requires_grad(self) -> bool:
        """Tell whether it wants a gradient; FSDP2 asks each parameter in each pass."""
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            found: bool = _REQUIRES_GRAD.__get__(self)
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            _REQUIRES_GRAD.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        """Return a view without autograd."""
        found: torch.Tensor = _as_whole(_DATA.__get__(self))
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write values of the whole shape; torch drops what is assigned to a DTensor."""
        with torch.no_grad():
            self.copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain DTensor."""
        copied: torch.Tensor = memo.setdefault(id(self), _plain(self).clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Result:
        """Return what a plain tensor is saved as, so that it can be read without this package.

        A DTensor where the script's framework has them, else the whole one.
        """
        if WholeReads.are_saved_whole:
            return WholeReads.whole(_plain(self)).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        plain = _plain(self)
        held = plain._local_tensor  # noqa: SLF001
        if held.untyped_storage().nbytes() > held.numel() * held.element_size():
            # Rows of a larger buffer, which the file would hold; behind its first row torch does not save them at all.
            return plain.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # likewise


class SavedShard(WholeTensor):
    """What a state dict holds of a parameter on a mesh that the script's framework would not have."""

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """Return this rank's rows, which go into a file: nobody adds them up."""
        return DTensor.to_local(self, **kwargs)


def saved_form(tensor: torch.Tensor) -> torch.Tensor:
    """Let a state dict's DTensor mix with others of its shape, as those of a target network, where meshes differ."""
    is_alike = not isinstance(tensor, DTensor) or tensor.device_mesh.shape == (dist.get_world_size(),)
    return tensor if is_alike else allow_mixing(tensor, SavedShard)


class FrameworksShard(WholeTensor):
    """A gradient, or what was made of some, where the script's own framework would show this rank's shard, as FSDP1.

    What is done to each element is the same there. A norm or a sum is not, and is refused where it is read.
    """

    is_shard_in_framework = True


def _counted(func: AnyFunction, args: Arguments, kwargs: Keywords, found: Result) -> Result:
    """Return a result; count a change of the DTensors in a list, as torch counts one of plain or of single tensors."""
    name = getattr(func, "__name__", "")
    if _OF_LISTS in name and name.endswith("_"):
        for item in args[0] if args else kwargs["self"]:
            if isinstance(item, DTensor):
                increment_version(item)
    return found


def _on_shards(func: AnyFunction, args: Arguments, kwargs: Keywords) -> Result:
    name = getattr(func, "__name__", "")
    if name in _RANDOM or getattr(func, "__module__", None) == nn.init.__name__:
        # Each rank has a generator of its own: of shards that draw for themselves the whole is another one.
        return by_whole_values(func, args, kwargs)
    if getattr(func, "__module__", None) == distributed_c10d.__name__:
        # torch knows no way for shards, and looks for one by drawing from Python's generator, which is the script's.
        return by_whole_values(func, args, kwargs)
    if sets_elements(func, args) or reshapes_unevenly(func, args):
        return by_whole_values(func, args, kwargs)
    if (name in _EXTREMES or _is_extreme_norm(name, args, kwargs)) and _may_be_empty((args, kwargs)):
        return _of_whole_values(func, args, kwargs)
    if name in _SUMS and args and isinstance(args[0], DTensor):
        args = (_without_parts_of_norms(args[0]), *args[1:])
    if args and isinstance(args[0], (list, tuple)) and len(_kinds(args[0])) > 1:
        # Single values that are plain would count as equal on all ranks.
        by_kind = _OF_LISTS in name
        return _by_kind(func, args, kwargs) if by_kind else func(*_of_one_kind(args, changes_first=False), **kwargs)
    if args and not isinstance(args[0], (DTensor, list, tuple)) and _IN_PLACE.search(name):
        # torch lets a sharded single value meet a plain tensor, and then cannot change that one in place.
        return func(*_of_one_kind(args, changes_first=False), **kwargs)
    try:
        found = func(*args, **kwargs)
    except RuntimeError as error:
        if MIXED not in str(error) or not args:
            raise
        return func(*_of_one_kind(args, changes_first=name.endswith("_")), **kwargs)
    if cuts_through_shards(func, args, found):
        return by_whole_values(func, args, kwargs)
    return type(found)(map(_with_faults, found)) if type(found) in (list, tuple) else _with_faults(found)


def _with_faults(found: Result) -> Result:
    """Return the largest or smallest of all ranks' values, nan where one of them is: backends pass over it."""
    if not isinstance(found, DTensor) or not found.is_floating_point():
        return found
    if not any(getattr(place, "reduce_op", "") in _OF_EXTREMES for place in found.placements):
        return found
    whole = [Replicate() if place.is_partial() else place for place in found.placements]
    sums = [Partial() if place.is_partial() else place for place in found.placements]
    faults = found._local_tensor.detach().isnan().to(found.dtype)  # noqa: SLF001 - isnan() would make it whole first
    made = DTensor.from_local(
        faults, found.device_mesh, sums, run_check=False, shape=found.shape, stride=found.stride()
    ).redistribute(placements=whole)
    return torch.where(made > 0, math.nan, found.redistribute(placements=whole))


def _without_parts_of_norms(tensor: DTensor) -> DTensor:
    """Return norms put together from those of all ranks' rows: torch adds the parts up as if they were sums."""
    if not any(type(place).__name__ == _PART_OF_NORM for place in tensor.placements):
        return tensor
    whole = [Replicate() if place.is_partial() else place for place in tensor.placements]
    return tensor.redistribute(placements=whole)


def _is_extreme_norm(name: str, args: Arguments, kwargs: Keywords) -> bool:
    """Tell whether a function takes the largest or the smallest absolute value: a norm of an infinite order."""
    is_norm = name.endswith("norm")
    return is_norm and any(isinstance(value, float) and math.isinf(value) for value in tree_leaves((args[1:], kwargs)))


def _of_whole_values(func: AnyFunction, args: Arguments, kwargs: Keywords) -> Result:
    """Call a function of one tensor, or of a list's, on whole values where a rank may hold no element."""
    if not (args and isinstance(args[0], (list, tuple))):
        return by_whole_values(func, args, kwargs)
    of_each = [
        (by_whole_values if _may_be_empty(item) else _on_shards)(func, ([item], *args[1:]), kwargs) for item in args[0]
    ]
    return [found for (found,) in of_each]


def _may_be_empty(values: Result) -> bool:
    return any(isinstance(item, DTensor) and may_be_empty(item) for item in tree_leaves(values))


def _is_raised_everywhere(error: Exception, args: Arguments, kwargs: Keywords) -> bool:
    """Tell whether all ranks get this error: one that holds no element may get errors of its own."""
    return any(words in str(error) for words in OF_LAYOUTS) or not _may_be_empty((args, kwargs))


def _plain(tensor: WholeTensor) -> DTensor:
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        plain: DTensor = tensor.detach()  # type: ignore[assignment]
    return plain


def _kinds(values: Result) -> set[bool]:
    """Return whether tensors of a list are DTensors: one answer, or both."""
    return {isinstance(value, DTensor) for value in values if isinstance(value, torch.Tensor)}


def _by_kind(func: AnyFunction, args: Arguments, kwargs: Keywords) -> Result:
    """Call a function of lists with the plain tensors and with the DTensors; return what it does of all, in order."""
    count = len(args[0])
    found: Result = [None] * count
    # DTensors first: where torch refuses them nothing is changed yet, and all can be done on whole values.
    for is_sharded in sorted(_kinds(args[0]), reverse=True):
        places = [place for place, value in enumerate(args[0]) if isinstance(value, DTensor) == is_sharded]
        own = tuple(
            [value[place] for place in places] if isinstance(value, (list, tuple)) and len(value) == count else value
            for value in args
        )
        made = func(*(own if is_sharded else _of_one_kind(own, changes_first=False)), **kwargs)
        if made is None:  # changed in place
            found = None
        elif found is not None:
            for place, value in zip(places, made, strict=True):
                found[place] = value
    return found


def _of_one_kind(args: Arguments, *, changes_first: bool) -> Arguments:
    """Return arguments without DTensors, or with DTensors only where the first one is changed in place."""
    targets = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
    if not (changes_first and isinstance(targets[0], DTensor)):
        return tuple(tree_map(lambda item: gathered(item) if isinstance(item, DTensor) else item, args))

    def cut(value: Result, target: DTensor) -> Result:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.shape == target.shape:
            return like(value, target)
        return value

    def cut_all(value: Result) -> Result:
        if isinstance(value, (list, tuple)) and len(value) == len(targets):
            return [cut(item, target) for item, target in zip(value, targets, strict=True)]
        return cut(value, targets[0])

    return (args[0], *(cut_all(value) for value in args[1:]))


def _as_whole(found: Result, kind: type[WholeTensor] = WholeTensor) -> Result:
    if type(found) is DTensor:
        found.__class__ = kind
    elif isinstance(found, (list, tuple)):
        for item in found:
            if type(item) is DTensor:
                item.__class__ = kind
    return found


def allow_mixing(tensor: torch.Tensor, kind: type[WholeTensor] = WholeTensor) -> torch.Tensor:
    """Let a DTensor mix with plain tensors from now on; plain tensors stay as they are."""
    found: torch.Tensor = _as_whole(tensor, kind)
    return found


def forbid_mixing(tensor: torch.Tensor) -> None:
    """Let it be a plain DTensor again."""
    if type(tensor) in (WholeTensor, FrameworksShard):
        tensor.__class__ = DTensor  # what it was before


class _StandIn(torch.Tensor):
    """A parameter that a script remembers from before the model was sharded: leads to that of today."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Result:
        """Call a function of torch's with the parameters of today."""
        return func(*tree_map(current, args), **tree_map(current, kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient of today's parameter."""
        found: torch.Tensor | None = current(self).grad
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        current(self).grad = value

    @property
    def data(self) -> torch.Tensor:
        """Return the values of today's parameter."""
        found: torch.Tensor = current(self).data
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        current(self).data = value

    @property
    def requires_grad(self) -> bool:
        """Tell whether today's parameter wants a gradient."""
        found: bool = current(self).requires_grad
        return found

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        current(self).requires_grad = value

    def __reduce_ex__(self, protocol: Any) -> Result:
        """Return what today's parameter is saved as."""
        return current(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Result:
        """Return a copy of today's parameter."""
        return current(self).__deepcopy__(memo)


class _StandInParameter(_StandIn, nn.Parameter):
    """For one that was whole."""


class _StandInShard(_StandIn, DTensor):
    """For one that was sharded, before a switch."""


def current(value: Result) -> Result:
    """Return today's parameter for one of before; everything else as it is."""
    while isinstance(value, _StandIn):
        slot: Slot = value.__dict__[_SLOT]
        value = slot.parameter
    return value


def stand_in(old: nn.Parameter, slot: Slot) -> None:
    """Let a parameter that is replaced lead to what its place holds from now on."""
    if old is not slot.parameter:
        old.__class__ = _StandInShard if isinstance(old, DTensor) else _StandInParameter  # type: ignore[assignment]
        old.__dict__[_SLOT] = slot
