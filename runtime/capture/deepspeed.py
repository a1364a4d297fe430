"""Steps of DeepSpeed's engine, which calls its optimizers in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Concatenate

    import torch

    from paro_advise.runtime.capture.observer import Observer

_P = ParamSpec("_P")
_R = TypeVar("_R")


class DeepSpeedEngine(Protocol):
    """What is used here of DeepSpeed's engine."""

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next step() steps the optimizer."""

    def get_global_grad_norm(self) -> torch.Tensor | float | None:
        """Return the norm of the last gradients; None if it was not computed."""


def watch(module: ModuleType, observer: Observer) -> None:
    """Let the steps of all engines end the steps of an observer.

    Args:
        module: deepspeed.runtime.engine.
        observer: of this process.
    """
    cls = module.DeepSpeedEngine
    cls.__init__, cls.step = _watch_init(cls.__init__, observer), _watch_step(cls.step, observer)


def _watch_init(
    original: Callable[Concatenate[DeepSpeedEngine, _P], None], observer: Observer
) -> Callable[Concatenate[DeepSpeedEngine, _P], None]:
    def init(self: DeepSpeedEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        observer.engine = self
        original(self, *args, **kwargs)

    return init


def _watch_step(
    original: Callable[Concatenate[DeepSpeedEngine, _P], _R], observer: Observer
) -> Callable[Concatenate[DeepSpeedEngine, _P], _R]:
    def step(self: DeepSpeedEngine, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        ends = self.is_gradient_accumulation_boundary()
        result = original(self, *args, **kwargs)
        if ends:
            observer.end_step_of_engine(lambda: _norm_share(self))
        return result

    return step


def _norm_share(engine: DeepSpeedEngine) -> torch.Tensor | float | None:
    """Return this rank's share of the squared norm that the engine has computed, None if it has not."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else norm**2 / dist.get_world_size()
