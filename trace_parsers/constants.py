"""Limits of reading: ``NAME = value  # unit; meaning; origin``.

The limits guard memory against inputs made to exhaust it (docs/traces.md, salvage and limits).
"""

from __future__ import annotations

INT64_MAX = (1 << 63) - 1  # none; the largest integer a table holds; definition of int64
MAX_TIME_US = 4 * 10**15  # us; since 1970, in the year 2096; later times are not believed; twice as many ns fit int64
MAX_NUMBER = 1e18  # any; larger numbers in logs and dumps are not believed; assumed
MAX_NUMBER_DIGITS = 64  # characters; longest decimal number read from a log; assumed: Python prints 24 at most
MAX_INTEGER_DIGITS = 20  # characters; longest integer read from a log; the largest uint64 has 20 digits
MAX_ROWS = 500_000  # rows; most that one table of a log or dump holds; assumed
MAX_TEXT = 400  # characters; longest text kept where nothing else is said; assumed
MAX_GROUP_SIZE = 1 << 24  # ranks; no larger group is believed; assumed
MAX_GROUPS = 1 << 16  # groups; most process groups, communicators or hosts of one input; assumed
MAX_WORLD_SIZE = 1 << 20  # ranks; most whose absence is listed one by one, or whose ranks are read; assumed

OWN_TITLE = b"<title>paro-advise: "  # in the head of a report page
HEAD_BYTES = 64 * 1024  # bytes; what an input is recognised by; assumed
MAX_TEXT_BYTES = 4 << 30  # bytes; most that a log or dump may hold; assumed
MAX_FILES = 20_000  # files; most that one analysis takes; assumed

MAX_TEXT_RANKS = 16_384  # ranks; largest group whose ranks every collective lists as text; bounds memory
MAX_PLAIN_RANKS = 64  # ranks; largest group whose ranks are listed one by one; assumed
MAX_RANKS_TEXT = 4096  # characters; longest list of ranks that every collective repeats; assumed

# Flight recorder.
MAX_FRAMES = 6  # frames; most of a stack that an owner names; assumed
MAX_READ_FRAMES = 256  # frames; most of a stack that are looked at; assumed
MAX_TENSORS = 4096  # tensors; most of one collective that are counted; assumed
MAX_DIMENSIONS = 16  # dimensions; most of a tensor; assumed: PyTorch's collectives see a few
MAX_DUMP_ENTRIES = 200_000  # collectives; most of one dump; assumed: the ring holds 2,000 by PyTorch's documentation
MAX_LISTED_RANKS = 4_000_000  # ranks; most that the groups of one dump list together; assumed
# A pickle can repeat one long list of shapes or frames at the cost of two bytes.
MAX_VISITS = 3_000_000  # list items; most frames and shapes of one dump that are visited; assumed
MAX_PENDING_TEXT = 4000  # characters; longest list of unfinished groups; assumed

# Nsight Systems.
MAX_DEVICE_ROWS = 20_000_000  # rows; most kernels, copies or runtime calls; assumed
MAX_SPANS = 2_000_000  # rows; most NVTX ranges; assumed
MAX_NAMES = 1_000_000  # names; most kernels or strings; assumed
MAX_PLACES = 4096  # pairs; most of process and device; assumed
MAX_DEVICES = 1024  # GPUs; most of one node; assumed
MAX_RANK = (1 << 17) - 1  # the last rank of a job that a log is believed; assumed: no job is larger
MAX_THREADS = 4096  # threads; most of one process's stacks; assumed
MAX_RAS_BYTES = 256 << 20  # bytes; largest report of NCCL's RAS; assumed: 0.6 KB a rank of a communicator
MAX_STACK_CALLS = 1024  # calls; most of one thread; Python's own limit of recursion is 1,000
OWN_TRACE = b'{"madeBy":"paro-advise",'  # first bytes of what we cut from traces: not read as one of the run
