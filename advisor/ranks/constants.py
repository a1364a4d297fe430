"""What is taken for a straggler, a link or a clock, with unit and origin."""

from __future__ import annotations

# us; median by which collectives of devices on one clock end apart at most; assumed: kernels of a ring end within 50
SAME_CLOCK_US = 200.0
STEADY_SHARE = 0.1  # of such a distance by which it may vary between collectives; else it is no clock's; assumed
MARKED_STEP = "ProfilerStep"  # begins the label of a step that the script marks, the same on all ranks; torch.profiler
DRIFT_ROUNDS = 3  # in which drifts of clocks are told from each other's medians; assumed: of two clocks one is enough
LEAST_DRIFT_ENDS = 8  # of collectives in the first third of the time, and in the last, that tell a drift; assumed
LEAST_DRIFT_US = 1.0  # us over a recording; assumed: what profilers' clocks are read and rounded to
MOST_DRIFT = 2e-4  # us per us; oscillators of servers keep 100 ppm, two of them differ by twice as much at the most
DRIFT_LEFT_SHARE = 0.8  # of what parts collectives' ends that is left at the most where it was a drift; assumed
ALIGNMENT_ROUNDS = 8  # alternating medians of clock offsets; assumed: enough to settle
STRAGGLER_STEP_SHARE = 0.02  # of a step that a straggler must cost beyond what others do; assumed: less is noise
STRAGGLER_STEPS_SHARE = 0.6  # of the steps in which ranks wait (so long) that one, or two together, must lead; assumed
STRAGGLER_LEAST_SHARE = 0.25  # of all steps that these must lead, as nobody waits in others; assumed: rarer is a pause
LATE_SHARE = 0.25  # of what a straggler costs in a step that it leads, from which on it is late in another; assumed
WAITED_SHARE = 0.5  # of what a straggler must cost, from which on ranks wait in a step; assumed: less is clocks' noise
STRAGGLER_WAIT_SHARE = 0.4  # of all waiting that these must cause; assumed
STRAGGLER_MAX_CHANCE = 0.25  # of naming equal ranks, at most; what two steps of four ranks can show at best
ALONE_RATIO = 2.0  # how much more than the others of its node one rank must be slower to be slow alone; assumed
CAUSE_EXCESS_SHARE = 0.02  # of a step that it must spend more than the others for a cause to be named; assumed
SLOW_GROUP_FACTOR = 1.5  # times as long as its peers that a group takes for the same collectives; assumed
SLOW_GROUP_STEP_SHARE = 0.02  # of a step that this must cost; assumed: less is noise
SLOW_GROUP_MIN_PEERS = 2  # other groups; of two groups either may be the odd one
FULLER_RATIO = 1.25  # times the gathers of a usual step that one has in which a batch was evaluated, too: 1.5 or 2
USUAL_STEPS_SHARE = 0.5  # of the steps of a rank, more than which agree for one to be unusual; a majority
STALL_RATIO = 1.5  # of the median step from which a step stalled; assumed: steps of one batch size differ far less
STALLED_STEPS = 0.25  # of all steps that stall at the most; of more the longer ones are usual, too; assumed
STALLED_STEPS_COMPUTING_ALIKE = 0.45  # the same where they are known to compute no more; fewer than the usual ones
USUAL_SPREAD = 0.1  # of the median step, by which two steps differ at the most to be usual ones beside a third; assumed
SENDS_MORE_RATIO = 1.5  # of the median step's bytes, from which a step sends more than the others; assumed
STALL_HELD_SHARE = 0.5  # of a stall that communication must hold on each rank for it to be the network's; a majority
LISTED_JOBS = 8  # jobs that are named when inputs are of several; a screen
APART_S = 600.0  # s between two traces from which they are of different runs; clocks differ by less; assumed
LATENCY_BYTES = 64 << 10  # bytes on the wire below which a message is all latency on any link; assumed
IMPOSSIBLE_GBPS = 2000.0  # 1e9 bytes/s; NVLink 5 moves 1800 per GPU (data sheet), so more cannot be a transfer
UNLIKE_BENCHMARKS = 2.0  # of the fastest to the slowest of one collective, from which their links differ; assumed
MIN_SIZE_RATIO = 4.0  # between largest and smallest size for latency and bandwidth to be told apart; assumed
MAX_FITTED_SIZES = 64  # distinct sizes of a fit over pairs; neighbours share a bin beyond; bounds its time
LATENCY_TOLERANCE = 0.1  # of a fitted latency that it may be off at least; assumed
# two standard errors of a median by the median deviation of normal values: 2 * 1.2533 * 1.4826
MEDIAN_ERROR = 3.72

# ---- latency where sizes cannot tell it from bandwidth (docs/traces.md, latency and bandwidth) -------------
# us; least (LL) and most (Simple) of NCCL's ring constants, src/graph/tuning.cc of 2.27: base, a hop over NVLink, a
# hop over the network
NCCL_BASE_US, NCCL_INTRA_US, NCCL_INTER_US = (6.6, 8.4), (0.6, 3.4), (2.7, 14.0)
SOCKETS_FACTOR = 4.0  # times that latency, which sockets may take as well (100 us a hop); assumed
NCCL_SLACK = 2.0  # factor either way: launches, PCIe, slow networks; assumed
GLOO_MESSAGE_US = (20.0, 3000.0)  # us a message of gloo over TCP, cores free or shared by several ranks; assumed
GLOO_HALVES = 2  # parts of each rank's block that a ring of gloo sends on its own (gloo, allgather.cc, allreduce.cc)
PEER_BANDWIDTH_FACTOR = 1.6  # how far bus bandwidths of ring operations of one group differ, either way; assumed
LEAST_LEFT = 0.5  # of a latency, less what another ring's share of it is at the most, that tells it; assumed
PEER_LATENCY_FACTOR = 2.0  # how far latencies a message differ, either way; assumed
SHORT_LATENCY_RANGE = (0.5, 6.0)  # latency of long messages to that of short ones: 5.2 to 5.7 by the constants above
DEVICE_LINKS_SHARE = (0.3, 1.0)  # of the data sheet's intra-node links that long messages reach; assumed
TOLD_SHARE = 0.9  # a range narrowed to less than this share was told something; assumed
