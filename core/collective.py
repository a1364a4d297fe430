"""Collective operations by their standard names."""

from __future__ import annotations

from enum import StrEnum


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
