"""Thresholds of the adapters (value, unit; meaning; origin), and a hint that several of them give."""

from __future__ import annotations

NOTICE_STEPS = 3  # steps; from a request to its switch; assumed: no host runs further ahead of its device
SAME_COUNT = 0.02  # of the parameters; how far plan and job may differ; assumed: covers padding of uneven shards
FAREWELL_S = 30.0  # s; rank 0 waits at its end for others to hear that it went on; assumed: a loaded machine's pause
FAREWELL_POLL_S = 0.01  # s; between two looks at who has
FIRST_PASS_POLL_S = (0.005, 0.5)  # s; between two looks at who begins to train, at first and later on; assumed
LONG_WAIT_S = 60.0  # s; until rank 0 says that it waits for others; assumed: a gathering takes less

# What to do where a script asks for what no plan can express
NO_PLAN = "run this script without a plan"
