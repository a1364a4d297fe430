"""Bounds of slices, with unit and reason."""

from __future__ import annotations

MARKER_PID = 999_999  # process id of added tracks in a slice of one rank; above any real one of a trace
MAX_MERGED_RANKS = 64  # ranks in one slice; a viewer shows no more tracks that people can compare
PIDS_PER_RANK = 1_000  # process ids that a rank has in a slice of several; a trace has one per device and process
EVENT_SEPARATOR_BYTES = 2  # between two events in a file
SLICE_MAX_MB = 10.0  # MB; of a slice without other request; assumed: what an issue tracker takes as an attachment
