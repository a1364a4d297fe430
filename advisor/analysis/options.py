"""What the user says about a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user says about the run.

    Attributes:
        gpus_per_node: ranks on a node, None to infer.
        tokens_per_step: tokens of all ranks in one step, for MFU.
        peak_tflops: dense peak of one device, None to look it up by name.
        skip_steps: warm-up steps left out at the start.
    """

    gpus_per_node: int | None = None
    tokens_per_step: int | None = None
    peak_tflops: float | None = None
    skip_steps: int = 0
