"""Names collectives in profiles, so that a trace says what gloo's own rows do not.

The keyword arguments of the event are written into the trace as they are (reference runtime,
section 5.2); they carry the names that NCCL's rows have.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Self

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

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


class Span:
    """A range in a profile, if one is being recorded.

    torch records threads that it did not start only under ``profile_all_threads`` and does not tell
    them whether it does; a range whose end finds another state than its start must not fail.

    Args:
        name: without prefix.
        arguments: strings and numbers.
    """

    def __init__(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        self._event = torch._C._profiler._RecordFunctionFast(_PREFIX + name, [], arguments or {})  # noqa: SLF001 - record_function drops arguments

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):
            self._event.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._event.__exit__(None, None, None)


def span(name: str, tensor: torch.Tensor, input_elements: int, output_elements: int, ranks: Sequence[int]) -> Span:
    """Return a context that appears as ``paro_advise::<name>`` in a profile.

    Args:
        name: the collective.
        tensor: for the element type.
        input_elements, output_elements: elements this rank gives and gets.
        ranks: global ranks of the group.
    """
    return Span(
        name,
        {
            "Collective name": name,
            "Process Group Ranks": "[" + ", ".join(map(str, ranks)) + "]",
            "Group size": len(ranks),
            "In msg nelems": input_elements,
            "Out msg nelems": output_elements,
            "dtype": _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch.")),
        },
    )
