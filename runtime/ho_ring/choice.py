"""Which algorithm to take for a collective of some size, from what a calibration measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from paro_advise.runtime.ho_ring.constants import MARGIN, SMALL_BYTES, SMALL_MARGIN

if TYPE_CHECKING:
    from collections.abc import Mapping


class Operation(StrEnum):
    """A collective."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"


class Algorithm(StrEnum):
    """How a collective is done."""

    NATIVE = "native"
    TWO_HOP = "two_hop"
    HO_RING = "ho_ring"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times of one collective at one size, equal on all ranks.

    Attributes:
        operation: which.
        num_bytes: of the whole buffer, as nccl-tests count.
        seconds: by algorithm; the slowest rank's median.
    """

    operation: Operation
    num_bytes: int
    seconds: Mapping[Algorithm, float]


@dataclass(frozen=True, slots=True)
class ChoiceTable:
    """What a calibration measured; () takes the native collective always."""

    samples: tuple[Sample, ...] = ()

    def pick(self, operation: Operation, num_bytes: int) -> Algorithm:
        """Return the algorithm for a buffer size.

        Between two measured sizes times are interpolated, both on logarithmic scales; outside, the
        nearest size decides. The native collective is kept unless another one is 5 % faster, 15 % below
        1 MiB.
        """
        points = sorted((s for s in self.samples if s.operation == operation), key=lambda s: s.num_bytes)
        if not points:
            return Algorithm.NATIVE
        below = max((p for p in points if p.num_bytes <= num_bytes), key=lambda p: p.num_bytes, default=points[0])
        above = min((p for p in points if p.num_bytes >= num_bytes), key=lambda p: p.num_bytes, default=points[-1])
        span = math.log(above.num_bytes / below.num_bytes)
        share = math.log(num_bytes / below.num_bytes) / span if span > 0 else 0.0
        times = {
            algorithm: math.exp(
                (1 - share) * math.log(below.seconds[algorithm]) + share * math.log(above.seconds[algorithm])
            )
            for algorithm in below.seconds
        }
        best = min(times, key=lambda algorithm: times[algorithm])
        margin = SMALL_MARGIN if num_bytes < SMALL_BYTES else MARGIN
        return best if times[best] <= margin * times[Algorithm.NATIVE] else Algorithm.NATIVE
