"""Which engine reads inputs, as users name it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EngineName(StrEnum):
    """What ``--engine`` takes."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"
    DASK = "dask"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChoice:
    """Where inputs are to be read.

    Attributes:
        name: of the engine.
        jobs: processes on this machine at most; None for all cores.
        max_array: tasks of a Slurm array at most; None for 1,000.
    """

    name: EngineName = EngineName.LOCAL
    jobs: int | None = None
    max_array: int | None = None
