"""Bounds of what an integration does at the end of training, with unit and reason."""

from __future__ import annotations

WAIT_S = 120.0  # until the other ranks have written their traces; a trace of gigabytes takes a minute; assumed
POLL_S = 0.2  # between two looks at how many have; assumed
REPORT_S = 600.0  # until a report is given up; reading runs at some 100 MB/s (make bench-analyze); assumed
