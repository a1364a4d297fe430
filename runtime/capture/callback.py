"""Capture as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paro_advise.runtime.capture.context import capture
from paro_advise.runtime.capture.request import DEFAULT_STEPS

if TYPE_CHECKING:
    from pathlib import Path


def _base() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError:
        return object
    found: type = TrainerCallback
    return found


class CaptureCallback(_base()):  # type: ignore[misc]
    """Records steps of a Trainer: ``Trainer(..., callbacks=[CaptureCallback("traces")])``.

    Args:
        folder, steps: see capture.
    """

    def __init__(self, folder: str | Path | None = None, steps: str = DEFAULT_STEPS) -> None:
        super().__init__()
        self._capture = capture(folder, steps)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self._capture.__enter__()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count a step."""
        self._capture.step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Write what is there."""
        self._capture.__exit__()
