"""Collective operations by their standard names, and their sizes by nccl-tests' convention."""

from __future__ import annotations

from enum import StrEnum

GLOO = "gloo"  # name of the backend whose collectives run on the cores


class Op(StrEnum):
    """A collective or point-to-point operation, as torch.distributed and NCCL name it."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"
    SEND_RECV = "send_recv"
    BARRIER = "barrier"
    UNKNOWN = "unknown"


# That sum over ranks.
REDUCTIONS = frozenset({Op.ALL_REDUCE, Op.REDUCE, Op.REDUCE_SCATTER})
# From rank to rank.
POINT_TO_POINT = frozenset({Op.SEND, Op.RECV, Op.SEND_RECV})
# Every rank issues these with equal sizes.
EQUALLY_SIZED = frozenset({Op.ALL_REDUCE, Op.BROADCAST, Op.REDUCE})
# Of these, nccl-tests counts what all ranks together hold.
COUNTED_OVER_RANKS = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_TO_ALL, Op.GATHER, Op.SCATTER})


def bus_factor(op: str, group_size: int) -> float:
    """Return bus bytes per byte of buffer, which is busbw / algbw (nccl-tests, doc/PERFORMANCE.md).

    Args:
        op: the collective, a value of ``Op``.
        group_size: ranks of the communicator, at least 1.
    """
    if op == Op.ALL_REDUCE:
        return 2 * (group_size - 1) / group_size
    if op in COUNTED_OVER_RANKS:
        return (group_size - 1) / group_size
    return 1.0
