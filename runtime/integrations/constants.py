"""Bounds of what an integration does at the end of training, with unit and reason."""

from __future__ import annotations

# Rank 0 reports while others may wait for it in a collective; NCCL gives up after 600 s by default.
RANKS_WAIT_S = 60.0  # until the other ranks have written their traces; a trace of gigabytes takes a minute; assumed
RANKS_POLL_S = 0.2  # between two looks at how many have; assumed
REPORT_S = 240.0  # until a report is given up; reading runs at some 100 MB/s (make bench-analyze); assumed
