"""How changes of a running job are told from chance, with unit and reason."""

from __future__ import annotations

WATCH_WARM_UP_STEPS = 10  # steps at the start that count for nothing; assumed: compilation, caches, allocators
BASELINE_STEPS = 60  # steps before the newest ones that these are compared with; assumed
LEAST_BASELINE = 30  # steps without which nothing is judged, by the first pair of EXCEEDANCES only; assumed
# The first pair is soon, the others allow for more pauses in the baseline (checkpoints, evaluation).
EXCEEDANCES = ((7, 3), (10, 5), (20, 15))  # m newest steps slower than the k-th slowest of the baseline; assumed
RUN_STEPS = EXCEEDANCES[0][0]  # steps by which an alarm follows a change at the least
LEAST_SLOWDOWN = 1.05  # of the baseline's median that the newest steps' median must exceed; assumed
HOST_EXCESS = 1.2  # times as long as before, and as other ranks, that a rank's host must work to be named; assumed
RECORDED_STEPS = 3  # steps of a recording that is asked for; as many as a capture records by itself
MOST_WAITED_STEPS = 500  # steps after its last one that a recording may be late; a device logs 50 at once; assumed
ENDED_S = 120.0  # s without a step after which a job counts as ended where a recording is waited for; assumed
KEPT_STEPS = 200  # steps that `watch` keeps once all ranks have logged newer ones; far above any baseline
SHOWN_STEPS = 30  # newest steps that a metric of a running job is of; as LEAST_BASELINE
CANARY_STEPS = 30  # steps before and after a switch that judge it; as LEAST_BASELINE
CANARY_TIMEOUT_S = 600.0  # s to wait for the answer to a switch, and for each step after it; as of `switch`
LOGGED_AT_ONCE = 60  # steps that a device may log at once, and some more; runtime/capture/constants.py, BATCH_STEPS
GROWTH_LOOK_S = 0.2  # s between two looks at logs that must grow; assumed
LOGS_POLL_S = 5.0  # s between two looks at the logs; assumed
