"""Where a group's ranks lie, and so which links its collectives use."""

from __future__ import annotations

from enum import StrEnum


class GroupSpan(StrEnum):
    """Where the ranks of a process group lie."""

    INTRA = "intra"  # all on one node
    INTER = "inter"  # one on each of several nodes
    MIXED = "mixed"  # several on each of several nodes
    UNKNOWN = "unknown"  # the nodes of its ranks are not known


CROSSES_NODES = (GroupSpan.INTER, GroupSpan.MIXED)
