"""HO-Ring: collectives in which the hops between nodes overlap the work inside nodes.

m rings run at once, one for each local rank over the nodes, so that every rank drives the links
between nodes; what a hop brought is spread inside the node while the next hop is under way
(reference strategies, section 5.2). Each block enters each node once.
"""

from paro_advise.runtime.ho_ring.collectives import HoRing, Sent
from paro_advise.runtime.ho_ring.grid import Grid

__all__ = ["Grid", "HoRing", "Sent"]
