"""Hugging Face's Trainer: a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import TrainerCallback

from paro_advise.runtime.integrations.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paro_advise.runtime.integrations.trackers import Writer


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
        steps: str | None = None,
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

    def on_log(self, *_: object, logs: Mapping[str, object] | None = None, **__: object) -> None:
        """Report after the last log of a training: the Trainer's own callbacks close their runs right after it."""
        if "train_loss" in (logs or {}):
            self._recording.stop(self._writers)

    def on_train_end(self, *_: object, **__: object) -> None:
        """Report if there was no such log."""
        self._recording.stop(self._writers)
