"""Mixed precision as frameworks have it before a plan shards a model: what it may ask, and passes in 16 bits."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call

from paro_advise.errors import TrainingError
from paro_advise.runtime.adapters.constants import NO_PLAN
from paro_advise.runtime.sharding.parameters.replicated import cast_passes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from torch import nn
    from torch.distributed.fsdp import MixedPrecision

    from paro_advise.runtime.adapters.planned.wrapping import Wrapping


def check_precision(policy: MixedPrecision | None, module: nn.Module, *, wraps_by_policy: bool) -> None:
    """Refuse what FSDP1's mixed precision does with a model beside computing and reducing in its types.

    Args:
        policy: None for none.
        module: the model.
        wraps_by_policy: FSDP1 wraps its parts by a policy, and leaves classes in their own type as it does.

    Raises:
        TrainingError: it says what a plan would do otherwise.
    """
    if policy is None:
        return
    if policy.keep_low_precision_grads:
        raise TrainingError("a plan cannot express FSDP's keep_low_precision_grads", hint=NO_PLAN)
    if policy.param_dtype is None:
        return
    whole = tuple(policy._module_classes_to_ignore or ())  # noqa: SLF001 - has no public name
    left = next(
        (part for part in module.modules() if isinstance(part, whole) and any(True for _ in part.parameters())), None
    )
    if wraps_by_policy and left is not None:
        raise TrainingError(
            f"a plan cannot leave {type(left).__name__} in its own type, as FSDP's mixed_precision does",
            hint=f"train without param_dtype, or {NO_PLAN}",
        )


def cast_by(
    policy: MixedPrecision | None, module: nn.Module, parts: Collection[nn.Module | type[nn.Module]] | None
) -> tuple[nn.Module, ...]:
    """Return whose inputs FSDP1 casts: by default those of the whole model alone.

    Args:
        policy: None for none.
        module: the model.
        parts: of it that are wrapped, or classes of them; None where that is not known.

    Raises:
        TrainingError: inputs of parts are cast that are not known.
    """
    if policy is None or policy.param_dtype is None:
        return ()
    if not policy.cast_forward_inputs:
        return (module,) if policy.cast_root_forward_inputs else ()
    if parts is None:
        raise TrainingError(
            "a plan must know the parts whose inputs cast_forward_inputs casts, got a policy that names no class",
            hint="wrap by ModuleWrapPolicy, or leave cast_forward_inputs out",
        )
    classes = tuple(part for part in parts if isinstance(part, type))
    named = {id(part) for part in parts}
    return tuple(p for p in module.modules() if p is module or id(p) in named or isinstance(p, classes))


class BufferTypes:
    """Buffers as FSDP1's mixed precision has them: of another type from the first pass on, and saved in their own."""

    def __init__(self, dtype: torch.dtype | None, ignored: Iterable[nn.Module] | None) -> None:
        self._dtype = dtype
        self._ignored = {id(buffer) for part in ignored or () for buffer in part.buffers()}
        self._own: dict[str, torch.dtype] = {}

    def cast(self, buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Cast what is not of that type yet, of buffers by the names that state dicts have."""
        for name, buffer in buffers if self._dtype is not None else ():
            if buffer.is_floating_point() and buffer.dtype != self._dtype and id(buffer) not in self._ignored:
                self._own[name] = buffer.dtype
                buffer.data = buffer.to(self._dtype)

    def as_saved(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor, by its name in the module, as a state dict has it."""
        return value.to(self._own[name]) if name in self._own else value


def run_unsharded(module: nn.Module, wrapping: Wrapping, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Call a model that no training pass has sharded yet, in the type that its framework computes in.

    Under the plan itself passes without gradients may come before the first that makes some, and would else compute in
    the parameters' own type. The copies of parameters live as long as the pass.
    """
    dtype = wrapping.param_dtype
    if dtype is None or torch.is_grad_enabled():
        return module(*args, **kwargs)
    with ExitStack() as casts:
        for handle in cast_passes(wrapping.cast_modules, dtype, wrapping.output_dtypes):
            casts.callback(handle.remove)
        return functional_call(module, dict(_cast(module, wrapping, dtype)), args, kwargs)


def _cast(module: nn.Module, wrapping: Wrapping, dtype: torch.dtype) -> Iterable[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter not in wrapping.ignored and parameter.is_floating_point():
            yield name, parameter.to(dtype)
