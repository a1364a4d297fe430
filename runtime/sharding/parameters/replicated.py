"""Parameters that every rank holds whole: gradients are taken as backward makes them."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.utils import _apply_to_tensors

from paro_advise.errors import UsageError
from paro_advise.runtime.hook_places import take_held_place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.parameters.units import UnitSpec

_Values = TypeVar("_Values")


class ReplicatedUnits:
    """Notices when the gradients of a unit are complete.

    Units are delivered in one order on all ranks, last first, as in DDP; those that backward did
    not reach come when it ends.

    Args:
        units: in forward order.
        deliver: gets the place of a unit whose gradients are complete.
        started: called when a backward pass brings its first gradient.
        arrived: called when a gradient is there.
    """

    def __init__(
        self,
        units: list[UnitSpec],
        deliver: Callable[[int], None],
        *,
        started: Callable[[], None],
        arrived: Callable[[], None],
    ) -> None:
        self._units = units
        self._deliver = deliver
        self._started = started
        self._arrived = arrived
        self._waiting: list[set[str]] = []
        self._next = -1
        self._running = False
        self._handles: list[RemovableHandle] = []
        for place, unit in enumerate(units):
            for slot in unit.training:
                # What is on show must be off a parameter before autograd adds to it.
                self._handles.append(slot.parameter.register_hook(self._first_hook()))  # type: ignore[no-untyped-call]  # as torch declares it
                hook = self._hook(place, slot.name)
                handle = torch.Tensor.register_post_accumulate_grad_hook(slot.parameter, hook)  # type: ignore[no-untyped-call]  # as torch declares it
                self._handles.append(handle)

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def finish(self) -> None:
        """Deliver what is left at the end of a backward pass."""
        while self._next >= 0:
            self._deliver_next()
        self._running = False

    def abandon(self) -> None:
        """Forget a backward pass that an exception has left."""
        self._next = -1
        self._running = False

    def take(self, place: int, name: str) -> None:
        """Note that the gradient of a parameter has come.

        Raises:
            UsageError: for the second time.
        """
        self.begin()
        self._arrived()
        if place > self._next:
            raise UsageError(
                f"a parameter must get its gradient once in a backward pass, got a second one for {name}",
                where=name,
                hint="use torch.utils.checkpoint with use_reentrant=False",
            )
        self._waiting[place].discard(name)
        while self._next >= 0 and not self._waiting[self._next]:
            self._deliver_next()

    def begin(self) -> None:
        """Note that a gradient comes, before autograd adds it to a parameter's."""
        if self._running:
            return
        self._waiting = [{slot.name for slot in unit.training} for unit in self._units]
        self._next = len(self._units) - 1
        self._running = True
        self._started()

    def _hook(self, place: int, name: str) -> Callable[[torch.Tensor], None]:
        # The garbage collector does not see what a parameter's hooks hold.
        owner = weakref.ref(self)

        def notice(_: torch.Tensor) -> None:
            units = owner()
            if units is not None:
                units.take(place, name)

        return notice

    def _first_hook(self) -> Callable[[torch.Tensor], None]:
        owner = weakref.ref(self)

        def notice(_: torch.Tensor) -> None:
            units = owner()
            if units is not None:
                units.begin()

        return notice

    def _deliver_next(self) -> None:
        place, self._next = self._next, self._next - 1
        self._deliver(place)


def cast_passes(
    inputs: Iterable[nn.Module], dtype: torch.dtype | None, outputs: Mapping[nn.Module, torch.dtype]
) -> Iterator[RemovableHandle]:
    """Have floating-point inputs and outputs of modules cast, as FSDP2's mixed precision does. Yield what ends that.

    Args:
        inputs: modules whose inputs are cast.
        dtype: to which; None for none.
        outputs: types by the module whose outputs are cast to them.
    """
    for module in inputs:
        if dtype is None:
            break
        handle = module.register_forward_pre_hook(partial(_cast_inputs, dtype), prepend=True, with_kwargs=True)
        take_held_place(module._forward_pre_hooks, handle.id)  # noqa: SLF001 - a module's hooks have no public names
        yield handle
    for module, output_dtype in outputs.items():
        # Before the hooks of a script, most of which it registers on what its framework has wrapped already.
        handle = module.register_forward_hook(partial(_cast_output, output_dtype), prepend=True)
        take_held_place(module._forward_hooks, handle.id)  # noqa: SLF001
        yield handle


def _cast_inputs(
    dtype: torch.dtype, _: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: nn.Module, __: tuple[object, ...], output: _Values) -> _Values:
    return _cast(output, dtype)


def _cast(values: _Values, dtype: torch.dtype) -> _Values:
    def cast(value: object) -> object:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    found: _Values = _apply_to_tensors(cast, values)  # as FSDP does, in dataclasses as well
    return found
