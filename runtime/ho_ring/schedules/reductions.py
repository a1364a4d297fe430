"""Reductions as torch names them, and what they do to tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

from paro_advise.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    Combine: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    # ``ReduceOp.SUM`` is of the second type; torch makes the first of it where a setting is assigned.
    Reduction: TypeAlias = dist.ReduceOp | dist.ReduceOp.RedOpType


RING_REDUCTIONS = frozenset({dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX})


def combiner(op: Reduction, dtype: torch.dtype) -> Combine:
    """Return the function that combines a part into a total, in place.

    Args:
        op: SUM, AVG (whose caller divides at the end) or MAX.
        dtype: of the tensors.

    Raises:
        UsageError: the reduction is not supported.
    """
    if op not in RING_REDUCTIONS:
        raise UsageError(f"a reduction must be SUM, AVG or MAX, got {op}")
    if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
        raise UsageError(f"an average needs a floating-point type, got {dtype}", hint="use SUM and divide")
    return _take_maximum if op == dist.ReduceOp.MAX else torch.Tensor.add_


def _take_maximum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.maximum(total, part, out=total)


def scatter_options(op: Reduction) -> dist.ReduceScatterOptions:
    """Return the settings of a native reduce-scatter."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = op  # type: ignore[assignment]  # the stub leaves out the conversion that torch does
    return options


def reduce_options(op: Reduction) -> dist.AllreduceOptions:
    """Return the settings of a native all-reduce."""
    options = dist.AllreduceOptions()
    options.reduceOp = op  # type: ignore[assignment]  # see above
    return options


def reduction_of(options: dist.ReduceScatterOptions | dist.AllreduceOptions | None) -> Reduction:
    """Return the reduction that a collective's settings ask for: SUM without any."""
    if options is None:
        return dist.ReduceOp.SUM
    kind: dist.ReduceOp.RedOpType = options.reduceOp.op  # type: ignore[attr-defined]  # missing in the stub
    return kind


def replace_average(op: Reduction) -> Reduction:
    """Return SUM for AVG, whose caller divides at the end, and any other reduction as it is."""
    return dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
