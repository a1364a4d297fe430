"""Limits of a capture. Each number: value, unit; meaning; origin."""

from __future__ import annotations

DEFAULT_STEPS = "10:13"  # FIRST:END; recorded without other request; assumed: start-up is over, 3 steps show the spread
DEFAULT_MAX_MB = 2000  # 1e6 bytes; largest trace of a rank before compression; assumed: fits beside a training job
EARLIEST_STEP = 2  # step; the first that can be recorded; the profiler warms up in the one before, from a step's end
MAX_RECORDED_STEPS = 100  # steps; most that a request may record; assumed: more would not fit DEFAULT_MAX_MB
BYTES_PER_EVENT = 400  # bytes; JSON of an event in a trace; assumed: typical ones take some 300, the limit counts more
COPY_BYTES = 1 << 20  # bytes; pieces in which a trace is compressed; assumed: far above the cost of a call
COMPRESSION_LEVEL = 5  # of gzip, 1 to 9; assumed: little time for most of the gain
REQUEST_LOOK_S = 1.0  # s; between two looks for a request to record; assumed: a file's date costs nothing then
STEPS_LEAD_S = 5.0  # s; from the choice of steps to their first, when all ranks have looked; five times REQUEST_LOOK_S
LEAD_STEPS = 10  # steps; likewise at least, of a job whose steps take seconds; assumed
RECENT_STEPS = 9  # steps whose median tells how many steps STEPS_LEAD_S takes; assumed
MAX_REQUEST_BYTES = 4096  # bytes; of a request that are read; one takes some 70
MAX_NAME = 64  # characters; of its folder's name; assumed
BATCH_STEPS = 50  # steps; read from a GPU at once, since each reading waits for it; assumed: a small loss at a crash
MAX_LOGGED_STEPS = 100_000  # steps; then nothing is logged any more; assumed: tens of MB of JSON a rank
