"""Lets torch make programs of models that it trains under a strategy: TorchScript and ``torch.export``."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.sharding.parameters.owned import gradient_of, set_gradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_P = ParamSpec("_P")
_R = TypeVar("_R")
_WATCHED = "_paro_watched"
_PACKAGE = __name__.partition(".")[0]
# Where modules keep hooks around forward, which TorchScript compiles and export traces.
_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks")


def watch_exports() -> None:
    """Leave our hooks out of what ``torch.jit.script`` and ``torch.export.export`` make of a model.

    Sharded parameters are refused: a program would hold this rank's rows.
    """
    for home, name in ((torch.jit, "script"), (torch.export, "export")):
        setattr(home, name, _watching(getattr(home, name)))


def _watching(original: Callable[_P, _R]) -> Callable[_P, _R]:
    if hasattr(original, _WATCHED):
        return original

    @functools.wraps(original)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        model = args[0] if args else None
        if not isinstance(model, nn.Module) or not any(map(_holds_ours, model.modules())):
            return original(*args, **kwargs)
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            raise UsageError(
                f"a program must be made of a model whose parameters are whole, got {original.__name__} of one whose "
                "parameters are sharded",
                hint="load the state dict into a model of its own, or make it of a copy.deepcopy() of the model",
            )
        with _bare(model):
            return original(*args, **kwargs)

    setattr(made, _WATCHED, True)
    return made


def _is_ours(hook: object) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] == _PACKAGE


def _holds_ours(module: nn.Module) -> bool:
    return any(_is_ours(hook) for name in _REGISTRIES for hook in getattr(module, name).values())


@contextlib.contextmanager
def _bare(model: nn.Module) -> Iterator[None]:
    """Take our hooks, and gradients, from a model meanwhile; nothing of either belongs to a program."""
    kept = [(module.__dict__, name, module.__dict__[name]) for module in model.modules() for name in _REGISTRIES]
    gradients = [(parameter, gradient_of(parameter)) for parameter in model.parameters()]
    try:
        for table, name, hooks in kept:
            table[name] = type(hooks)((number, hook) for number, hook in hooks.items() if not _is_ours(hook))
        for parameter, _ in gradients:
            set_gradient(parameter, None)
        yield
    finally:
        for table, name, hooks in kept:
            table[name] = hooks
        for parameter, gradient in gradients:
            set_gradient(parameter, gradient)
