"""A link as the transfers of a run show it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paro_advise.core.collective import bus_factor
from paro_advise.core.span import GroupSpan


class LatencySource(StrEnum):
    """Where a link's latency comes from."""

    MEASURED = "measured"  # its own sizes tell
    OTHER_LINKS = "other links"
    DATA_SHEET = "data sheet"
    BACKEND = "backend constants"
    UNKNOWN = ""


class SumAlgorithm(StrEnum):
    """By which algorithm all-reduces ran, as NCCL's kernels name it."""

    TREE = "tree"
    RING = "ring"  # or any other than trees
    UNKNOWN = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A fitted link: transfer time = alpha_us + wire bytes / busbw.

    Where messages take turns on a port, what they wait while others move is not in ``alpha_us``.

    Attributes:
        op, span, group_size: which collectives.
        num_nodes: on which their group has ranks; None where that is not known.
        num_samples: how many of them.
        alpha_us: latency; None where the samples cannot tell.
        busbw_gbps: nccl-tests' bus bandwidth (1e9 bytes/s); None where the samples cannot tell.
        busbw_low_gbps, busbw_high_gbps: 10 and 90 % quantiles of single collectives, and what the range of the
            latency leaves.
        source: of the transfers.
        alpha_low_us, alpha_high_us: range of the latency.
        hidden_us: latency of its messages that passed while others moved, beyond ``alpha_us``.
        latency_source: a LatencySource value.
        is_lower_bound: ranks without a trace may have been waited for, so the link may be faster.
        least_gbps: of such a link, the bus bandwidth that is sure; None of others.
        typical_bytes, typical_us: buffer and transfer time of a typical collective.
        algorithm: a SumAlgorithm value, by which most of the bytes of all-reduces moved.
    """

    op: str
    span: GroupSpan
    group_size: int
    num_samples: int
    alpha_us: float | None
    busbw_gbps: float | None
    busbw_low_gbps: float | None
    busbw_high_gbps: float | None
    source: str
    alpha_low_us: float | None = None
    alpha_high_us: float | None = None
    latency_source: str = ""
    typical_bytes: float = 0.0
    typical_us: float | None = None
    is_lower_bound: bool = False
    num_nodes: int | None = None
    hidden_us: float = 0.0
    least_gbps: float | None = None
    algorithm: str = SumAlgorithm.UNKNOWN

    @property
    def reached_gbps(self) -> float | None:
        """Return the bus bandwidth that was seen: without latency where its own sizes tell it, else with all of it.

        Where ranks may have been waited for, the latency may be waiting, and counts.
        """
        if self.is_lower_bound and self.least_gbps is not None and self.busbw_gbps is not None:
            return self.least_gbps
        if self.latency_source == LatencySource.MEASURED or not self.typical_us:
            return self.busbw_gbps
        return self.typical_bytes * bus_factor(self.op, self.group_size) / self.typical_us / 1e3


def has_unknown_placement(span: GroupSpan, group_size: int | None, world_size: int, num_nodes: int) -> bool:
    """Tell whether a smaller group's ranks may lie inside nodes or across them."""
    return span == GroupSpan.UNKNOWN and num_nodes > 1 and group_size is not None and 1 < group_size < world_size
