"""What the prediction model assumes, with unit, origin and range; `docs/constants.md` lists them.

Those that were fitted name the command that fitted them; none was fitted on GPUs. A range without a source is a
judgement of what is plausible, not a measurement.
"""

from __future__ import annotations

# ---- how a plan is decided (docs/prediction.md, deciding) -----------------------------------------------
NUM_DRAWS = 200  # samples of every uncertain quantity; quantiles of 80 % ranges then vary by about 2 %
HOPELESS_PCT = 100.0  # replay error beyond which no candidate is named, % of the measured step: twice its time
GATE_PCT = 10.0  # replay error beyond which numbers would mislead, % of the measured step; assumed
GAIN_RATIO = 1.02  # a speed-up worth a change, by its median and by GAIN_PROBABILITY; assumed, range 1.01 to 1.05
NAMED_RATIO = 1.01  # of speed-ups from which a faster row than the chosen one is named beside it; assumed
GAIN_PROBABILITY = 0.9  # of GAIN_RATIO, from which a change is recommended; below 1 - 0.9 the run is kept; assumed
EQUAL_SHARE = 0.03  # step times this close are equal, less memory wins; public repeats of runs differ by 0.2 to 3.5 %
CAPACITY_SHARE = 0.8  # of a device's memory that may be planned, the rest is for fragmentation; assumed

# ---- uncertainty, standard deviations of logarithms (`make bench-prediction`, emulated cluster) -----------
OTHER_SIGMA = 0.08  # of exposed time under another strategy beside a GPU; range 0.05 to 0.15
ON_CPU_SIGMA = 0.04  # the same where cores compute and communicate; range 0.03 to 0.08
# Beside a GPU, more for what the traces do not show: of exposed time if next to no rank was seen, and if one step was;
# the latter falls with the root of the steps. Assumed, ranges 0.05 to 0.15 and 0.02 to 0.1.
UNSEEN_SIGMA, ONE_STEP_SIGMA = 0.08, 0.05
FLOOR_SIGMA = 0.05  # of arithmetic, as far as communication shared the cores with it; range 0.04 to 0.08
BEHIND_BACKWARD_SIGMA = 0.15  # more, where buckets behind backward hide what links and host take; range 0.1 to 0.2
# Of a measured bandwidth: the spread of its samples, but no less and no more than this; assumed
BANDWIDTH_SIGMAS = (0.03, 0.5)
LATENCY_SIGMA = 0.3  # of a measured latency, a small difference of times; assumed
SCALING_SIGMA = 0.1  # per doubling of the nodes; assumed, range 0.05 to 0.2
# Of a step against that of another run: both vary from run to run. Public repeats differ by 0.2 to 3.5 %; range 0.02
# to 0.04 (`make bench-public`)
REPEAT_SIGMA = 0.03
# Beside the strategy: gains below this share are noise, blocks that are merged to a unit; assumed
LEAST_LEVER_GAIN, MERGED_UNITS = 0.01, (2, 4)
LEVER_SIGMA = 0.03  # of what a lever gains, beyond what draws say: the replay itself; assumed, range 0.02 to 0.05
# At how many times the nodes, the bandwidth and the batch a question of a plan is answered in steps, as is what other
# numbers of nodes would make of the plan; assumed
NODE_FACTORS, BANDWIDTH_FACTORS, BATCH_FACTORS = (1, 2, 4, 8), (0.25, 0.5, 1.0, 2.0, 4.0), (1, 2, 4)
# Where the search for an answer ends: links this much slower and quicker, this many times the nodes; assumed
LINK_FACTORS, BEYOND_NODES = (1 / 64, 64.0), 64
ANCHOR_RANGE = (0.5, 2.0)  # how far the measured step may correct exposed time; assumed
STEP_ANCHOR_RANGE = (0.8, 1.25)  # how far the measured step may correct replayed ones beside a GPU; assumed
HOST_GAP_RANGE = (0.6, 1.4)  # how much of the host time that should go does go; assumed

# ---- the host, where nothing was measured ----------------------------------------------------------------
HOST_GBPS = 12.0  # what one device moves to or from its host, 1e9 bytes/s; assumed: PCIe 3.0 x16, --host-gbps states it
HOST_SIGMA = 0.5  # of the time that takes, as the standard deviation of the logarithm; assumed
HOST_UPDATES_PER_S = 1e9  # parameters that a node's cores update; assumed

# ---- arithmetic -------------------------------------------------------------------------------------------
BACKWARD_SHARE = 2 / 3  # of the arithmetic: 6 N D = 2 forward + 4 backward (Kaplan et al. 2020, section 2.1)

# ---- bytes ------------------------------------------------------------------------------------------------
# ZeRO++ (arXiv 2306.10209, section 3) sends 8-bit parameters and 4-bit gradients; bytes per element.
QUANTISED_PARAMETER_BYTES, QUANTISED_GRADIENT_BYTES = 1.0, 0.5

# ---- units that stand many times in a row -------------------------------------------------------------------
# units; by so many queues mostly do the same for each further one, if not, twice as many are looked at
SETTLING_UNITS = 4
SAME_MOMENT_US = 1e-6  # moments of a step, in float64, are exact to less than this

# ---- overlap (docs/prediction.md, replay) -----------------------------------------------------------------
PENDING_REDUCTIONS = 3  # under way at once in our runtime (runtime/sharding: depth of a queue)
SLOWDOWN_RANGE = (0.7, 9.0)  # how much longer transfers may take than the best of their size; assumed
# HO-Ring against a native run (`make bench-prediction`): share of the inter-node links that it reaches, of the
# waits, and of what cores add to its bytes; range 0.9 to 1, 0.5 to 1, 0.2 to 0.5.
HO_RING_BETWEEN, HO_RING_WAITS, HO_RING_COPIES = 0.94, 0.7, 0.3
# Where cores move bytes inside nodes: share of the backend's assumed bandwidth with one peer, and ranks of a node
# up to which more peers make it quicker; range 0.7 to 0.85.
HO_RING_INSIDE, HO_RING_RANKS = 0.775, 4

# ---- links where nothing was measured (docs/prediction.md, links) -----------------------------------------
P90_SIGMAS = 1.2816  # 80 % of a normal distribution lies within this many standard deviations
PRIOR_BANDWIDTH_FACTOR, PRIOR_LATENCY_FACTOR = 1.5, 2.0  # factor either way; assumed
# 1e9 bytes/s, of the order of Galvatron's published table for 2 x 8 GPUs (155.7 inside, 20.8 across nodes); us a
# message, from NCCL's src/graph/tuning.cc (ring, network, Simple 14; NVLink 3.4); assumed.
NCCL_PRIOR = {"intra_gbps": 150.0, "intra_alpha_us": 5.0, "inter_gbps": 25.0, "inter_alpha_us": 14.0}
# of the data sheet's rate that ring collectives reach inside a node: nccl-tests on 8 A100 (230 of 300) and 8 H100
# (360 of 450); range 0.65 to 0.85
DATA_SHEET_SHARE = 0.77
# 1e9 bytes/s, one direction of 16 lanes of PCIe 4.0, by which devices without links of their own reach each other;
# range 16 (PCIe 3.0) to 64 (5.0)
PCIE_GBPS = 32.0
# Bus bandwidth of an all-reduce to that of a gather or scatter, where one of them was not measured. Rings have 1; one
# public cluster of H100 with in-switch reductions 1.34 to 2.35 (Ultra-Scale Playbook, 256 MB, 1 to 32 nodes)
# and the page's list of rates 1.34 to 1.96 (docs/descriptions.md); 80 % range from 1 / 1.35
SUM_RATIO, SUM_RATIO_FACTOR, MOST_SUM_RATIO = 1.0, 1.35, 1.96
# Factor either way of the same where NCCL's kernels show that all-reduces ran as trees, whose bytes are known; assumed
TREE_FACTOR = 1.2
# Of what a node's network cards move, the share that a ring over several of its GPUs reaches: what torch's Inductor
# takes for 4 nodes of H100 (torch 2.13, _inductor/comm_analysis.py: 0.80 for 2, 1 for 8); 80 % range as a factor
RING_SHARE, RING_SHARE_FACTOR = 0.87, 1.12
# Inside a node gloo's bandwidth is that of the cores, which copy whole buffers whatever part of them is sent
# (`make bench-prediction`): a rank's, for each core that it has; of m ranks each sends (m - 1) / m of its buffer.
GLOO_PRIOR = {"intra_gbps": 1.3, "intra_alpha_us": 500.0, "inter_gbps": 1.0, "inter_alpha_us": 500.0}
GLOO_BANDWIDTH_FACTOR = 1.15  # factor of gloo's bandwidth where the cores are known (`make bench-prediction`)
UNKNOWN_CORES = 0.25  # cores of a rank where they are not known; assumed
# Of the data sheet's rate of a device's memory, what FSDP2's copies of parameters and gradients reach, each of which
# reads and writes; assumed, range 0.6 to 0.9
COPY_MEMORY_SHARE = 0.75
# Of that rate, the least that norms of all gradients are taken to reach, of 4 bytes an element at most; assumed, range
# 0.3 to 0.9. Those of few elements take what launching them takes, which does not grow with the elements.
LEAST_NORM_SHARE, FLOAT_BYTES = 0.5, 4
FASTER_TIER_RATIO = 1.3  # groups of few nodes this much faster than wider ones have a network of their own; assumed

# ---- correction for the profiler (docs/prediction.md, profiler correction) --------------------------------
MIN_STEP_SHARE, MIN_CORE_SHARE = (
    0.3,
    0.2,
)  # of a profiled step, and of a thread's work, left without it at least; assumed
SLOWED_SHARE = 0.95  # a step below this share of the profiled one is worth a note; assumed
MIN_LINK_SHARE = 0.7  # bytes on the wire take at least this share of the traced time; assumed
EXPLAINED_SHARE, NUM_HALVINGS = (
    0.999,
    30,
)  # how exactly the replay is brought to the measured time; halvings: 1e-9 of the range
MAX_HOST_US_PER_BYTE = 0.1  # of what cores add to a byte; a bound of the search, far above what CPUs show

# ---- queues of a GPU run ------------------------------------------------------------------------------------
UNTRACED_SHARE = 0.1  # of a step in collectives that may wait for ranks without a trace, from which it counts; assumed
# How many times as slowly as the best of its group a collective moves that may wait for such a rank: what runs beside
# it on the same links makes it 2 to 2.5 (simulated runs with all ranks traced); assumed.
UNTRACED_RATIO = 3.0
UNLIKE_RATIO = 1.25  # the same for collectives of one kind, from which some of it may be waiting; assumed
LEAST_MOVING_SHARE = 0.1  # of the time of a collective that its bytes take at the least, whatever its latency; assumed
WHOLE_MESSAGE_BYTES = 1 << 20  # bytes; shorter messages are latency, which says nothing of rates; assumed
HOST_WORK_SIGMA = 0.05  # by which the host's work for another way of sharding differs; assumed, simulated ones: 0.04
# Of what a host works while a profiler records, what it works without: records cost up to 3 of 10 us a launch; assumed
OVERLAPPED_HOST_SHARE = (0.7, 1.0)
HOST_BOUND_SHARE = 0.1  # of a step that devices wait for launches, from which the host sets the pace; assumed
NOTED_ASIDE_SHARE = 0.01  # of a step in arithmetic that no pass launched, from which it is said; assumed
OWN_GATHERS_SHARE = 0.02  # of a step in gathers of an optimizer's own, from which they are not left out; assumed
LITTLE_UPDATE_SHARE = 0.1  # of the host's time in the optimizer's step, below which devices do not update; assumed
# Reduced at once (elements): DeepSpeed's default reduce_bucket_size, deepspeed/runtime/zero/config.py
DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
BEHIND_SHARE = 0.9  # of gathers in backward exposed, from which none was issued ahead; assumed, range 0.8 to 0.95
BESIDE_UPDATES_SHARE = 0.9  # of gathers of updated parameters exposed, below which forward ran beside them; assumed
UNEVEN_SHARE = 0.03  # of computing, by which the longest rank's differs, from which ranks are uneven; assumed
BLOCKING_SHARE = 0.97  # of a state's time exposed, from which nothing of it ran beside compute; assumed

# The shortest time of a kernel (us), launch gaps not counted; assumed, range 1.5 to 3
KERNEL_US = 2.0

# How much longer arithmetic takes while a collective runs beside it: 18.9 % on average, 40 % at most (arXiv
# 2507.03114), less for large matrix products; prior 1.13, range 1.0 to 1.3
COMPUTE_SLOWING, COMPUTE_SLOWING_SIGMA = 1.13, 0.10

# Of the arithmetic that its bytes suggest, what the root of a model does: embeddings only look rows up, a head over the
# vocabulary is a matrix product like others; prior uniform
ROOT_SHARE_RANGE = (0.0, 1.0)
FRONT_RATIO = 1.2  # of the first unit's bytes to the largest other's, from which it holds embeddings; assumed

# By how much replays of NCCL-like runs miss their measured step (logarithm): draws that do so count by it; assumed
REPLAY_SIGMA = 0.03
PRIOR_DRAWS = 2000  # samples, of which NUM_DRAWS are taken by how well they replay the measured step
# Of a device's data sheet peak, what arithmetic alone reaches at the most, and how far above it may be (of the
# logarithm): whole training steps reach 0.57 (Narayanan et al. 2021, table 1), communication and all; assumed
MOST_OF_PEAK, MOST_OF_PEAK_SIGMA = 0.65, 0.1

ALL_TRAINED_SHARE = 0.95  # of the gathered parameters reduced, from which all are trained; padding differs by less

# ---- units of a model that its traces hide ----------------------------------------------------------------
EXPERTS_SHARE = 0.02  # of the bytes of gradients from which a size of group counts beside others; assumed
FEW_UNITS = 4  # fewer collectives than this are buckets, not the model's blocks; assumed
ASSUMED_UNITS = 8  # blocks assumed then
SHARED_CORE_THREADS = 3.0  # threads that share a core at the most; assumed
