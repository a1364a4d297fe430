"""Latency and time per byte, fitted as a line to times by size (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paro_advise.advisor.ranks.constants import LATENCY_BYTES, LATENCY_TOLERANCE, MEDIAN_ERROR, MIN_SIZE_RATIO

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paro_advise.advisor.ranks.links.latency import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """time = alpha_us + per_byte * wire bytes, with how far alpha may be off; None for what the sizes cannot tell."""

    alpha_us: float | None
    per_byte: float | None
    doubt_us: float = 0.0


def line_of(sizes: NDArray[np.float64], times: NDArray[np.float64], *, is_alone: bool) -> Line:
    """Return the line through times by size, by a weighted median over all pairs of sizes.

    Args:
        sizes: wire bytes of each size, rising.
        times: what such messages take (us).
        is_alone: no other message of the link shares its time.
    """
    if sizes[-1] < LATENCY_BYTES:
        return Line(alpha_us=float(np.median(times)), per_byte=None, doubt_us=float(np.ptp(times)) / 2)
    if sizes[-1] < MIN_SIZE_RATIO * sizes[0]:
        # Over a narrow range noise decides what is latency: say only what moved per second.
        return Line(alpha_us=None, per_byte=float(np.median(times / sizes)))
    gaps = sizes[:, None] - sizes[None, :]
    rises = times[:, None] - times[None, :]
    far = np.abs(gaps) > 0
    slopes = (rises[far] / gaps[far]).ravel()
    # Pairs far apart in size say more about the slope: a weighted median over all pairs.
    weights = np.abs(gaps[far]).ravel()
    order = np.argsort(slopes)
    cumulative = np.cumsum(weights[order])
    slope = float(slopes[order][np.searchsorted(cumulative, cumulative[-1] / 2)])
    if slope <= 0 and (is_alone or sizes[-1] < MIN_SIZE_RATIO * LATENCY_BYTES):
        # What takes no longer than the shortest messages is latency as well; the bandwidth stays unseen.
        return Line(alpha_us=float(times.min()), per_byte=None, doubt_us=float(np.ptp(times)) / 2)
    if slope <= 0:
        return Line(alpha_us=None, per_byte=float(times[-1] / sizes[-1]))
    # Large messages hold more of the slope's error than of latency.
    rest = (times - slope * sizes)[: max(2, len(sizes) // 2)]
    alpha = min(float(np.median(rest)), float(times.min()))
    if alpha < 0:
        # Noise alone decides what of the smallest message's time is latency.
        return Line(alpha_us=None, per_byte=float(times[-1] / sizes[-1]))
    deviation = float(np.median(np.abs(rest - alpha))) * MEDIAN_ERROR / len(rest) ** 0.5
    return Line(alpha_us=alpha, per_byte=slope, doubt_us=max(deviation, LATENCY_TOLERANCE * alpha))


def overlapped_line(sizes: NDArray[np.float64], times: NDArray[np.float64], pace: Pace) -> Line:
    """Return latency and time per byte by which messages that take turns come closest to what was measured.

    Of two sizes, each paced by its bytes or by its latencies, follow both quantities. Those of the pair are taken from
    which all sizes are off least.
    """
    first, second = (places.ravel() for places in np.meshgrid(np.arange(len(sizes)), np.arange(len(sizes))))
    first, second = first[first < second], second[first < second]
    found = [(np.zeros(1), np.array([float(np.median(times / sizes))]))]
    by_bytes, by_latency = (1.0, pace.share), (1 / pace.turns, 1.0)
    for (of_bytes, of_whole), (then_bytes, then_whole) in (
        (by_bytes, by_bytes),
        (by_latency, by_latency),
        (by_latency, by_bytes),
    ):
        # t1 = of_bytes * w1 * s + of_whole * whole, t2 likewise
        a1, a2 = of_bytes * sizes[first], then_bytes * sizes[second]
        determinant = a1 * then_whole - a2 * of_whole
        is_told = np.abs(determinant) > 1e-9 * a2
        a1, a2, determinant = a1[is_told], a2[is_told], determinant[is_told]
        t1, t2 = times[first][is_told], times[second][is_told]
        per_byte = (t1 * then_whole - t2 * of_whole) / determinant
        found.append(((t2 * a1 - t1 * a2) / determinant, per_byte))
    whole, per_byte = (np.concatenate(values) for values in zip(*found, strict=True))
    is_possible = (whole >= 0) & (per_byte > 0)
    whole, per_byte = whole[is_possible], per_byte[is_possible]
    moving = per_byte[:, None] * sizes[None, :]
    expected = moving + pace.seen_us(whole[:, None], moving)
    # Long messages say what the bandwidth is, by their times together, short ones the latency, each by its own. What
    # else runs only adds time: as in each size, three quarters of the messages may take longer.
    off_us = np.maximum(3 * (expected - times), times - expected)
    best = int((off_us.sum(axis=1) / times.sum() + (off_us / times).mean(axis=1)).argmin())
    off = float(np.median(np.abs(expected[best] - times))) * MEDIAN_ERROR / len(sizes) ** 0.5
    # Sizes that are all paced by their bytes show the latency of one message only.
    shown = pace.share if expected[best][0] - moving[best][0] <= pace.share * whole[best] else 1.0
    doubt_us = max(off / shown, LATENCY_TOLERANCE * float(whole[best]))
    least_us = min(float(whole[best]), float(times.min()))  # no message takes less than its latency
    return Line(alpha_us=least_us, per_byte=float(per_byte[best]), doubt_us=doubt_us)
