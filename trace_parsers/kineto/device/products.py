"""Floating-point operations of matrix products, by the shapes that a trace records for their operators."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from paro_advise.trace_parsers.kineto.events import DECODE_ERRORS, as_id, as_int

# Where an operator's two factors stand among its inputs: torch.addmm(input, mat1, mat2), torch.baddbmm likewise.
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
_MAX_FLOPS = 1e18  # of one operator; beyond it a size is damaged (a whole second of a thousand devices)
_KEPT_BYTES = 512  # of a text of shapes that is kept; longer ones are damaged or rare; assumed
_KEPT_SHAPES = 1024  # texts of shapes; a model repeats a few dozen of them, once a layer; assumed


class _ProductArgs(msgspec.Struct, gc=False):
    external_id: int | str | None = msgspec.field(name="External id", default=None)
    input_dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw(b"null"))


class _ProductEvent(msgspec.Struct, gc=False):
    name: str
    args: _ProductArgs | None = None


_DECODE = msgspec.json.Decoder(list[_ProductEvent])


class ProductColumns:
    """The products of a trace.

    Attributes:
        flops: floating-point operations by the external id of their operator; multiplying and adding count as two.
    """

    def __init__(self) -> None:
        self.flops: dict[int, float] = {}

    def extend(self, joined: bytes) -> None:
        """Add operators from ``[{...},{...}]``; what cannot be read says nothing about any product."""
        try:
            events = _DECODE.decode(joined)
        except DECODE_ERRORS:
            return
        for event in events:
            external = as_id(event.args.external_id) if event.args else -1
            found = product_flops(event.name, bytes(event.args.input_dims)) if event.args else None
            if external >= 0 and found:
                self.flops[external] = found


def product_flops(name: str, dims: bytes) -> float | None:
    """Return the floating-point operations of one product: 2 m n k, times the batch; None where shapes do not tell.

    Args:
        name: its operator, such as ``aten::mm``.
        dims: the shapes of its inputs as JSON, as the trace has them.
    """
    return (_flops_of if len(dims) <= _KEPT_BYTES else _flops_of.__wrapped__)(name, dims)


@lru_cache(maxsize=_KEPT_SHAPES)
def _flops_of(name: str, dims: bytes) -> float | None:
    place = _FACTORS.get(name)
    try:
        input_dims = msgspec.json.decode(dims)
    except DECODE_ERRORS:
        return None
    if place is None or not isinstance(input_dims, list) or len(input_dims) < place + 2:
        return None
    left, right = (_sizes(dims) for dims in input_dims[place : place + 2])
    if left is None or right is None or len(left) != len(right) or len(left) not in (2, 3) or left[-1] != right[-2]:
        return None
    flops = 2.0 * right[-1]
    for size in left:
        flops *= size
    return flops if 0 < flops < _MAX_FLOPS else None


def _sizes(dims: object) -> list[int] | None:
    sizes = [as_int(size) for size in dims] if isinstance(dims, list) else []
    known = [size for size in sizes if size is not None and size > 0]
    return known if known and len(known) == len(sizes) else None
