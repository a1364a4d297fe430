"""What bounds and thresholds of facts are, with unit and origin."""

from __future__ import annotations

MAX_NAMED_KERNELS = 24  # kernels of a rank kept by name, the longest; a page shows fewer
MAX_KERNEL_NAME = 100  # characters of a kernel's name that are kept; templates run to thousands
DRAWN_STEPS = 8  # steps of a rank of which is kept when it computed; a capture holds 3 to 10 as a rule
COMPUTE_SPANS = 600  # spans kept of each, the longest; a picture 1,000 pixels wide shows no more apart
COMPUTE_GAPS = 2_000  # gaps shorter than this part of a step are closed: half a pixel of a picture of the whole step
# Of two ranks' hosts, for the same steps: those that wait for their devices differ by a few per cent, and in a run on
# an H100 whose hosts did not wait it was 15; assumed.
RUN_AHEAD_RATIO = 1.5
WARM_UP_STEPS = 3  # steps left out at the start of a capture: they allocate, compile and fill caches; assumed
# Launches queued on a device from which the host may have waited for room: 1,000 to 1,060 stood there in a public trace
# whose host ran ahead as far as it could (HTA's negative_queue_length_values_check); some lower, to be sure.
QUEUE_ROOM = 800
MAX_CAPTURED_STEPS = 5_000  # steps of a capture that are kept, the last ones; bounds the JSON
LAUNCHES_KNOWN_SHARE = 0.98  # of computing time, whose launches are known where passes are told apart by them; assumed
SCALAR_ELEMENTS = 64  # elements of a norm, a loss or an overflow flag at most; docs/traces.md, attribution
POOL_BYTES = 4 << 20  # bytes of inputs from which processes pay for their start; assumed
CACHE_BYTES = 2 << 30  # bytes that cached facts may take; the oldest go first; three runs of 10,000 ranks
JOB_POLL_S = 1.0  # seconds between two looks at a Slurm job's results; assumed
QUEUE_POLL_S = 5.0  # seconds between two questions to Slurm's controller, which all users of a cluster share; assumed
HELD_WITHIN_US = 10.0  # us from a copy's end within which what it held up begins; waits for events take 1 to 5; assumed
UNSIZED_SHARE = 0.01  # of collectives and of their time that those of unknown size may be and count as nothing; assumed
SHARED_FILES_S = 90.0  # seconds until a file that another machine wrote is seen; NFS keeps folders 30 to 60 s (nfs(5))
MAX_ARRAY = 1_000  # tasks of a Slurm array; MaxArraySize is 1,001 by default (slurm.conf)
CLUSTER_CONNECT_S = 20.0  # s; until a cluster that does not answer is told not to be there; assumed
IN_FLIGHT = 2  # inputs an engine is given ahead for each of its cores, so that none waits for the driver; assumed
SAMPLE_FIRST = 6  # traces of the first round; with 4 ranges hold less often (make bench-sampling)
SAMPLE_BLOCKS = 32  # blocks of neighbours over which a sample spreads first; assumed
SAMPLE_GROWTH = 1.5  # times as many traces after each round; assumed
SAMPLE_HALF_RANGE = 0.02  # of a step; half of the range of exposed communication that ends a sample; what is asked
# 97.5 % quantiles of Student's t from these degrees of freedom on (tables; the last is the normal one's from 120 on)
STUDENT_T = (
    (1, 12.71), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (10, 2.228),
    (15, 2.131), (20, 2.086), (30, 2.042), (60, 2.0), (120, 1.98),
)  # fmt: skip

OPTIMIZER_STEP = "Optimizer.step#"  # torch.optim.Optimizer.profile_hook_step: begin of the name of its span
