"""Limits and tolerances of reading logs: ``NAME = value  # unit; meaning; origin``."""

from __future__ import annotations

MAX_MESSAGE = 16 * 1024  # characters; longest message of NCCL; assumed
MAX_KEYS = 256  # names; most versions, transports or tuning choices; assumed
MAX_BENCHMARK_RANKS = 1 << 17  # ranks; most that a benchmark's header may list; assumed
MAX_COMMS_ENTRIES = 200_000  # entries; most of DeepSpeed's communication logger; assumed
MAX_VALUES = 2_000_000  # values; most step times or throughputs of a training log; assumed
MAX_FAULTS = 4096  # ranks; most whose fault is listed; assumed
MAX_LIST_TEXT = 4000  # characters; longest list of hosts or faults; assumed
MAX_HINTS = 4  # names; frameworks found before the search for more ends; assumed

# nccl-tests and DeepSpeed print two decimals: half of the last one, and a tenth more for the time's rounding (assumed).
PRINTED_ERROR = 0.0055  # unit printed; largest error of a printed bandwidth; 0.005 by the format, see above
ROUNDING_SLACK = 1e-9  # none; by which a computed group size may miss a whole number; assumed: float64 errs by 1e-15
MAX_TIME_ERROR = 0.01  # none; by which printed time and bandwidth of a row may differ; assumed
MIN_RATIO_GBPS = 0.1  # GB/s; slower rows give no busbw / algbw; assumed: two decimals are too few there
LARGE_GROUP = 1 << 20  # ranks; group at which the bus factor is taken for its limit; assumed
MAX_LINK_GBPS = 1000.0  # GB/s; faster transfers were not waited for; assumed: NVLink 5 carries 900 each way
MAX_PRINTED_SIZE = 1e6  # unit printed; larger sizes are not believed; assumed: units change at 1024
MAX_ODD_SHARE = 0.05  # none; characters that are no text in a text file; assumed

MAX_STEP_LOG_BYTES = 256 << 20  # bytes; largest step log; assumed
LOG_HEAD_BYTES = 4096  # bytes; what a step log or run.json is recognised by; assumed
MAX_US = 1e15  # us; longest time of a step, 31 years; assumed
MAX_VALUE = 1e150  # none; larger losses and norms count as not finite; their squares still fit a float64
MAX_COUNT = 1 << 62  # none; larger counts of a step are not believed; assumed
DOCKER_PART_BYTES = 16 << 10  # bytes; where Docker cuts a line (moby, daemon/logger/copier.go, defaultBufSize)
MAX_JOINED = 1 << 20  # characters of a line that was written in parts; assumed, far more than any line that is read
