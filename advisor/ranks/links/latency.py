"""Tells latency from bandwidth where the sizes of a link's messages cannot: bounds from what else is known.

With one size, or sizes that are alike, time = alpha + wire / busbw is one equation for two unknowns. Evidence,
strongest first, each a range of the latency (docs/traces.md, latency and bandwidth):

1. the bandwidth of another operation between the same ranks, whose sizes did tell;
2. another ring between the same ranks whose messages are several times as large, though of one size as well: two
   equations for two unknowns;
3. the latency of another operation, or of short messages, scaled by the messages that follow each other;
4. what the network moves at best: a device's own links by its data sheet, unless that asks for more latency than the
   backend can have: then the bytes take another way than those links;
5. the backend's own constants.

Each narrows what the stronger ones left; one that contradicts them is not used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import (
    DEVICE_LINKS_SHARE,
    GLOO_HALVES,
    GLOO_MESSAGE_US,
    IMPOSSIBLE_GBPS,
    LEAST_LEFT,
    NCCL_BASE_US,
    NCCL_INTER_US,
    NCCL_INTRA_US,
    NCCL_SLACK,
    PEER_BANDWIDTH_FACTOR,
    PEER_LATENCY_FACTOR,
    SHORT_LATENCY_RANGE,
    SOCKETS_FACTOR,
    TOLD_SHARE,
)
from paro_advise.advisor.ranks.devices import device_links_gbps
from paro_advise.advisor.ranks.links.link import LatencySource
from paro_advise.core.collective import Op, bus_factor
from paro_advise.core.span import GroupSpan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    from paro_advise.advisor.ranks.links.link import Link

_RINGS = (Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What is known of the machines before anything is measured.

    Attributes:
        is_gloo: of the backend; anything else counts as NCCL.
        device_name: of the accelerators, None when unknown.
        ranks_per_node: None when unknown.
    """

    is_gloo: bool
    device_name: str | None
    ranks_per_node: int | None


def messages(op: str, group_size: int, *, is_gloo: bool) -> int:
    """Return how many messages of a ring follow each other (Patarasu and Yuan, 2009); gloo scatters by all-reducing."""
    if op == Op.ALL_REDUCE or (op == Op.REDUCE_SCATTER and is_gloo):
        return 2 * max(1, group_size - 1)
    return max(1, group_size - 1) if op in _RINGS else 1


def backend_latency(op: str, span: GroupSpan, group_size: int, fabric: Fabric) -> tuple[float, float]:
    """Return the least and the most latency (us) of an operation by its backend's constants.

    NCCL: base latency and one hop for each message, between its LL and its Simple protocol (src/graph/tuning.cc); a
    span that is not known counts as inside a node at the least, between nodes at the most.
    """
    hops = messages(op, group_size, is_gloo=fabric.is_gloo)
    if fabric.is_gloo:
        return hops * GLOO_MESSAGE_US[0], hops * GLOO_MESSAGE_US[1]
    # A group of several nodes may not fill them, where ranks are dealt out.
    nodes = max(2, group_size // fabric.ranks_per_node) if fabric.ranks_per_node else group_size
    between = {
        GroupSpan.INTRA: 0.0,
        GroupSpan.MIXED: min(1.0, (nodes - 1) / max(1, group_size - 1)),
        GroupSpan.INTER: 1.0,
    }.get(span)
    low, high = (
        NCCL_BASE_US[end] + hops * (share * NCCL_INTER_US[end] + (1 - share) * NCCL_INTRA_US[end])
        for end, share in ((0, between or 0.0), (1, 1.0 if between is None else between))
    )
    return low / NCCL_SLACK, high * NCCL_SLACK


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the messages of a collective take turns: time = max(bytes + one latency, bytes / turns + all latencies).

    Attributes:
        turns: messages that are under way at once on a port, or on a rank's link inside a node.
        share: of one message in all that follow each other.
    """

    turns: float
    share: float

    def seen_us(self, whole_us: ArrayLike, moving_us: ArrayLike) -> NDArray[np.float64]:
        """Return what of the latency of all messages adds to the time that their bytes take, of each pair."""
        whole, moving = np.asarray(whole_us, dtype=float), np.asarray(moving_us, dtype=float)
        return np.maximum(self.share * whole, whole - (1 - 1 / self.turns) * moving)

    def seen_in(self, whole_us: float, total_us: float) -> float:
        """Return the same of a time that holds both."""
        return max(self.share * whole_us, self.turns * whole_us - (self.turns - 1) * total_us)

    def whole_us(self, seen_us: float, total_us: float) -> float:
        """Return the latency of all messages of which so much is seen in a time."""
        return (seen_us + (self.turns - 1) * total_us) / self.turns


def pace_of(op: str, span: GroupSpan, group_size: int, fabric: Fabric) -> Pace:
    """Return how messages take turns.

    Each rank of a gloo ring sends halves of blocks, and has two under way; those of a node share its port, of one ring
    or, where each ring has one of them, of several.
    """
    share = 1 / messages(op, group_size, is_gloo=fabric.is_gloo)
    if not fabric.is_gloo or op not in _RINGS:
        return Pace(turns=1.0, share=share)
    return Pace(turns=float(GLOO_HALVES * (1 if span == GroupSpan.INTRA else fabric.ranks_per_node or 1)), share=share)


def tell_latency(links: Sequence[Link], fabric: Fabric, alone: Sequence[Link] = ()) -> list[Link]:
    """Fill in what the sizes of a link's messages left open, or told wrong.

    Args:
        links: as fitted.
        fabric: the machines.
        alone: links whose messages ran beside nothing else, whose sizes tell nothing wrong.
    """
    links = [link if link in alone else _reopened(link, fabric) for link in links]
    return [_told(link, links, fabric) if _is_open(link) else link for link in links]


def _reopened(link: Link, fabric: Fabric) -> Link:
    """Return a link without what its sizes told where that asks for more latency than any network has.

    Then the small ones ran beside more than the large ones did, as where only the last one had the network alone.
    """
    if fabric.is_gloo or link.alpha_us is None or not link.busbw_gbps:
        return link
    most_us = backend_latency(link.op, link.span, link.group_size, fabric)[1]
    if (link.alpha_low_us or 0.0) <= SOCKETS_FACTOR * most_us:
        return link
    open_again = replace(link, alpha_us=None, alpha_low_us=None, alpha_high_us=None)
    return replace(open_again, busbw_gbps=None, busbw_low_gbps=None, busbw_high_gbps=None)


def _is_open(link: Link) -> bool:
    return link.alpha_us is None and link.typical_us is not None and bool(link.typical_bytes)


def _told(link: Link, links: Sequence[Link], fabric: Fabric) -> Link:
    total, pace = link.typical_us or 0.0, pace_of(link.op, link.span, link.group_size, fabric)
    # Where sizes said nothing else, no message took less than its latency.
    low, high, source = 0.0, min(total, link.alpha_high_us or total), LatencySource.UNKNOWN
    for found_low, found_high, origin in _evidence(link, links, fabric):
        new_low, new_high = max(low, found_low), min(high, found_high)
        if new_low > new_high:
            continue  # it contradicts what is stronger
        if new_high - new_low < TOLD_SHARE * (high - low):
            source = source or origin
        low, high = new_low, new_high
    # Half of the time beyond the latency moves bytes at least, so that a bandwidth can be stated at all.
    high = min(high, 0.99 * total)
    low = min(low, high)
    whole = (low * high) ** 0.5 if low > 0 else high / 2
    low, middle, high = (pace.seen_in(latency, total) for latency in (low, whole, high))
    wire = link.typical_bytes * bus_factor(link.op, link.group_size)

    def moved(alpha_us: float) -> float:
        return wire / max(total - alpha_us, 1e-3) / 1e3

    spread = [value for value in (link.busbw_low_gbps, link.busbw_high_gbps) if value is not None]
    return replace(
        link,
        alpha_us=middle,
        alpha_low_us=low,
        alpha_high_us=high,
        busbw_gbps=moved(middle),
        busbw_low_gbps=min([*spread, moved(low)]),
        busbw_high_gbps=max(moved(middle), min(IMPOSSIBLE_GBPS, max([*spread, moved(high)]))),
        latency_source=(source or LatencySource.BACKEND).value,
        hidden_us=whole - middle,
    )


def _whole(least_us: float, most_us: float, total_us: float, pace: Pace) -> tuple[float, float]:
    """Return the range of a latency of which so much is seen; a negative bound of what is seen stays one."""
    least = pace.whole_us(least_us, total_us) if least_us > 0 else min(0.0, least_us)
    return least, pace.whole_us(most_us, total_us) if most_us >= 0 else most_us


def _evidence(link: Link, links: Sequence[Link], fabric: Fabric) -> Iterator[tuple[float, float, LatencySource]]:
    """Yield ranges of the latency (us), strongest first."""
    total = link.typical_us or 0.0
    wire = link.typical_bytes * bus_factor(link.op, link.group_size)
    peers = [item for item in links if item is not link and item.span == link.span and item.alpha_us is not None]
    told = [item for item in peers if item.busbw_gbps]
    for item in told:
        if item.group_size == link.group_size and item.op in _RINGS and link.op in _RINGS and item.busbw_gbps:
            move_us = wire / item.busbw_gbps / 1e3 * _send_factor(link, fabric) / _send_factor(item, fabric)
            least, most = (total - move_us * factor for factor in (PEER_BANDWIDTH_FACTOR, 1 / PEER_BANDWIDTH_FACTOR))
            pace = pace_of(link.op, link.span, link.group_size, fabric)
            yield *_whole(least, most, total, pace), LatencySource.OTHER_LINKS
    for item in links:
        found = None if fabric.is_gloo else _by_larger_messages(link, item)
        if found is not None:
            yield *found, LatencySource.OTHER_LINKS
    for item in sorted(peers, key=lambda item: (item.busbw_gbps is None, item.group_size != link.group_size)):
        count, of_peer = (messages(one.op, one.group_size, is_gloo=fabric.is_gloo) for one in (link, item))
        scale = count / of_peer
        alpha = ((item.alpha_us or 0.0) + item.hidden_us) * scale
        # NCCL sends short messages by the protocol with the least latency, long ones by that with the most.
        is_short = not item.busbw_gbps and not fabric.is_gloo
        least, most = SHORT_LATENCY_RANGE if is_short else (1 / PEER_LATENCY_FACTOR, PEER_LATENCY_FACTOR)
        yield alpha * least, alpha * most, LatencySource.OTHER_LINKS
    least_us, most_us = backend_latency(link.op, link.span, link.group_size, fabric)
    if link.span == GroupSpan.INTRA and (best := device_links_gbps(fabric.device_name)):
        share_low, share_high = DEVICE_LINKS_SHARE
        move_us = wire / best / 1e3
        if total - move_us / share_low <= most_us:
            yield total - move_us / share_low, total - move_us / share_high, LatencySource.DATA_SHEET
    yield least_us, most_us, LatencySource.BACKEND


def _by_larger_messages(link: Link, other: Link) -> tuple[float, float] | None:
    """Return the range of a latency (us) by what another ring over the same ranks takes for messages of another size.

    Neither's own sizes tell. Both together do: t1 = a + w1 s and t2 = f c a + w2 s / k, where s is the time of a byte
    on the wire, c the ratio of their messages that follow each other, and f and k are how far their latencies a
    message and their bandwidths may differ. None where the other's messages are too small for this to tell much.
    """
    is_ring = link.op in _RINGS and other.op in _RINGS and link.op != other.op
    same = (link.span, link.group_size, link.num_nodes) == (other.span, other.group_size, other.num_nodes)
    if not (is_ring and same and _is_open(link) and _is_open(other)) or link.is_lower_bound or other.is_lower_bound:
        return None
    first, second = (one.typical_bytes * bus_factor(one.op, one.group_size) for one in (link, other))
    count, of_other = (messages(one.op, one.group_size, is_gloo=False) for one in (link, other))
    found = []
    for latency in (1 / PEER_LATENCY_FACTOR, PEER_LATENCY_FACTOR):
        for bandwidth in (1 / PEER_BANDWIDTH_FACTOR, PEER_BANDWIDTH_FACTOR):
            of_bytes = first / second * bandwidth
            left = 1 - of_bytes * latency * of_other / count
            if left < LEAST_LEFT:
                return None
            found.append(((link.typical_us or 0.0) - of_bytes * (other.typical_us or 0.0)) / left)
    return min(found), max(found)


def _send_factor(link: Link, fabric: Fabric) -> float:
    """Return how many bytes an operation sends for each that it must: gloo scatters by an all-reduce."""
    return 2.0 if fabric.is_gloo and link.op == Op.REDUCE_SCATTER else 1.0
