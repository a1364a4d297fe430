"""Random numbers that an optimizer draws in its step: for the whole tensor on every rank, of which each keeps its part.

Outside of a step ``WholeTensor`` sees functions that draw. In one, parameters, gradients and states are plain DTensors,
of which torch lets each rank draw for its own rows: another whole than one process has, and generators that part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from paro_advise.runtime.sharding.parameters.reading import WholeReads
from paro_advise.runtime.sharding.parameters.windows import like

if TYPE_CHECKING:
    from torch._ops import OpOverload

    from paro_advise.runtime.torch_types import Arguments, Keywords, Result

_aten = torch.ops.aten


def _overloads(of: tuple[OpOverload[..., Result], ...]) -> tuple[OpOverload[..., Result], ...]:
    """Return operators with their overloads in this torch that take a generator, or write to an output."""
    names = (
        "generator", "low_generator_dtype", "out", "generator_out", "low_dtype_out", "low_generator_dtype_out",
        "float_out", "Tensor_float_out", "float_Tensor_out", "Tensor_Tensor_out",
    )  # fmt: skip
    packets = {operator.overloadpacket: None for operator in of}
    more = (getattr(packet, name, None) for packet in packets for name in names)
    return (*of, *(overload for overload in more if overload is not None))


# Whatever values they are given, they draw the same.
_BLIND = _overloads((
    _aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default, _aten.randint_like.low_dtype,
    _aten.bernoulli_.float, _aten.normal_.default, _aten.uniform_.default, _aten.random_.default,
    _aten.random_.to, getattr(_aten.random_, "from"), _aten.exponential_.default, _aten.cauchy_.default,
    _aten.log_normal_.default, _aten.geometric_.default,
))  # fmt: skip
# What they draw goes by the values.
_SEEING = _overloads((
    _aten.bernoulli.default, _aten.bernoulli.p, _aten.bernoulli_.Tensor, _aten.native_dropout.default,
    _aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor, _aten.poisson.default,
    _aten.binomial.default, _aten.multinomial.default,
))  # fmt: skip


def let_steps_draw_whole(*, enabled: bool) -> None:
    """Say that a step of an optimizer begins or has ended."""
    handlers = DTensor._op_dispatcher._custom_op_handlers  # noqa: SLF001 - torch's own losses register here too
    for operator in (*_BLIND, *_SEEING):
        if enabled:
            handlers.setdefault(operator, _draw)
        elif handlers.get(operator) is _draw:
            del handlers[operator]


def _draw(op_call: OpOverload[..., Result], args: Arguments, kwargs: Keywords) -> Result:
    """Draw for the whole of what is given, and return or write this rank's part."""
    given: list[DTensor] = [item for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor)]
    changed = kwargs.get("out", args[0] if args else None)
    is_mutable = op_call._schema.is_mutable  # noqa: SLF001 - has no public name
    first = target = changed if is_mutable and isinstance(changed, DTensor) else given[0]

    def whole(value: Result) -> Result:
        if not isinstance(value, DTensor):
            return value
        if op_call in _BLIND or value is kwargs.get("out"):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        return WholeReads.whole(value)

    def part(value: Result) -> Result:
        return like(value, target) if isinstance(value, torch.Tensor) and value.shape == target.shape else value

    if any(place.is_partial() for place in target.placements):
        places = [Replicate() if place.is_partial() else place for place in target.placements]
        target = target.redistribute(placements=places)
    found = op_call(*tree_map(whole, args), **tree_map(whole, kwargs))
    if not is_mutable or not isinstance(changed, DTensor):
        return tree_map(part, found)
    drawn = like(found, target)
    assert isinstance(drawn, DTensor)
    if target is not first:
        changed._spec = target._spec  # noqa: SLF001 - in place
    changed._local_tensor.copy_(drawn._local_tensor)  # noqa: SLF001 - to_local() makes a view
    return changed
