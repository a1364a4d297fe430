"""Sizes of collectives: bytes of the full buffer in nccl-tests' convention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.core.collective import Op
from paro_advise.core.dtypes import dtype_bytes
from paro_advise.trace_parsers.kineto.constants import MAX_BUFFER_BYTES
from paro_advise.trace_parsers.kineto.events import as_int
from paro_advise.trace_parsers.kineto.gloo import total_elements

if TYPE_CHECKING:
    from paro_advise.trace_parsers.kineto.events import CommArgs

# Of these the larger side is the full buffer, of all others the input.
_TWO_SIDED = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.SEND, Op.RECV, Op.SEND_RECV, Op.GATHER, Op.SCATTER)


def buffer_bytes(op: Op, args: CommArgs) -> int | None:
    """Return the bytes of the full buffer, by counts or else by shapes, None when neither is recorded."""
    return _bytes_of_counts(op, args) or _bytes_of_shapes(args, op)


def _bytes_of_counts(op: Op, args: CommArgs) -> int | None:
    """Return the bytes of the full buffer by the recorded counts, None without them."""
    inputs, outputs = as_int(args.in_nelems), as_int(args.out_nelems)
    size = dtype_bytes(str(args.dtype)) if args.dtype else None
    if size is None or (inputs is None and outputs is None):
        return None
    elements = max(inputs or 0, outputs or 0) if op in _TWO_SIDED else (inputs or outputs or 0)
    return elements * size if 0 <= elements < MAX_BUFFER_BYTES else None


def recorded_dtype(args: CommArgs) -> str:
    """Return the first known element type of the recorded inputs, "" without one."""
    types = args.input_type if isinstance(args.input_type, list) else []
    return next((item for item in types if isinstance(item, str) and dtype_bytes(item)), "")


def _bytes_of_shapes(args: CommArgs, op: Op) -> int | None:
    """Return the bytes by the recorded input shapes; lists of tensors do not give the size of a gather's output."""
    sides = _elements_of_sides(args)
    if op == Op.UNKNOWN or not sides:
        return None
    if op in _TWO_SIDED and len(sides) > 1 and _cut_in(sides):
        elements = max(sides[:2])
    elif op == Op.ALL_GATHER:
        return None
    else:
        elements = sides[0]
    size = dtype_bytes(recorded_dtype(args) or "?")
    return elements * size if elements and size else None


def ranks_of_shapes(op: Op, args: CommArgs) -> int | None:
    """Return how many ranks a gather or scatter joins by the shapes of its two buffers, None where they do not tell."""
    if op not in (Op.ALL_GATHER, Op.REDUCE_SCATTER):
        return None
    sides = _elements_of_sides(args)
    return _cut_in(sides) if len(sides) > 1 else None


def _elements_of_sides(args: CommArgs) -> list[int]:
    """Return the elements of the first two recorded inputs, which are the buffers of a collective."""
    if not isinstance(args.input_dims, list):
        return []
    return [total_elements(dims) or 0 for dims in args.input_dims[:2]]


def _cut_in(sides: list[int]) -> int | None:
    """Return into how many equal parts the larger buffer is cut, None where it is not."""
    small, large = sorted(sides[:2])
    return large // small if small > 0 and large > small and large % small == 0 else None
