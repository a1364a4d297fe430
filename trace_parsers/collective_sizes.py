"""Sizes and bandwidths of collectives in nccl-tests' convention, from what one rank passes to NCCL."""

from __future__ import annotations

from paro_advise.core.collective import Op
from paro_advise.trace_parsers.values import bounded_int

# Of AlltoAll, gather and scatter NCCL is given what one pair of ranks exchanges, of the first two
# what one rank contributes; nccl-tests counts what all ranks together hold.
_PER_RANK_COUNT = {Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER}


def full_bytes(op: Op, per_rank_bytes: int, group_size: int | None) -> int | None:
    """Return nccl-tests' size of a collective from what one rank passes to NCCL.

    Args:
        op: the collective.
        per_rank_bytes: count times element size as in the NCCL call.
        group_size: ranks of the communicator, None when unknown.
    """
    if op not in _PER_RANK_COUNT:
        return bounded_int(per_rank_bytes)
    return None if group_size is None else bounded_int(per_rank_bytes * group_size)


def bus_factor(op: Op, group_size: int) -> float:
    """Return busbw / algbw by nccl-tests' definition."""
    if op is Op.ALL_REDUCE:
        return 2 * (group_size - 1) / group_size
    if op in _PER_RANK_COUNT:
        return (group_size - 1) / group_size
    return 1.0


def busbw_gbps(op: Op, num_bytes: int, time_us: float, group_size: int | None) -> float | None:
    """Return the bus bandwidth in 1e9 bytes/s, None when it needs an unknown group size.

    Args:
        op: the collective.
        num_bytes: size in nccl-tests' convention.
        time_us: duration, must be positive.
        group_size: ranks of the communicator, None when unknown.
    """
    if group_size is None:
        return None if op is Op.ALL_REDUCE or op in _PER_RANK_COUNT else num_bytes / time_us / 1e3
    return num_bytes / time_us / 1e3 * bus_factor(op, group_size)
