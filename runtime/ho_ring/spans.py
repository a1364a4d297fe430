"""Names collectives in profiles, so that a trace says what gloo's own rows do not.

Everything is in the name, such as ``paro_advise::all_gather Float 1024->4096 ranks 0:4:1``: torch
writes the arguments of a range into a trace only with ``record_shapes``, and never for threads that
it did not start.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

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
    """

    def __init__(self, name: str) -> None:
        self._event = torch._C._profiler._RecordFunctionFast(_PREFIX + name)  # noqa: SLF001 - a third of record_function's cost

    def __enter__(self) -> Self:
        with contextlib.suppress(RuntimeError):
            self._event.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(RuntimeError):
            self._event.__exit__(None, None, None)


def span(name: str, tensor: torch.Tensor, input_elements: int, output_elements: int, ranks: Sequence[int]) -> Span:
    """Return a context that names a collective in a profile.

    Args:
        name: the collective.
        tensor: for the element type.
        input_elements, output_elements: elements this rank gives and gets.
        ranks: global ranks of the group.
    """
    dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return Span(f"{name} {dtype} {input_elements}->{output_elements} ranks {_members(ranks)}")


def _members(ranks: Sequence[int]) -> str:
    """Return ranks as start:stop:stride, or one by one where they have no stride."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{stride}"
    return ",".join(map(str, ranks))
