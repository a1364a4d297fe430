"""Steps of DeepSpeed's engine, which calls its optimizers in its own way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from types import ModuleType

    from paro_advise.runtime.capture.observer import Observer


def watch(module: ModuleType, observer: Observer) -> None:
    """Let the steps of all engines end the steps of an observer.

    Args:
        module: deepspeed.runtime.engine.
        observer: of this process.
    """
    cls = module.DeepSpeedEngine
    original_init, original_step = cls.__init__, cls.step

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        observer.engine = self
        original_init(self, *args, **kwargs)

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        ends = self.is_gradient_accumulation_boundary()
        found = original_step(self, *args, **kwargs)
        if ends:
            observer.guarded_end(lambda: _norm_share(self))
        return found

    cls.__init__, cls.step = init, step


def _norm_share(engine: Any) -> torch.Tensor | float | None:
    """Return this rank's share of the squared norm that the engine has computed, None if it has not."""
    norm = engine.get_global_grad_norm()
    return None if norm is None else norm**2 / dist.get_world_size()
