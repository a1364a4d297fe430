"""What is taken for a straggler, a link or a clock, with unit and origin."""

from __future__ import annotations

ALIGNMENT_ROUNDS = 8  # alternating medians of clock offsets; assumed: enough to settle
STRAGGLER_STEP_SHARE = 0.02  # of a step that the others must wait for a straggler; assumed: less is noise
STRAGGLER_STEPS_SHARE = 0.6  # of the steps in which it must lead the waiting; assumed
STRAGGLER_MIN_STEPS = 2  # steps; one may be an accident
STRAGGLER_WAIT_SHARE = 0.4  # of all waiting that it must cause; assumed
CAUSE_EXCESS_SHARE = 0.02  # of a step that it must spend more than the others for a cause to be named; assumed
LATENCY_BYTES = 64 << 10  # bytes on the wire below which a message is all latency on any link; assumed
IMPOSSIBLE_GBPS = 2000.0  # 1e9 bytes/s; NVLink 5 moves 1800 per GPU (data sheet), so more cannot be a transfer
MIN_SIZE_RATIO = 4.0  # between largest and smallest size for latency and bandwidth to be told apart; assumed
MAX_FITTED_SIZES = 64  # distinct sizes of a fit over pairs; neighbours share a bin beyond; bounds its time
