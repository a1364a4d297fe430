"""What our hooks and stand-ins have to do with torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from paro_advise.runtime.torch_types import AnyFunction

_P = ParamSpec("_P")
_R = TypeVar("_R")


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function run as it is where torch.compile meets it, as FSDP2's hooks and DDP's forward do."""
    wrapped: Callable[_P, _R] = torch._disable_dynamo(function)  # type: ignore[attr-defined]  # noqa: SLF001
    return wrapped


def taken_apart(module: nn.Module) -> tuple[nn.Module, AnyFunction | None]:
    """Return what ``torch.compile(module)`` was given, and what it does with functions; None if uncalled."""
    compiler = getattr(module, "dynamo_ctx", None)
    original = getattr(module, "_orig_mod", None)
    if compiler is None or original is None:
        return module, None
    return original, compiler
