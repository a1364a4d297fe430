"""accelerate: a tracker, and settings of its profiler that this package reads in full."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerate.tracking import GeneralTracker
from accelerate.utils import ProfileKwargs

from paro_advise.runtime.capture.constants import DEFAULT_STEPS
from paro_advise.runtime.capture.request import CaptureRequest
from paro_advise.runtime.integrations.recording import Recording

if TYPE_CHECKING:
    from pathlib import Path


class ParoTracker(GeneralTracker):  # type: ignore[misc]  # accelerate is not followed by the type checker
    """Records a run, lets it train under a plan, and reports when the accelerator ends training.

        accelerator = Accelerator(log_with=[ParoTracker("after", plan="plan.json", before="before"), "wandb"])
        accelerator.init_trackers("run")
        ...
        accelerator.end_training()

    It stands first, so that it reports before other trackers close their runs.

    Args:
        folder, steps, plan, before: see Recording.
    """

    name = "paro_advise"
    requires_logging_directory = False
    main_process_only = False

    def __init__(
        self,
        folder: str | Path | None = None,
        steps: str | None = None,
        *,
        plan: str | Path | None = None,
        before: str | Path | None = None,
    ) -> None:
        self._recording = Recording(folder, steps, plan=plan, before=before)
        # accelerate starts and finishes trackers on rank 0 alone; the other ranks end theirs when the process ends.
        self._recording.start()
        super().__init__()

    @property
    def tracker(self) -> Recording:
        """Return what records."""
        return self._recording

    def start(self) -> None:
        """Do nothing: every rank has started."""

    def store_init_configuration(self, values: dict[str, object]) -> None:
        """Keep nothing: a capture holds what it needs."""

    def log(self, values: dict[str, object], step: int | None = None, **_: object) -> None:
        """Keep nothing: steps and losses are recorded as they happen."""

    def finish(self) -> None:
        """Report."""
        self._recording.stop()


def profile_settings(folder: str | Path, steps: str = DEFAULT_STEPS) -> ProfileKwargs:
    """Return settings for ``accelerator.profile()`` whose traces ``paro-advise analyze`` reads in full.

        with accelerator.profile(profile_settings("traces")) as profiler:
            ...
            profiler.step()  # after each step of the optimizer

    Args:
        folder: for the traces, one a rank.
        steps: FIRST:END, counted from 0 at the start of the block.

    Raises:
        UsageError: steps are no such range.
    """
    import torch

    request = CaptureRequest.of(folder, steps)
    return ProfileKwargs(
        activities=["cpu", *(["cuda"] if torch.cuda.is_available() else [])],
        schedule_option={
            "skip_first": request.first - 1,
            "wait": 0,
            "warmup": 1,
            "active": request.last - request.first,
            "repeat": 1,
        },
        record_shapes=True,
        output_trace_dir=str(request.folder),
    )
