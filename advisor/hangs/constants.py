"""What is taken for a repeated step of a job that hangs, and for another job, with unit and origin."""

from __future__ import annotations

MIN_REPEATED = 8  # collectives that must be alike in two steps for the third to be told from them; assumed
OF_ANOTHER_RUN_S = 600.0  # s between the last collectives of two dumps from which they are of different runs; assumed
