"""Thresholds and assumptions of the collectives. Each line: value, unit; meaning; origin."""

from __future__ import annotations

# ---- schedules ----------------------------------------------------------------------------------

MIN_CHUNK_BYTES = 512 << 10  # bytes; smaller chunks cost more than overlap gains; assumed: tried, not recorded
MAX_CHUNKS = 16  # chunks; bounds the messages of a block; assumed: a sixteenth may stay exposed
BLOCKS_AHEAD = 2  # blocks; intra-node parts received ahead, bounds scratch memory; assumed: double buffering
CHUNKS_AHEAD = 1  # chunks; exchanged inside the node beyond the one on the ring; assumed: the least that overlaps
NUM_TAGS = 1 << 24  # message tags; then they repeat; assumed: far more than messages under way at once

# ---- calibration --------------------------------------------------------------------------------

SMALL_BYTES = 1 << 20  # bytes; below, times vary by a tenth between calibrations; assumed: observed, not recorded
SMALL_MARGIN = 0.85  # of the native time; a small message changes the algorithm below it; assumed: beyond that tenth
MARGIN = 0.95  # of the native time; the same for other messages; assumed: a gain of 5 % is worth a change
SIZES_BYTES = (4 << 10, 64 << 10, 512 << 10, 4 << 20)  # bytes; measured buffers; assumed: from latency to bandwidth
MIN_REPEATS = 3  # runs of each algorithm at a size, where one fits the budget; assumed: the fewest with a median
MAX_REPEATS = 25  # runs of each algorithm at a size, at most; assumed: more do not change the median
CALIBRATION_S = 0.4  # s; time budget of an operation's calibration; assumed: a start stays near 2 s (bench-ho-ring)
HELD_UP = 1.15  # times what the bytes explain that a run may take before it is run again; assumed: beyond usual noise

# ---- worker threads -----------------------------------------------------------------------------

WORKER_GRACE_S = 10.0  # s; wait for a worker thread whose jobs are done; assumed: it only frees memory by then
