"""Operators for which DTensor has no rule, though each element is updated by itself, or one that fails.

Fused steps of optimizers run on this rank's rows as on any tensors. The largest element of a gradient is found
although some ranks hold no row of it. Means and norms that ranks have not added up yet are added up before they are
changed in place, as cautious optimizers do by ``mask.mean().clamp_(min=1e-3)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from paro_advise.runtime.torch_types import Arguments, Keywords

_aten = torch.ops.aten
# Fused SGD and Adagrad, and Rprop, which clears gradients whose sign has changed.
_STEPS = (_aten._fused_sgd_.default, _aten._fused_sgd_.tensor_lr, _aten._fused_adagrad_.default)
_MASKED = _aten.index_put_.default
_BY_ELEMENT = (
    _aten.abs_.default, _aten.clamp_.default, _aten.clamp_max_.default, _aten.clamp_min_.default,
    _aten.pow_.Scalar, _aten.reciprocal_.default, _aten.rsqrt_.default, _aten.sqrt_.default,
)  # fmt: skip
_EXTREMES = {_aten.max.default: "max", _aten.min.default: "min"}


def complete_operators() -> None:
    """Let these operators take DTensors of one layout."""
    handlers = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - torch's own losses register here too
    for operator in _STEPS:
        handlers.setdefault(operator, _run_local)
    handlers.setdefault(_MASKED, _put_local)
    for operator in _BY_ELEMENT:
        handlers.setdefault(operator, _change_each)
    for operator in _EXTREMES:
        handlers.setdefault(operator, _find_extreme)


def _run_local(op_call: OpOverload[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    return op_call(*tree_map(_local, args), **tree_map(_local, kwargs))


def _put_local(op_call: OpOverload[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    target, masks = args[0], args[1]
    for mask in masks:
        if not (isinstance(mask, DTensor) and mask.dtype == torch.bool and mask.placements == target.placements):
            raise NotImplementedError("DTensor takes masks of its own layout here, no other indices")
    _run_local(op_call, args, kwargs)
    return target


def _change_each(op_call: OpOverload[..., Any], args: Arguments, kwargs: Keywords) -> DTensor:
    target: DTensor = args[0]
    if any(place.is_partial() for place in target.placements):
        if target._is_view():  # noqa: SLF001 - what it is a view of would keep its parts
            raise RuntimeError(
                f"{op_call}: in-place operations that require placement changes are not supported in views"
            )
        whole = _added_up(target)
        target._local_tensor, target._spec = whole._local_tensor, whole._spec  # noqa: SLF001 - in place
    op_call(target._local_tensor, *args[1:], **kwargs)  # noqa: SLF001 - to_local() makes a view
    return target


def _find_extreme(op_call: OpOverload[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    tensor, name = args[0], _EXTREMES[op_call]
    local = tensor._local_tensor  # noqa: SLF001 - to_local() makes a view
    if any(place.is_partial() for place in tensor.placements):
        return op_call(_added_up(tensor), *args[1:], **kwargs)
    if not local.numel():
        limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
        found = local.new_full((), limits.min if name == "max" else limits.max)
    else:
        found = op_call(local)
    places = [Replicate() if place.is_replicate() else Partial(name) for place in tensor.placements]
    return DTensor.from_local(found, tensor.device_mesh, places, run_check=False)


def _added_up(tensor: DTensor) -> DTensor:
    """Return what the parts of all ranks come to."""
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001 - to_local() makes a view
