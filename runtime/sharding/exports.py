"""Lets torch make programs of models that it trains under a strategy: TorchScript and ``torch.export``."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from paro_advise.errors import UsageError
from paro_advise.runtime.base_methods import wrap_once
from paro_advise.runtime.sharding.parameters.owned import gradient_of, set_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paro_advise.runtime.torch_types import AnyFunction

_PACKAGE = __name__.partition(".")[0]
# Where modules keep hooks around forward, which TorchScript compiles and export traces.
_REGISTRIES = ("_forward_hooks", "_forward_pre_hooks")


def watch_exports() -> None:
    """Leave our hooks out of what ``torch.jit.script`` and ``torch.export.export`` make of a model.

    Sharded parameters are refused: a program would hold this rank's rows.
    """
    for home, name, watching in ((torch.jit, "script", _scripting), (torch.export, "export", _exporting)):
        wrap_once(home, name, watching)


def _scripting(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def script(obj: object, optimize: object = None, _frames_up: int = 0, *args: object, **kwargs: object) -> object:
        with _bare(obj, "torch.jit.script"):
            # It looks names up where it is called, which is a frame further up.
            return original(obj, optimize, _frames_up + 1, *args, **kwargs)

    return script


def _exporting(original: AnyFunction) -> AnyFunction:
    @functools.wraps(original)
    def export(mod: object, *args: object, **kwargs: object) -> object:
        with _bare(mod, "torch.export.export"):
            return original(mod, *args, **kwargs)

    return export


def _is_ours(hook: object) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] == _PACKAGE


def _holds_ours(module: nn.Module) -> bool:
    return any(_is_ours(hook) for name in _REGISTRIES for hook in getattr(module, name).values())


@contextlib.contextmanager
def _bare(model: object, maker: str) -> Iterator[None]:
    """Take our hooks, and gradients, from a model meanwhile; nothing of either belongs to a program.

    Raises:
        UsageError: its parameters are sharded.
    """
    if not isinstance(model, nn.Module) or not any(map(_holds_ours, model.modules())):
        yield
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError(
            f"a program must be made of a model whose parameters are whole, got {maker} of one whose parameters are "
            "sharded",
            hint="load the state dict into a model of its own, or make it of a copy.deepcopy() of the model",
        )
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
