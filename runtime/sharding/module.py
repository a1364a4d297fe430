"""What a user's model becomes: its own class with our methods mixed in."""

from __future__ import annotations

import copy
import copyreg
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.base_methods import stand_beneath
from paro_advise.runtime.hook_places import held_place
from paro_advise.runtime.mixins import beneath, mixed_in, without_first, without_second
from paro_advise.runtime.sharding.engine import FACTOR_SETTER, Engine
from paro_advise.runtime.sharding.parameters.fsdp2 import copied_module
from paro_advise.runtime.sharding.parameters.whole import saved_form
from paro_advise.runtime.sharding.states.whole_states import own_rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.runtime.sharding.parameters.units import Slot
    from paro_advise.runtime.torch_types import StateDict


class ShardedModule(nn.Module):
    """Mixed into the class of a user's model; FSDP2's flags mean the same here."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sums of the root's gradients by this."""
        engine_of(self).set_divide_factor(self, factor)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward pass is an accumulation boundary."""
        engine_of(self).gradients.set_synchronizes(enabled=is_last_backward)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters, up to date, as they rest on this rank."""
        engine = Engine.find(self)
        if engine is not None:
            engine.show_parameters()
        return super().named_parameters(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        """Do to buffers what ``cpu``, ``to`` and their like do; parameters stay where the strategy has them.

        Raises:
            UsageError: their type would change.
        """
        engine = Engine.find(self)
        if engine is None:
            moved: nn.Module = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # as torch declares it
            return moved
        for dtype in {slot.parameter.dtype for unit in engine.units for slot in unit.spec.slots}:
            probe = torch.zeros(1, dtype=dtype, device=engine.device)
            found = fn(probe)
            if found.dtype != dtype:
                raise UsageError(
                    f"parameters under a strategy must keep their type, {dtype}, got {found.dtype}",
                    hint="change the type before the first training pass, or compute under torch.autocast",
                )
            if found.device != probe.device:
                warnings.warn(
                    f"the model stays on {probe.device}: under a strategy it cannot be moved to {found.device}",
                    stacklevel=3,
                )
                return self
        for part in self.modules():
            for name, buffer in part.named_buffers(recurse=False):
                part._buffers[name] = fn(buffer)  # noqa: SLF001 - torch's own way
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a plain model with the same values, which trains and evaluates by itself.

        Raises:
            UsageError: this rank does not hold the whole model, and in the script's framework would not either.
        """
        engine = engine_of(self)
        is_sharded = engine.levels.parameter != Level.N
        if is_sharded and engine.whole_reader is None:
            raise UsageError(
                f"a copy needs the whole model on every rank, got one whose parameters are sharded by {engine.levels}",
                hint="save or copy model.state_dict(), or choose a strategy that replicates parameters (N..)",
            )
        engine.show_parameters()
        if is_sharded:
            memo.update(_whole_copies(engine))
        memo.update((id(hook), held_place) for hook in (*engine.hooks, _save_part))
        plain = without_second(type(self))
        copied = copied_module(self, without_second(plain) if issubclass(plain, FSDPModule) else plain, memo)
        for part in copied.modules():
            part.__dict__.pop(FACTOR_SETTER, None)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a plain model with the same values is pickled as, so that it can be read without this package.

        Its class may have a way of its own: NVIDIA's StyleGAN and EDM keep the source of the model's class in the file.

        Raises:
            UsageError: see ``__deepcopy__``.
        """
        plain = copy.deepcopy(self)
        way, *rest = plain.__reduce_ex__(protocol)
        if way is copyreg.__newobj__:  # type: ignore[attr-defined]  # pickle wants it to make this object's own class
            way, rest[0] = object.__new__, (type(plain),)
        return way, *rest

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add gradients up in backward passes inside this context."""
        engine = engine_of(self)
        before = engine.synchronizes
        engine.gradients.set_synchronizes(enabled=False)
        try:
            yield
        finally:
            engine.gradients.set_synchronizes(enabled=before)


_Methods = Mapping[str, Callable[..., Any]]  # by their names


def _zero_grad(torchs: _Methods, module: nn.Module, set_to_none: bool = True) -> None:
    """Forget all gradients."""
    engine_of(module).gradients.discard(to_none=set_to_none)
    torchs["zero_grad"](module, set_to_none)


def _state_dict(torchs: _Methods, module: nn.Module, *args: Any, **kwargs: Any) -> StateDict:
    """Return the parameters as they rest on this rank, after waiting for updates under way."""
    engine = engine_of(module)
    if engine.is_remade:  # as by prune.remove after training: what stands in the model is what it computes with
        engine.updates.finish()
        remade: StateDict = torchs["state_dict"](module, *args, **kwargs)
        return remade
    engine.show_parameters()
    found: StateDict = torchs["state_dict"](module, *args, **kwargs)
    if not kwargs.get("keep_vars"):
        names = _saved_names(torchs, module, found, kwargs.get("prefix", ""))
        for slot, value in _states_to_save(engine):
            for name in names[id(slot)]:
                found[name] = engine.place_state(value)
    return found


def _saved_names(torchs: _Methods, module: nn.Module, found: StateDict, prefix: str = "") -> dict[int, list[str]]:
    """Return by what names a state dict holds the parameter of each slot, by the slot's id.

    A wrapper's hook may leave its part out of them, as that of activation checkpoints does.
    """
    slots = [slot for unit in engine_of(module).units for slot in unit.spec.slots]
    names = {id(slot): [prefix + name for name in slot.aliases if prefix + name in found] for slot in slots}
    if all(names.values()):
        return names
    of_parameter: dict[int, list[str]] = {}
    for name, value in torchs["state_dict"](module, prefix=prefix, keep_vars=True).items():
        if name in found:
            of_parameter.setdefault(id(value), []).append(name)
    return {id(slot): names[id(slot)] or of_parameter.get(id(slot.parameter), []) for slot in slots}


def _load_state_dict(
    torchs: _Methods,
    module: nn.Module,
    state_dict: Mapping[str, Any],
    strict: bool = True,
    assign: bool = False,
) -> Any:
    """Take parameters and buffers, whole or sharded in any way, on all ranks; return torch's result.

    Raises:
        UsageError: they are to be put in place of the model's own, which its optimizer holds.
    """
    if assign:
        raise UsageError(
            "a state dict must be copied into a model that trains, got load_state_dict(assign=True): the optimizer "
            "would go on with the parameters of before",
            hint="leave assign out, or load before the first training pass",
        )
    engine = engine_of(module)
    if engine.whole_reader is not None:
        engine.whole_reader.before_load()
    engine.end_gathered_by_hand()
    engine.show_parameters()
    resting, taken = torchs["state_dict"](module), []
    names = _saved_names(torchs, module, resting)
    places = {
        name: (unit, place)
        for unit in engine.units
        for place, slot in enumerate(unit.spec.training)
        for name in names[id(slot)]
    }
    given = dict(state_dict)
    for name, value in state_dict.items():
        if name in places and value.shape == resting[name].shape:
            taken.append((places[name], value))
            given[name] = resting[name]
    result = torchs["load_state_dict"](module, given, strict)
    with torch.no_grad():
        for (unit, place), value in taken:
            unit.masters[place].copy_(own_rows_of(engine, unit, place, value))
    engine.updates.publish()
    engine.edits.note_all()
    return result


def _states_to_save(engine: Engine) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Return what a state dict holds in place of the parameters that the model computes with."""
    if engine.whole_reader is not None:
        yield from engine.whole_reader.parameters()
    elif engine.stands_for_fsdp2:
        engine.edits.before_step()
        yield from ((slot, saved_form(value)) for slot, value in engine.saved_forms())
    elif engine.settings.param_dtype is not None:
        engine.edits.before_step()
        for unit in engine.units:
            for place, slot in enumerate(unit.spec.training):
                yield slot, engine.arrangement.as_sharded(unit, place, engine.edits.to_save(unit, place))


def _whole_copies(engine: Engine) -> Iterator[tuple[int, nn.Parameter]]:
    """Gather the parameters that ranks share, on all of them or as rank 0 asks; yield whole ones by the ids of ours."""
    assert engine.whole_reader is not None
    for slot, value in engine.whole_reader.parameters():
        # Not what another parameter, or the model, is made of: a copy may be changed.
        yield id(slot.parameter), nn.Parameter(value.detach().clone(), requires_grad=slot.parameter.requires_grad)


def _save_part(part: nn.Module, found: StateDict, prefix: str, _: object) -> None:
    """Let the state dict of a part alone hold what that of the model does."""
    engine = None if prefix else Engine.of_part(part)
    if engine is None or any(isinstance(value, nn.Parameter) for value in found.values()):
        return  # a part of a larger state dict, of a copy, or of live parameters
    if not any(module is part for module in engine.model.modules()):
        return  # it has been taken out of the model
    engine.show_parameters()
    # Not by the names of when the model was sharded: peft's merge_and_unload() moves layers.
    names: dict[int, list[str]] = {}
    for name, parameter in nn.Module.named_parameters(part, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    shown = {id(slot): names.get(id(slot.parameter), []) for unit in engine.units for slot in unit.spec.slots}
    for slot, value in _states_to_save(engine):
        for name in shown[id(slot)]:
            if name in found:
                found[name] = engine.place_state(value)


def mark(model: nn.Module) -> None:
    """Add our methods to a model's class, and to torch's for it."""
    own: _Methods = {"zero_grad": _zero_grad, "state_dict": _state_dict, "load_state_dict": _load_state_dict}
    stand_beneath(nn.Module, own, applies=lambda module: Engine.find(module) is not None)
    for part in model.modules():
        is_plain = type(part).state_dict is nn.Module.state_dict
        if part is not model and is_plain and Engine.of_part(part) is None:
            part.register_state_dict_post_hook(_save_part)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with beneath(model):
        model.__class__ = mixed_in(ShardedModule, type(model))


def unmark(model: nn.Module) -> None:
    """Take our methods off a model's class."""
    with beneath(model):
        model.__class__ = without_first(type(model))


def engine_of(model: Any) -> Engine:
    """Return the engine of a sharded model.

    Raises:
        UsageError: it is not sharded.
    """
    engine = Engine.find(model)
    if engine is None:
        raise UsageError(
            f"the model must be sharded by paro_advise.runtime.shard, got a plain {type(model).__name__}",
        )
    return engine
