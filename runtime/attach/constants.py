"""Limits of attaching. Each number: value, unit; meaning; origin."""

from __future__ import annotations

GATHER_S = 17.0  # s; in which each asks: every 5 s, retried for 10.2 s; kineto Config.cpp, dynolog FabricManager.h
START_LEAD_S = 14.0  # s; from the choice of a start to it, in which each asks again: twice 5 s, TOO_LATE_S and more
TOO_LATE_S = 2.5  # s; before a start, from which a process may refuse it: WARM_UP_S and a look once a second
WARM_UP_S = 1  # s; of the profiler before its start, a whole number; assumed: starting a GPU's tracing takes less
TRACE_WAIT_S = 120.0  # s; for the trace of one process after its end; assumed: JSON of some hundred MB
DEFAULT_SECONDS = 3.0  # s; recorded without other request; assumed: a few steps of most jobs
MOST_SECONDS = 600.0  # s; recorded at most; assumed: more does not fit the memory of a training process
MOST_AHEAD_S = 3600.0  # s; from now to a start that is asked for; assumed: nobody waits longer at a terminal
MAX_MESSAGE_BYTES = 65536  # bytes; of a datagram that are read; a question of a process takes some hundred
MAX_PROCESSES = 4096  # processes that may ask; assumed: more than run on any node
TRACE_POLL_S = 0.2  # s; between two looks for a trace; assumed: far below the time that it takes to write one
TAIL_BYTES = 8192  # bytes; end of a trace in which its own name stands, which ends it; longer than any path
