"""When a change counts as real, with unit and origin."""

from __future__ import annotations

REAL_CHANGE_PCT = 2.5  # % by which repeats of one job differ; from it on a change is real (`make bench-loop`)
REPEATS_PCT = 3.5  # % by which public repeats of a job differ at most, the least by 0.2 (`make bench-public`)
NARROW_RANGE_PCT = 5.0  # % either way; a range inside of that means the same (`make bench-loop`)
LEAST_OF_STEP = 1e-3  # of a step: by less no part of it is better or worse; three digits of its time show no less
LEAST_US = 1e-3  # of what a time is 0 below: profilers write ns, and sums of differences leave less
MAX_POINTS = 400  # points of a curve in the JSON; bounds its size
NUM_RESAMPLES = 2_000  # draws of the bootstrap; 1 % tails then rest on 20 of them
TRIM_SHARE = 0.25  # of the steps left out at each end: the mean of the middle half (interquartile mean)
MIN_SAMPLES = 4  # steps or ranks without which a change has no range
MAX_STEP_CORRELATION = 0.5  # between the steps of two runs from which they are compared pair by pair; assumed
MOST_BLOCK_CORRELATION = 0.9  # between neighbouring steps, above which blocks would take in the whole run; assumed
SIGNIFICANT_SIGMAS = 2.0  # standard errors from which steps count as correlated: 95 %
NORMAL_98 = 2.326  # standard deviations of a normal distribution within which 98 % of it lie
RANGE_TAIL_SHARE = 0.01  # of the draws, on each side of the range of a change
RANGE_TEXT = "98 % range"  # what that range is called
EXTREME_SIGMAS = 30.0  # logarithm of a time beyond which it only would overflow
SAME_WORK_SHARE = 0.1  # by which computing may differ of what nothing else tells to be the same work; assumed
WIDTH_TOLERANCE = 0.1  # by which bytes gathered for a parameter may miss a width: units in types of their own; assumed
SAME_COUNT_SHARE = 0.02  # by which parameter counts may differ: traces hold the padding of uneven shards
THROUGHPUT = "throughput gain, %"  # name of the criterion in every output; docs/formats.md, comparison
