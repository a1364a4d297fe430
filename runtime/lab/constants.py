"""Settings of the lab. Each line: value, unit; meaning; origin."""

from __future__ import annotations

MAX_NODES = 64  # nodes; most that a lab may have; assumed: far more than one machine emulates at a useful speed
MASTER_PORT = 29500  # TCP port of the rendezvous inside a lab; torchrun's default
START_S = 10.0  # s; until a namespace must be there; assumed: it takes milliseconds on an idle machine
START_POLL_S = 0.01  # s; between looks for a new namespace; assumed: short beside making one
PROCESSES_POLL_S = 0.05  # s; between looks at running processes; assumed: short beside any job
END_GRACE_S = 5.0  # s; from the polite end of a process to the forced one; assumed: enough to write its last lines
FAILURE_GRACE_S = (
    30.0  # s; what other nodes get to fail by themselves after one did; assumed: enough for their messages
)
BURST = "64kb"  # of tc; a port's bucket, at least one tick of its rate; assumed: serves up to several Gbit/s
QUEUE_LATENCY = "200ms"  # of tc; longest wait in a port's queue; assumed: deep enough that TCP sees no loss
MTU_BYTES = (
    9000  # bytes; jumbo frames: a packet costs this machine's processor, not the port; assumed: Ethernet's usual
)
SLOWING_PERIOD_S = 0.02  # s; a slowed rank stops and runs within it; assumed: short beside a step, long beside a signal
SLOWING_SEARCH_S = 0.2  # s; between looks for the process of a rank to slow; assumed: short beside its start
ERROR_CHARACTERS = 300  # characters; quoted of a tool's error message; assumed: a few lines
