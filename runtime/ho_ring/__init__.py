"""HO-Ring: collectives whose inter-node hops overlap the intra-node work.

m rings run at once, one for each local rank over the nodes, so that every rank drives the links
between nodes; what a hop brought is spread inside the node while the next hop is under way
(docs/strategies.md, "HO-Ring"). Each block enters each node once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paro_advise.runtime.ho_ring.choice import Algorithm, ChoiceTable, Operation, Sample
from paro_advise.runtime.ho_ring.collectives import Collectives
from paro_advise.runtime.ho_ring.grid import Grid
from paro_advise.runtime.ho_ring.rails import Sent
from paro_advise.runtime.ho_ring.schedules.ring import HoRing

if TYPE_CHECKING:
    from paro_advise.runtime.ho_ring.fsdp2 import use_ho_ring

__all__ = [
    "Algorithm",
    "ChoiceTable",
    "Collectives",
    "Grid",
    "HoRing",
    "Operation",
    "Sample",
    "Sent",
    "use_ho_ring",
]


def __getattr__(name: str) -> object:
    if name == "use_ho_ring":  # imports FSDP2, which takes a second
        from paro_advise.runtime.ho_ring.fsdp2 import use_ho_ring

        return use_ho_ring
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
