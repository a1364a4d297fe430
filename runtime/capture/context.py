"""Capture from inside a training script: a context and a call per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from paro_advise.errors import UsageError
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.messages import write_lines

if TYPE_CHECKING:
    from pathlib import Path

    from paro_advise.runtime.capture.recorder import Recorder


class capture:  # noqa: N801 - used as a function
    """Records steps of the training inside a ``with`` block.

        with capture("traces", steps="10:13") as recording:
            for batch in loader:
                ...
                optimizer.step()
                recording.step()

    Without a folder the environment's PARO_CAPTURE says where; if that is not set either, nothing
    is recorded and nothing imported. Inside ``paro-advise capture`` the block does nothing, since
    the whole process is captured already. A failure is reported on stderr and never reaches training.

    Args:
        folder: for ``rank{r}.json.gz`` and ``steps.rank{r}.jsonl``.
        steps: FIRST:END, counted from 0 at the start of the block.
    """

    def __init__(self, folder: str | Path | None = None, steps: str | None = None) -> None:
        self._recorder: Recorder | None = None
        self._request: CaptureRequest | None = None
        try:
            self._request = CaptureRequest.chosen(folder, steps)
        except UsageError as error:
            write_lines(*error.lines())

    def __enter__(self) -> Self:
        if self._request is not None:
            from paro_advise.runtime.capture.recorder import Recorder

            if Recorder.of_process is None:
                self._recorder = Recorder(self._request, explicit=True)
                self._recorder.start()
        return self

    def step(self) -> None:
        """Mark the end of a step."""
        if self._recorder is not None:
            self._recorder.step()

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
