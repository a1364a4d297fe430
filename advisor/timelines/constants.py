"""Bounds of timelines, with unit and reason."""

from __future__ import annotations

MAX_RANKS = 8  # ranks of a timeline; a reader compares two at a time
MAX_STEPS = 3  # steps of each: of median length, the longest and the shortest
LANE_BOXES = 1_000  # boxes of a rank's collectives in a step, the longest; with those of MAX_RANKS some 200 KB
TOLD_WAIT = 0.01  # share of a step from which a rank's waiting is worth a picture of its own; assumed
EXTREMES = 3  # ranks that compute longest, and likewise those that wait longest, which a timeline shows; assumed
