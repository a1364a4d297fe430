"""State dicts that a script took before the plan took its model over, and reads or saves later.

In plain PyTorch their tensors are the parameters' own memory and so follow the training, on which torchtitan's
checkpoints rely. Under a plan the parameters are others.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.utils.hooks import RemovableHandle

    from paro_advise.runtime.sharding.engine import Engine
    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import AnyFunction, Arguments, StateDict


class HandedOutStates:
    """The tensors of such state dicts, as long as the script holds them."""

    _of_module: ClassVar[weakref.WeakKeyDictionary[nn.Module, HandedOutStates]] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._values: list[tuple[weakref.ref[torch.Tensor], weakref.ref[nn.Parameter]]] = []
        self._handles: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()

    @classmethod
    def watching(cls, module: nn.Module) -> HandedOutStates | None:
        """Return who notes the state dicts of a module, None for others, such as its copies."""
        return cls._of_module.get(module)

    def watch(self, module: nn.Module) -> None:
        """Note what state dicts of a module hold from now on."""
        if module not in self._handles:
            self._handles[module] = module.register_state_dict_post_hook(_note)  # type: ignore[no-untyped-call]  # as torch declares it
            self._of_module[module] = self

    def note(self, value: torch.Tensor, parameter: nn.Parameter) -> None:
        """Note what a state dict holds of a parameter."""
        self._values.append((weakref.ref(value), weakref.ref(parameter)))

    def lead_to(self, engine: Engine, slots: Mapping[torch.Tensor, Slot]) -> None:
        """Let what the script still holds be the parameters of today, or say that it is not.

        Args:
            engine: of a model that a plan has sharded, or that was switched.
            slots: of the parameters of before.
        """
        for part in engine.model.modules():
            handle = self._handles.pop(part, None)
            if handle is not None:
                handle.remove()
                del self._of_module[part]
        forms = {slot.name: form for slot, form in engine.saved_forms()}
        own = {id(slot) for unit in engine.units for slot in unit.spec.slots}
        kept = []
        for known_value, known_parameter in self._values:
            value, parameter = known_value(), known_parameter()
            if value is None or parameter is None:
                continue
            kept.append((known_value, known_parameter))
            slot = slots.get(parameter)
            if slot is None or id(slot) not in own:
                continue
            form = forms[slot.name]
            if isinstance(value, DTensor) and isinstance(form, DTensor):
                value._local_tensor, value._spec = form._local_tensor, form._spec  # noqa: SLF001 - one tensor, wherever it is held
            elif value.data_ptr() != slot.parameter.data_ptr():
                value.__class__ = _OutdatedTensor
        self._values = kept


def _note(module: nn.Module, found: StateDict, prefix: str, _: object) -> None:
    """Note what a state dict holds: a hook that goes with a module when it is copied or pickled."""
    watching = HandedOutStates.watching(module)
    if watching is None:
        return
    named = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    # Wrappers, such as those of activation checkpointing, change names; only empty shards share an address.
    placed = {address: parameter for parameter in named.values() if (address := _address(parameter))}
    for name, value in found.items():
        parameter = named.get(name.removeprefix(prefix))
        if isinstance(value, torch.Tensor):
            parameter = parameter if parameter is not None else placed.get(_address(value))
            if parameter is not None and value is not parameter:
                watching.note(value, parameter)


def _address(tensor: torch.Tensor) -> int:
    """Return where the part of a tensor that this rank holds lies, 0 for nowhere."""
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001 - to_local() makes a view
    return held.data_ptr() if held.numel() else 0


class _OutdatedTensor(torch.Tensor):
    """What no longer follows the training."""

    @classmethod
    def __torch_function__(
        cls, func: AnyFunction, types: Iterable[type], args: Arguments = (), kwargs: Any = None
    ) -> NoReturn:
        """Refuse to be read.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "a state dict from before the first training pass does not follow the training where a plan shards "
            "parameters, got one that is read after it",
            hint="call state_dict() again where it is needed",
        )
