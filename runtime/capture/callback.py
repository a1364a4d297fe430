"""Capture as a callback of Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.runtime.capture.context import capture

if TYPE_CHECKING:
    from pathlib import Path


def _base() -> type:
    try:
        from transformers import TrainerCallback
    except ImportError:
        return object
    base: type = TrainerCallback
    return base


class CaptureCallback(_base()):  # type: ignore[misc]  # transformers may be absent, so the base is chosen here
    """Records steps of a Trainer: ``Trainer(..., callbacks=[CaptureCallback("traces")])``.

    Args:
        folder, steps: see capture.
    """

    def __init__(self, folder: str | Path | None = None, steps: str | None = None) -> None:
        super().__init__()
        self._capture = capture(folder, steps)

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start."""
        self._capture.__enter__()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Count a step."""
        self._capture.step()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Write what has been recorded."""
        self._capture.__exit__()
