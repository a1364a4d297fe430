"""Parameters whose ``.data`` a script may read, change and replace, as those of plain PyTorch.

Torch gives a new tensor with a version of its own at each ``parameter.data``, and drops what is assigned to
it where the parameter is a DTensor. Training scripts do both; here the first is noticed, the second works.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

import torch
from torch import nn
from torch.autograd import graph
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as optimizer_module
from torch.utils import _foreach_utils

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.parameters.whole import FrameworksShard, WholeTensor, allow_mixing, made_by_autograd

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.torch_types import AnyFunction

# Torch's own, below what is put in their place here.
_DATA: Any = torch._C.TensorBase.__dict__["data"]  # noqa: SLF001
_GRAD: Any = torch._C.TensorBase.__dict__["grad"]  # noqa: SLF001
_ALIAS = "_paro_data"
_ASSIGNED = "_paro_assigned"  # how often a script has put other values into a copy's place
_KEEPER = "_paro_keeper"
_RESTING = "_paro_resting"  # the parameter of which a gathered one is a copy
# Begins of names of attributes that are ours, torch's or Python's.
_NOT_THE_SCRIPTS = ("_paro", "_is_param", "_dynamo", "_fsdp", "__")
_OWN_REFERENCES = 3  # to an alias that no script holds: its parameter's, a variable's, and that of asking for them

_HOOKS = ", which would not be called where it is complete"
_INSTEAD = "change parameter.grad between backward and step, or train without a plan"


class Keeper(Protocol):
    """What holds the gradients of a model's parameters while they are added up.

    Attributes:
        is_of_fsdp2: for a script, parameters are DTensors of FSDP2's.
    """

    is_of_fsdp2: bool

    def before_read(self) -> None:
        """Complete the gradients as far as the script expects it."""

    def drop(self, parameter: torch.Tensor) -> None:
        """Forget what was added up for a parameter."""

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Tell whether a gradient that a script sets now is what the next step uses."""

    def refuse_hidden(self, parameter: torch.Tensor) -> None:
        """Refuse to show none where the script's framework would show what this rank has made."""


class Owned(torch.Tensor):
    """What parameters share that are ours."""

    @property
    def data(self) -> torch.Tensor:
        """Return one and the same view without autograd each time, so that its version tells of changes."""
        return _alias_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Write a value into the memory that the strategy has given to this parameter.

        Raises:
            UsageError: its shape is another one, or the script's framework would drop the value.
        """
        if value is self.__dict__.get(_ALIAS):
            return  # ``parameter.data *= 2`` has changed it in place
        keeper = keeper_of(self.of_model())
        if keeper is not None and keeper.is_of_fsdp2:
            raise UsageError(
                "a parameter of an FSDP2 script must be changed in place, got an assignment to its data, which plain "
                "FSDP2 drops without a word",
                hint="call parameter.copy_(values) under torch.no_grad()",
            )
        if value.shape != self.shape:
            raise UsageError(
                f"a parameter under a strategy must keep its shape, {tuple(self.shape)}, got {tuple(value.shape)}",
                hint="change the model before it is sharded",
            )
        _part_from_alias(self, value)
        with torch.no_grad():
            self.copy_(value)

    def of_model(self) -> torch.Tensor:
        """Return the parameter at rest that this one is, or stands for."""
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient as far as it is known to be complete."""
        keeper = keeper_of(self)
        if keeper is None:
            return gradient_of(self)
        keeper.before_read()
        found = gradient_of(self)
        if found is None:
            keeper.refuse_hidden(self)
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None also drops what micro-batches have added up elsewhere.

        Raises:
            UsageError: no backward pass has made one, so that what is set would go nowhere.
        """
        keeper = keeper_of(self)
        if value is None and keeper is not None:
            keeper.drop(self)
        if value is not None and keeper is not None and not keeper.keeps(self):
            raise UsageError(
                "a gradient under a strategy must be made by a backward pass that reduces it before it is set, got "
                "one for a parameter that has none (after zero_grad()), or whose passes were all inside no_sync()",
                hint="let the last backward pass reduce it, set it before zero_grad() drops what that pass made, or "
                "train without a plan",
            )
        set_gradient(self, value)

    def register_post_accumulate_grad_hook(self, hook: AnyFunction) -> RemovableHandle:  # noqa: ARG002 - as torch's own
        """Refuse a hook that would find no gradient: the strategy has taken it by then.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            f"a parameter under a strategy must have no hook on its finished gradient{_HOOKS}", hint=_INSTEAD
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Return what a plain parameter is saved as, so that it can be read without this package."""
        plain = nn.Parameter(self._as_framework_has_it(), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-any-return, no-untyped-call]  # torch's is untyped

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain parameter: a copy belongs to no strategy, and has no gradient, as torch's own copies."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self._as_framework_has_it().clone(), requires_grad=self.requires_grad)
        found: torch.Tensor = memo[id(self)]
        return found

    def _as_framework_has_it(self) -> torch.Tensor:
        """Return the values, whole where the script's framework has every rank hold them."""
        values = as_plain_tensor(self)
        if isinstance(values, DTensor) and WholeReads.are_saved_whole:
            assert isinstance(self, DTensor)
            return WholeReads.whole(values, of=self)
        return values


class OwnedWhole(Owned, WholeTensor):
    """This rank's rows of a parameter of the model."""

    def register_hook(self, hook: AnyFunction) -> RemovableHandle:  # noqa: ARG002 - as torch's own
        """Refuse a hook that would never be called: the gradient is put together from those of all ranks.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"a sharded parameter must have no hook on its gradient{_HOOKS}", hint=_INSTEAD)

    def refuse_none(self) -> None:
        """Refuse that torch.autograd.grad finds no gradient: a gathered copy has it. FSDP2's own finds none as well.

        Raises:
            UsageError: the script is not FSDP2's.
        """
        keeper = _keeper_in_any_pass(self)
        if keeper is not None and not keeper.is_of_fsdp2:
            raise made_by_autograd()


class OwnedTensor(Owned, nn.Parameter):
    """A parameter that every rank holds whole; FSDP2's scripts ask it for what DTensors have."""

    @property
    def full_tensor(self) -> Callable[[], torch.Tensor]:
        """Return what gives the parameter as a plain tensor: it is whole. Other scripts find no such method."""
        self._refuse_unless_of_fsdp2("full_tensor")
        return functools.partial(self.view_as, self)

    @property
    def to_local(self) -> Callable[[], NoReturn]:
        """Return what refuses this rank's rows, which FSDP2 would give. Other scripts find no such method."""
        self._refuse_unless_of_fsdp2("to_local")
        return _refuse_rows

    def _refuse_unless_of_fsdp2(self, name: str) -> None:
        known = self.__dict__.get(_KEEPER)
        keeper: Keeper | None = known() if known is not None else None
        if keeper is None or not keeper.is_of_fsdp2:
            raise AttributeError(f"a plain parameter has no attribute {name!r}", name=name, obj=self)


def _refuse_rows() -> NoReturn:
    raise UsageError(
        "a script must not take this rank's rows (to_local) of a parameter that the plan replicates: sums over its "
        "groups would differ",
        hint="take full_tensor(), or choose a strategy that shards parameters over all ranks (G..)",
    )


class Gathered(nn.Parameter):
    """The whole copy of a sharded parameter that FSDP2 fills for a pass, and frees after it."""

    @property
    def data(self) -> torch.Tensor:
        """Return one and the same view without autograd while the copy stays in place, so that its version tells."""
        return _alias_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if _is_same(value, self):  # as where `module.to(dtype)` has nothing to change
            return
        self.__dict__[_ASSIGNED] = self.__dict__.get(_ASSIGNED, 0) + 1
        _DATA.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the gradient of the parameter that rests meanwhile: a script may look at it before backward."""
        found = gradient_of(self)
        # Dynamo, which looks as well, takes a tensor and its gradient to be of one kind.
        is_compiled = torch._guards.CompileContext.current_compile_id() is not None  # noqa: SLF001 - has no public name
        resting = None if found is not None or is_compiled or is_in_backward() else self._resting()
        return found if resting is None else resting.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient of the copy; outside of backward that of the parameter that rests."""
        resting = None if is_in_backward() else self._resting()
        if resting is None or value is None:
            set_gradient(self, value)
        if resting is not None:
            resting.grad = value

    def __getattr__(self, name: str) -> object:
        """Return what a script has set on the parameter that rests meanwhile."""
        resting = None if name.startswith(_NOT_THE_SCRIPTS) else self._resting()
        if resting is not None and name in resting.__dict__:
            return resting.__dict__[name]
        raise AttributeError(f"a parameter has no attribute {name!r}", name=name, obj=self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain parameter, the same for this one as for the one that rests."""
        key = id(self) if self._resting() is None else id(self._resting())
        if key not in memo:
            memo[key] = nn.Parameter(_DATA.__get__(self).clone(), requires_grad=self.requires_grad)
        found: torch.Tensor = memo[key]
        return found

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """Return what a plain parameter is saved as."""
        plain = nn.Parameter(_DATA.__get__(self), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-any-return, no-untyped-call]  # torch's is untyped

    def _resting(self) -> torch.Tensor | None:
        known = self.__dict__.get(_RESTING)
        found: torch.Tensor | None = known() if known is not None else None
        return found


def resting_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the parameter that rests where one of the model is a gathered copy; others as they are."""
    found = parameter._resting() if isinstance(parameter, Gathered) else None  # noqa: SLF001 - of this module
    return parameter if found is None else found


def is_of_script(name: str) -> bool:
    """Tell whether an attribute of a parameter may be one that a script has set."""
    return not name.startswith(_NOT_THE_SCRIPTS)


def has_keeper(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is one of a model, whose gradients are kept."""
    return _KEEPER in parameter.__dict__


def mark_as_gathered(copy: nn.Parameter, resting: torch.Tensor) -> None:
    """Let a plain copy be one of a parameter that rests."""
    copy.__class__ = Gathered
    copy.__dict__[_RESTING] = weakref.ref(resting)


def _is_same(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether a tensor is a parameter's own memory, as it lies there."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        like = (value.dtype, value.device, value.shape, value.stride())
        return like == (parameter.dtype, parameter.device, parameter.shape, parameter.stride()) and (
            value.data_ptr() == parameter.data_ptr()
        )


def _alias_of(parameter: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor | None = parameter.__dict__.get(_ALIAS)
    if alias is None or address(alias) != address(parameter):  # FSDP2 may have moved it
        alias = parameter.__dict__[_ALIAS] = allow_mixing(_DATA.__get__(parameter))
    return alias


def _part_from_alias(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Let what a script has kept of ``parameter.data`` keep its values, before others are written.

    In plain PyTorch an assignment leaves the old memory to it: means of weights are put in and taken out again so.
    """
    alias: torch.Tensor | None = parameter.__dict__.get(_ALIAS)
    if alias is None or value is alias or sys.getrefcount(alias) <= _OWN_REFERENCES:
        return
    del parameter.__dict__[_ALIAS]
    if isinstance(alias, DTensor):
        alias._local_tensor = alias._local_tensor.clone()  # noqa: SLF001 - torch drops what is assigned to .data
    else:
        _DATA.__set__(alias, _DATA.__get__(alias).clone())


def as_plain_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's values as torch's own kind of tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - torch's documentation names it so
        values: torch.Tensor = parameter.detach()
    return values if isinstance(values, DTensor) else values.as_subclass(torch.Tensor)


def attributes_of(parameter: torch.Tensor) -> dict[str, object]:
    """Return what a script has set on a parameter."""
    return {name: value for name, value in parameter.__dict__.items() if is_of_script(name)}


def carry_attributes(attributes: Mapping[str, object], parameter: torch.Tensor) -> None:
    """Set on a parameter what a script has set on one that it replaces."""
    parameter.__dict__.update({name: value for name, value in attributes.items() if name not in parameter.__dict__})


def take_ownership(parameter: nn.Parameter, keeper: Keeper) -> nn.Parameter:
    """Make a parameter of the model ours, in place.

    Args:
        parameter: of the model.
        keeper: of its gradients.
    """
    parameter.__class__ = OwnedWhole if isinstance(parameter, DTensor) else OwnedTensor  # type: ignore[assignment]
    # The garbage collector does not see through a parameter's hooks; the model goes first.
    parameter.__dict__[_KEEPER] = weakref.ref(keeper)
    return parameter


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return what lies at a parameter as its gradient now."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - asked for each parameter, several times a step
        gradient: torch.Tensor | None = _GRAD.__get__(parameter)
    return gradient


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Put a gradient at a parameter, or take it off; nothing that was added up elsewhere is dropped."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        _GRAD.__set__(parameter, gradient)


def is_in_backward() -> bool:
    """Tell whether a backward pass is under way on this thread; checkpointed parts of the forward run again in it."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - has no public name


def is_in_nested_backward() -> bool:
    """Tell whether the backward pass of this thread runs inside another, as reentrant checkpoints' do."""
    # The engine's own threads, which serve devices, run Python only inside of a pass.
    passes = int(isinstance(threading.current_thread(), threading._DummyThread))  # noqa: SLF001 - has no public name
    frame = inspect.currentframe()
    while frame is not None:
        passes += frame.f_code is graph._engine_run_backward.__code__  # noqa: SLF001 - the door to every pass
        frame = frame.f_back
    return passes > 1


def free_replaced(parameter: torch.Tensor) -> None:
    """Free the memory of a parameter that another one has replaced, though a script may still hold it."""
    nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = nothing  # noqa: SLF001 - torch drops what is assigned to its data
    else:
        _DATA.__set__(parameter, nothing)


def keeper_of(parameter: torch.Tensor) -> Keeper | None:
    """Return what keeps the gradients of a parameter, for a script; FSDP2 itself looks at them inside of backward."""
    return None if is_in_backward() else _keeper_in_any_pass(parameter)


def _keeper_in_any_pass(parameter: torch.Tensor) -> Keeper | None:
    known = parameter.__dict__.get(_KEEPER)
    found: Keeper | None = known() if known is not None else None
    return found


def change_marker(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return a value that another one follows when a script changes an owned parameter in place."""
    alias: torch.Tensor | None = parameter.__dict__.get(_ALIAS)
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - asked for each parameter, several times a step
        in_place = parameter._version, alias._version if alias is not None else 0  # noqa: SLF001 - has no public name
    return *in_place, parameter.__dict__.get(_ASSIGNED, 0)


def is_value_of(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Tell whether a tensor is a parameter, or its ``.data``."""
    return tensor is parameter or tensor is parameter.__dict__.get(_ALIAS)


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies, of a sharded one this rank's part; 0 where it has none."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()  # noqa: SLF001


def let_lists_hold(*kinds: type[torch.Tensor]) -> None:
    """Let torch's optimizers work on lists of such parameters, as they do by default on a GPU.

    Torch asks for the exact class, and else takes one at a time, which costs the host ten launches for each
    (torch/optim/optimizer.py, _default_to_fused_or_foreach).
    """
    for known in (optimizer_module._foreach_supported_types, _foreach_utils._foreach_supported_types):  # noqa: SLF001
        known.extend(kinds)


let_lists_hold(OwnedWhole, OwnedTensor, WholeTensor, FrameworksShard)
