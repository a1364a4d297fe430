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
    """Return the bytes by the recorded input shapes; they do not give the size of a gather's output."""
    if op in (Op.ALL_GATHER, Op.UNKNOWN) or not isinstance(args.input_dims, list) or not args.input_dims:
        return None
    elements, size = total_elements(args.input_dims[0]), dtype_bytes(recorded_dtype(args) or "?")
    return elements * size if elements and size else None
