"""Limits of attaching. Each number: value, unit; meaning; origin."""

from __future__ import annotations

ASK_S = 5.0  # s; between two questions of a process; kDefaultOnDemandConfigUpdateIntervalSecs, libkineto/src/Config.cpp
RETRY_S = 10.3  # s; that one tries to send while nobody listens: 10 ms, doubled ten times; dynolog FabricManager.h
GATHER_S = 17.0  # s; in which every process has asked once: ASK_S + RETRY_S and some time to run
LEAD_S = 14.0  # s; from the choice of a start to it, in which every process asks again: 2 ASK_S + TOO_LATE_S and more
TOO_LATE_S = (
    2.5  # s; before a start, from which a process may refuse it: WARM_UP_S, and a loop of 1 s that looks for it
)
WARM_UP_S = 1  # s; of the profiler before its start, a whole number; assumed: starting a GPU's tracing takes less
WAIT_S = 120.0  # s; for the trace of one process after its end; assumed: JSON of some hundred MB
DEFAULT_SECONDS = 3.0  # s; recorded without other request; assumed: a few steps of most jobs
MOST_SECONDS = 600.0  # s; recorded at most; assumed: more does not fit the memory of a training process
MOST_AHEAD_S = 3600.0  # s; from now to a start that is asked for; assumed: nobody waits longer at a terminal
MAX_MESSAGE_BYTES = 65536  # bytes; of a datagram that are read; a question of a process takes some hundred
MAX_PROCESSES = 4096  # processes that may ask; assumed: more than run on any node
POLL_S = 0.2  # s; between two looks for a trace; assumed: far below the time that it takes to write one
COPY_BYTES = 1 << 20  # bytes; pieces in which a trace is compressed; assumed: far above the cost of a call
COMPRESSION_LEVEL = 5  # of gzip, 1 to 9; assumed: little time for most of the gain
TAIL_BYTES = 8192  # bytes; end of a trace in which its own name stands, which ends it; longer than any path
