"""Names collectives in profiles, so that a trace says what gloo's own rows do not.

The keyword arguments of the event are written into the trace as they are (reference runtime,
section 5.2); they carry the names that NCCL's rows have.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

_PREFIX = "paro_advise::"
_DTYPE_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint8: "Byte",
}


def span(
    name: str, tensor: torch.Tensor, input_elements: int, output_elements: int, ranks: Sequence[int]
) -> AbstractContextManager[Any]:
    """Return a context that appears as ``paro_advise::<name>`` in a profile; free without profiler.

    Args:
        name: the collective.
        tensor: for the element type.
        input_elements, output_elements: elements this rank gives and gets.
        ranks: global ranks of the group.
    """
    if not torch.autograd._profiler_enabled():  # noqa: SLF001 - the only way to ask
        return nullcontext()
    members = "[" + ", ".join(map(str, ranks)) + "]"
    event: AbstractContextManager[Any] = torch._C._profiler._RecordFunctionFast(  # noqa: SLF001 - record_function drops arguments
        _PREFIX + name,
        [],
        {
            "Collective name": name,
            "Process Group Ranks": members,
            "Group size": len(ranks),
            "In msg nelems": input_elements,
            "Out msg nelems": output_elements,
            "dtype": _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
        },
    )
    return event
