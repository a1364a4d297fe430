"""Sizes and bandwidths of collectives in nccl-tests' convention, from what one rank passes to NCCL."""

from __future__ import annotations

from paro_advise.core.collective import COUNTED_OVER_RANKS, Op, bus_factor
from paro_advise.trace_parsers.values import bounded_int


def full_bytes(op: Op, per_rank_bytes: int, group_size: int | None) -> int | None:
    """Return nccl-tests' size of a collective from what one rank passes to NCCL.

    Of AlltoAll, gather and scatter that is what one pair of ranks exchanges, of all-gather and
    reduce-scatter what one rank contributes.

    Args:
        op: the collective.
        per_rank_bytes: count times element size as in the NCCL call.
        group_size: ranks of the communicator, None when unknown.
    """
    if op not in COUNTED_OVER_RANKS:
        return bounded_int(per_rank_bytes)
    return None if group_size is None else bounded_int(per_rank_bytes * group_size)


def busbw_gbps(op: Op, num_bytes: int, time_us: float, group_size: int | None) -> float | None:
    """Return the bus bandwidth in 1e9 bytes/s, None when it needs an unknown group size.

    Args:
        op: the collective.
        num_bytes: size in nccl-tests' convention.
        time_us: duration, must be positive.
        group_size: ranks of the communicator, None when unknown.
    """
    if group_size is None:
        return None if op is Op.ALL_REDUCE or op in COUNTED_OVER_RANKS else num_bytes / time_us / 1e3
    return num_bytes / time_us / 1e3 * bus_factor(op, group_size)
