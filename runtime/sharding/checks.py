"""What a model and its optimizer must be for a strategy; asked before anything changes."""

from __future__ import annotations

import functools
import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.policies.strategy import Level
from paro_advise.runtime.base_methods import wrap_once
from paro_advise.runtime.sharding.optimizers.parameters import is_of_optimizer
from paro_advise.runtime.sharding.parameters.owned import Gathered, OwnedWhole
from paro_advise.runtime.sharding.parameters.whole import current
from paro_advise.runtime.sharding.phases.lost_gradients import has_node_hooks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paro_advise.policies.strategy import Strategy
    from paro_advise.runtime.sharding.parameters.units import Slot, UnitSpec
    from paro_advise.runtime.sharding.settings import Settings
    from paro_advise.runtime.torch_types import AnyFunction

# FSDP2's interface for what we do with it is complete since the first, and the tests have run with the others
# (docs/runtime.md, versions of torch).
_MIN_TORCH, _TESTED_TORCH = (2, 11), ((2, 13), (2, 14))
_CREATES_GRAPH = 2  # its place among what torch's engine takes behind the outputs
# They look at whole rows and columns of a parameter, of which a rank has a part.
_NEED_WHOLE = ("adafactor", "shampoo", "distributedshampoo", "soap")


def torch_version() -> tuple[int, ...]:
    """Return torch's major and minor number."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def untested_torch() -> str:
    """Say that the tests have not run with this version of torch, "" where they have."""
    first, last = _TESTED_TORCH
    if first <= torch_version() <= last:
        return ""
    tested = " to ".join(".".join(map(str, version)) for version in _TESTED_TORCH)
    age = "older" if torch_version() < first else "newer"
    return f"torch {torch.__version__} is {age} than what this is tested with, {tested}"


def check(
    specs: Sequence[UnitSpec], optimizers: Sequence[torch.optim.Optimizer], settings: Settings, levels: Strategy
) -> None:
    """Refuse what cannot be.

    Raises:
        UsageError: torch is too old; gradients would overflow or lose digits; hooks would be lost; the optimizer
            needs what a rank does not have.
    """
    if torch_version() < _MIN_TORCH:
        raise UsageError(f"torch must be {_MIN_TORCH[0]}.{_MIN_TORCH[1]} or later, got {torch.__version__}")
    for spec in specs:
        _check_types(spec, settings)
        for slot in spec.slots:
            _check_hooks(slot, settings, levels)
    _check_gradients(specs[-1].module)
    for optimizer in optimizers:
        _check_optimizer(optimizer, levels)
        _check_groups(optimizer, frozenset(specs[-1].ignored.values()), levels)


def _check_gradients(model: nn.Module) -> None:
    sparse = next((name for name, part in model.named_modules() if getattr(part, "sparse", None) is True), None)
    if sparse is not None:
        raise UsageError(
            "gradients must be dense, got a module with sparse=True", where=sparse, hint="make it with sparse=False"
        )


def _check_optimizer(optimizer: torch.optim.Optimizer, levels: Strategy) -> None:
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "a sharded optimizer must call its closure once, got LBFGS, which calls it several times",
            hint="choose another optimizer, or train without a plan",
        )
    if levels.optimizer != Level.N and any(cls.__name__.lower() in _NEED_WHOLE for cls in type(optimizer).__mro__):
        raise UsageError(
            f"an optimizer of sharded states must update each element by itself, got {kind}",
            hint="choose NNN, which keeps the states whole, or another optimizer",
        )


def _check_groups(optimizer: torch.optim.Optimizer, ignored: Collection[torch.Tensor], levels: Strategy) -> None:
    """Refuse groups whose kernels take all parameters at once, of which some would be sharded."""
    for group in optimizer.param_groups:
        at_once = [name for name in ("foreach", "fused") if group.get(name)]
        own = [parameter in ignored for parameter in group["params"]]
        if at_once and levels.optimizer != Level.N and any(own) and not all(own):
            raise UsageError(
                f"a group of an optimizer with {at_once[0]}=True must hold sharded parameters or others, got both: "
                "ignored ones and those without a dimension are not sharded",
                hint=f"give the others a group of their own, or leave {at_once[0]} out",
            )


def _check_types(spec: UnitSpec, settings: Settings) -> None:
    types = {slot.dtype for slot in spec.training}
    if (settings.reduce_dtype or settings.param_dtype) == torch.float16 or (
        torch.float16 in types and settings.reduce_dtype is None and settings.param_dtype is None
    ):
        raise UsageError(
            "gradients must be reduced in float32 or bfloat16, got float16, which overflows",
            hint="pass reduce_dtype=torch.float32",
        )
    if len({slot.dtype for slot in spec.slots}) > 1 and len(types) > 1 and settings.param_dtype is None:
        raise UsageError(
            f"the parameters of a unit must have one type, got {', '.join(sorted(map(str, types)))} in "
            f"{spec.name or 'the root'}",
            hint="pass param_dtype, or choose units that do not mix types",
        )


def _check_hooks(slot: Slot, settings: Settings, levels: Strategy) -> None:
    parameter, is_sharded = slot.parameter, levels.parameter != Level.N
    stays = not is_sharded and settings.param_dtype in (None, slot.dtype) and not isinstance(parameter, DTensor)
    hooks = [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]  # noqa: SLF001
    if not stays and (hooks or (parameter.requires_grad and has_node_hooks(parameter))):
        raise UsageError(
            f"a parameter under a strategy must have no hooks on its gradient here, got some on {slot.name}",
            where=slot.name,
            hint="remove them" + (", or choose a strategy that replicates parameters (N..)" if is_sharded else ""),
        )


# What torch's operators say of a tensor that autograd has kept of a parameter whose memory is freed: views and copies,
# and those that ask for its address, such as convolutions.
_FREED = ("out of bounds for storage of size 0", "its data is not allocated yet")


def watch_chosen_inputs() -> None:
    """Refuse backward passes that are asked for the gradients of some sharded parameters only.

    Autograd knows the gathered parameters, not the sharded ones that a script holds: it would make no gradient at all.
    """
    wrap_once(torch.autograd, "backward", _refusing_chosen_inputs)


def _refusing_chosen_inputs(original: AnyFunction) -> AnyFunction:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        chosen = signature.bind(*args, **kwargs).arguments.get("inputs") or ()
        chosen = [chosen] if isinstance(chosen, torch.Tensor) else chosen
        if any(isinstance(current(item), OwnedWhole) or is_of_optimizer(item) for item in chosen):
            raise UsageError(
                "a backward pass must make the gradients of all sharded parameters, got inputs: some of them, or the "
                "optimizer's own",
                hint="leave inputs out and clear the gradients that are not wanted, or choose a strategy N..",
            )
        original(*args, **kwargs)

    return backward


def watch_kept_parameters() -> None:
    """Refuse gradients of gradients that need sharded parameters, which are freed after a pass.

    Operators that do not look whether what autograd has kept is still there would read memory that is not theirs.
    """
    wrap_once(torch.autograd, "_engine_run_backward", _watching_what_is_kept)  # the door to every pass


def _watching_what_is_kept(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def run_backward(
        outputs: Sequence[torch.Tensor | torch.autograd.graph.GradientEdge], *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, ...]:
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
            whole = tensor._base if tensor._is_view() else tensor  # noqa: SLF001 - what a view is of has no public name
            if isinstance(whole, Gathered):
                storage = whole.untyped_storage()
                kept[storage._cdata] = storage  # noqa: SLF001
            return tensor, tensor._version  # noqa: SLF001

        # Transforms of torch.func forbid these hooks.
        watches = args[_CREATES_GRAPH] and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]  # noqa: SLF001
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, _unchanged) if watches else nullcontext()
        try:
            with hooks:
                found: tuple[torch.Tensor, ...] = original(outputs, *args, **kwargs)
            is_freed = any(not storage.size() for storage in kept.values())
        except RuntimeError as error:
            if any(said in str(error) for said in _FREED):
                raise _freed() from error
            raise
        finally:
            kept.clear()  # the graph that is made holds the hook
        if is_freed:
            raise _freed()
        return found

    return run_backward


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return what autograd has kept; torch itself asks for its version only where nothing hooks it."""
    tensor, version = kept
    if tensor._version != version:  # noqa: SLF001 - has no public name
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "  # noqa: SLF001
            f"expected version {version} instead"
        )
    return tensor


def _freed() -> UsageError:
    return UsageError(
        "a gradient of gradients must find the parameters that it needs, got sharded ones that each pass frees "
        "(create_graph=True, such as for a gradient penalty, or a pass within a pass)",
        hint="choose a strategy that replicates parameters (N..)",
    )
