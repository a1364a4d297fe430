"""What is taken for a repeated step of a job that hangs, with unit and origin."""

from __future__ import annotations

MIN_REPEATED = 8  # collectives that must be alike in two steps for the third to be told from them; assumed
