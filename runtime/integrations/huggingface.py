"""Hugging Face's Trainer: a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from transformers import TrainerCallback

from paro_advise.runtime.capture.constants import DEFAULT_STEPS
from paro_advise.runtime.integrations.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paro_advise.runtime.integrations.trackers import Writer


class _Control(Protocol):
    """What is used here of transformers' TrainerControl."""

    should_training_stop: bool


class ParoCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Records a Trainer's run, lets it train under a plan, and reports at the end of training.

        Trainer(..., callbacks=[ParoCallback("after", plan="plan.json", before="before")])

    Args:
        folder, steps, plan, before: see Recording.
        writers: called with the figures at the end, for trackers that are not found by themselves.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        steps: str = DEFAULT_STEPS,
        *,
        plan: str | Path | None = None,
        before: str | Path | None = None,
        writers: Sequence[Writer] = (),
    ) -> None:
        self._recording = Recording(folder, steps, plan=plan, before=before)
        self._writers = writers

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begin to count steps."""
        self._recording.start()

    def on_step_end(self, _args: object, _state: object, control: _Control, **__: object) -> None:
        """Report after the last step: the Trainer's own callbacks close their runs at the end of training."""
        if control.should_training_stop:
            self._recording.stop(self._writers)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Report if nothing announced the last step."""
        self._recording.stop(self._writers)
