"""Prints how often the range that a sample of ranks states holds the mean of all, and how many ranks it takes.

`make bench-sampling`. Ranks are drawn, not read: each has a share of a step that it exposes, some by chance and half as much
by its node of 8 ranks. The order, the range and the rule that ends a sample are those of `analyze --sample`.
"""

from __future__ import annotations

import math
import random
from statistics import fmean

from paro_advise.advisor.facts.constants import SAMPLE_FIRST, SAMPLE_GROWTH, SAMPLE_HALF_RANGE
from paro_advise.advisor.facts.sampling import half_range, sampling_order

RUNS = 400
RANKS_PER_NODE = 8


def main() -> None:
    print(f"{'ranks':>6} {'spread':>8} {'holds':>8} {'read':>8}")
    for num_ranks in (64, 256, 1024, 10_000):
        for spread in (0.005, 0.02, 0.06):
            drawn = [_run(num_ranks, spread, seed) for seed in range(RUNS)]
            holds, read = fmean(item[0] for item in drawn), fmean(item[1] for item in drawn) / num_ranks
            print(f"{num_ranks:>6} {spread:>8.1%} {holds:>8.1%} {read:>8.1%}")


def _run(num_ranks: int, spread: float, seed: int) -> tuple[bool, int]:
    """Return whether the stated range holds the mean of all ranks, and how many were read."""
    rng = random.Random(seed)
    nodes = [rng.gauss(0.3, spread / 2) for _ in range(math.ceil(num_ranks / RANKS_PER_NODE))]
    shares = [rng.gauss(nodes[rank // RANKS_PER_NODE], spread) for rank in range(num_ranks)]
    order = sampling_order(range(num_ranks), lambda rank: f"{seed}/{rank}")
    taken = min(num_ranks, SAMPLE_FIRST)
    while True:
        known = [shares[rank] for rank in order[:taken]]
        half = 0.0 if taken == num_ranks else half_range(known, num_ranks)
        if half <= SAMPLE_HALF_RANGE:
            return abs(fmean(known) - fmean(shares)) <= half + 1e-12, taken
        taken = min(num_ranks, max(taken + 1, math.ceil(SAMPLE_GROWTH * taken)))


if __name__ == "__main__":
    main()
