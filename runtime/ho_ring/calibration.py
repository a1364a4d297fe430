"""Times the algorithms of a collective side by side, with equal results on all ranks."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paro_advise.runtime.ho_ring.choice import Sample
from paro_advise.runtime.ho_ring.constants import HELD_UP, MAX_REPEATS, MIN_REPEATS
from paro_advise.runtime.ho_ring.schedules.reductions import reduce_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paro_advise.runtime.ho_ring.choice import Algorithm, Operation

    Run = Callable[[], None]


def samples_of(
    operation: Operation,
    sizes: Sequence[int],
    seconds_of: Callable[[int, float], dict[Algorithm, float]],
    budget_s: float,
) -> list[Sample]:
    """Measure buffers from the smallest on; once more where one takes longer than its bytes explain.

    Long messages are run once only, and a single run may be held up by something else on the machine.

    Args:
        operation: which collective.
        sizes: bytes, ascending.
        seconds_of: returns by algorithm what the slowest rank takes, equal on all ranks, given the bytes and a budget
            (s).
        budget_s: for all sizes together.
    """
    samples: list[Sample] = []
    for num_bytes in sizes:
        seconds = seconds_of(num_bytes, budget_s / len(sizes))
        if samples and _is_held_up(seconds, num_bytes, samples[-1]):
            again = seconds_of(num_bytes, 0.0)
            seconds = {algorithm: min(took, again[algorithm]) for algorithm, took in seconds.items()}
        samples.append(Sample(operation=operation, num_bytes=num_bytes, seconds=seconds))
    return samples


def _is_held_up(seconds: Mapping[Algorithm, float], num_bytes: int, smaller: Sample) -> bool:
    """Tell whether an algorithm takes longer than in proportion to the bytes: latency alone makes it less."""
    ratio = HELD_UP * num_bytes / smaller.num_bytes
    return any(took > ratio * smaller.seconds[algorithm] for algorithm, took in seconds.items())


class Stopwatch:
    """Measures what the slowest rank of a group takes.

    Args:
        group: of the ranks.
        device: of the tensors; None for the default one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None) -> None:
        self._group = group
        self._device = device

    def connect(self, runs: Mapping[Algorithm, Run]) -> None:
        """Run each algorithm once: the first time connects and allocates."""
        for run in runs.values():
            self._time(run)

    def median_seconds(self, runs: Mapping[Algorithm, Run], budget_s: float) -> dict[Algorithm, float]:
        """Return the median time of each algorithm; they take turns.

        Args:
            runs: by algorithm.
            budget_s: for all of them together. One turn is always taken; a long message varies little.
        """
        times: dict[Algorithm, list[float]] = {algorithm: [] for algorithm in runs}
        spent = 0.0
        for turn in range(1, MAX_REPEATS + 1):
            before = spent
            for algorithm, run in runs.items():
                times[algorithm].append(self._time(run))
                spent += times[algorithm][-1]
            next_fits = spent + (spent - before) <= budget_s
            if not next_fits and (turn >= MIN_REPEATS or spent > budget_s):
                break
        return {algorithm: statistics.median(values) for algorithm, values in times.items()}

    def _time(self, run: Run) -> float:
        """Return the slowest rank's seconds, equal on all ranks."""
        took = torch.zeros(1, dtype=torch.float64, device=self._device)
        self._group.allreduce([took]).wait()  # all start together
        self._synchronize()
        begin = time.perf_counter()
        run()
        self._synchronize()
        took.fill_(time.perf_counter() - begin)
        self._group.allreduce([took], reduce_options(dist.ReduceOp.MAX)).wait()
        return float(took.item())

    def _synchronize(self) -> None:
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
