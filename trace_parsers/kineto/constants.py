"""Limits and thresholds of the Kineto reader: ``NAME = value  # unit; meaning; origin``."""

from __future__ import annotations

NO_ID = -1  # none; stands for an identifier that a row lacks; assumed: recorded ones are not negative
MAX_FLOAT = 1e300  # none; numbers beyond it count as infinite; assumed
MAX_RANGE_RANKS = 1 << 20  # ranks; most that start and stride of a group may expand to; assumed
MAX_READ_RANKS_TEXT = 100_000  # characters; most that is read of a group's list of ranks; assumed
MAX_RANK_DIGITS = 9  # digits; longer numbers in a list of ranks are no ranks; assumed
MAX_BUFFER_BYTES = 1 << 56  # bytes; a collective as large or larger is not believed; assumed
MAX_DIMENSION = 1 << 48  # elements; a dimension as large or larger is not believed; assumed
MAX_SPAN_RANKS = 1 << 16  # ranks; most that one range of our runtime may name; assumed
MAX_NAMED_RANKS = 1 << 22  # ranks; most that all names of a trace may list together; assumed
MAX_METADATA_TEXT = 200  # characters; longest text kept from the metadata; assumed

MAX_DURATION_US = 3.2e13  # us; one year; a longer event is not believed; assumed
MAX_NAME_BYTES = 64 << 10  # bytes; longest name whose quotes are mended; assumed: templated kernels reach some KiB
MAX_WHOLE_BYTES = 4096  # bytes; the length of damaged text is compared with that of shorter events; assumed
MIN_HOLE_BYTES = 16  # NUL bytes in one event from which it is a hole in the file; assumed
MAX_BARE_SHARE = 0.1  # of a trace's events without a category that its own profiler writes; assumed: Kineto writes none
MAX_LOST_SHARE = 0.01  # none; a trace that lost more of its events carries no verdict; assumed
FEW_IMPOSSIBLE = 10  # rows; so few of impossible length tell of single rows, not of the recording; assumed
ROUNDING_US = 1.0  # us; durations below zero by less come from rounded times of begin and end; assumed

LEARN_EVENTS = 2000  # events; how many of a chunk are tried to learn the layout from; assumed
LEARN_CHUNKS = 8  # chunks; how many are tried before every event is decoded in full; assumed

# With the digits that all events share cut off, times stay below 2e9 us; since the epoch it is 1.7e15 us.
MAX_SHIFTED_US = 1e13  # us; a later time was not shifted; assumed: any value between those two serves
SHIFT_DIGITS_US = 10**9  # us; worth of the last digit that is cut off; nine digits before the point remain
MIN_LINKED_SHARE = 0.5  # none; with fewer kernels linked to a host call by id, all operators are read; assumed

LAG_SHARE = 0.05  # of a step that a device lags, or of kernels behind their steps, for steps to be cut on it; assumed
PAUSE_SHARE = 0.5  # of a usual step between two marks, from which the recording paused there; assumed
TINY_US = 1e-3  # us, which no row is shorter than but those of no time; the resolution of traces, 1 ns
STUB_SHARE = 0.1  # of a usual step below which a last step without work is where recording ended; assumed
LONG_CALL_US = 50.0  # us; a runtime call that blocks for less is no wait worth keeping; assumed
MAX_BLOCKING_CALLS = 100_000  # calls; most that are kept of those; assumed
FEW_OPERATORS = 10  # operators of a whole CPU trace below which no model ran in it; assumed
LITTLE_WORK_SHARE = 0.01  # of its span that those few must take at least to count as work; assumed

MAX_OPEN_OWNERS = 64  # spans; most that enclose a call and name its owner; assumed: frameworks nest about 10
EARLY_US = 500.0  # us; a gloo span may begin this long before its operator's row; assumed
TOUCH_US = 0.01  # us; rows that overlap by less only touch; assumed: float64 holds absolute times to 1e-3 us
MAX_UNORDERED_SHARE = 0.01  # of operators whose numbers fall, up to which numbers follow time; real traces: 0.0013
MIN_GATHERS = 4  # in a forward pass, from which they are of parameters; a loss gathers one to three; assumed
TAIL_SHARE = 0.05  # none; part of the gap after a backward pass that counts as its tail; assumed
MIN_DURATION_US = 1e-6  # us; a picosecond, which no clock of a profiler tells from nothing
CPU_DEVICE_TYPE = 0  # of c10::DeviceType in `[memory]` events (c10/core/DeviceType.h)
MAX_ALLOCATED_BYTES = 1 << 44  # bytes; 16 TiB, more than any device or host holds; assumed
MEMORY_EVENT = b'"[memory]"'  # the name of such an event, as text
JOINED_CODE = "Q127"  # of the notice that marked micro-batches were joined to steps of the optimizer
NO_STEPS_CODE = "Q120"  # of the notice that the whole trace counts as one step
# Between marks of one number by one thread, up to which two profilers of a process wrote them; seen: 18 to 37.
TWO_MARKS_US = 100.0
DOUBLE_MARK_SHARE = 1e-3  # of a step between two marks of one number up to which one process wrote both; assumed
UPDATED_SHARE = 0.6  # none; of the marked steps with an update, up to which the others are no exceptions; assumed
ENOUGH_UPDATES = 2  # up to which the distance of updates may be chance; of three, two distances agree
ENOUGH_MARKS = 4  # steps; from which that share is asked for, below it the median step tells; assumed
