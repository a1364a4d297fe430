"""Arithmetic on unions of time intervals: sorted, disjoint (start_us, end_us) arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Intervals:
    """A union of disjoint intervals, by start. Touching intervals are merged."""

    start_us: NDArray[np.float64]
    end_us: NDArray[np.float64]

    @classmethod
    def union_of(cls, start_us: NDArray[np.float64], end_us: NDArray[np.float64]) -> Intervals:
        """Merge any intervals; empty ones vanish."""
        keep = end_us > start_us
        start, end = start_us[keep], end_us[keep]
        if not len(start):
            return cls(start, end)
        order = np.argsort(start, kind="stable")
        start, end = start[order], np.maximum.accumulate(end[order])
        opens = np.empty(len(start), dtype=bool)
        opens[0] = True
        np.greater(start[1:], end[:-1], out=opens[1:])
        first = np.flatnonzero(opens)
        last = np.append(first[1:], len(start)) - 1
        return cls(start[first], end[last])

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> Intervals:
        """Merge intervals that are given one by one."""
        start_us, end_us = np.array(pairs, dtype=np.float64).reshape(-1, 2).T
        return cls.union_of(start_us, end_us)

    @property
    def length_us(self) -> float:
        """Return the total length."""
        return float((self.end_us - self.start_us).sum())

    @property
    def bounds_us(self) -> tuple[float, float]:
        """Return where the first begins and the last ends, twice 0 without any."""
        return (float(self.start_us[0]), float(self.end_us[-1])) if len(self.start_us) else (0.0, 0.0)

    def clip(self, low_us: float, high_us: float) -> Intervals:
        """Return the part inside a window."""
        first = int(np.searchsorted(self.end_us, low_us, side="right"))
        last = int(np.searchsorted(self.start_us, high_us, side="left"))
        return Intervals(np.maximum(self.start_us[first:last], low_us), np.minimum(self.end_us[first:last], high_us))

    def coarse(self, gap_us: float, *, at_most: int) -> NDArray[np.float64]:
        """Return the longest intervals by time, those merged that a short gap divides: (intervals, 2)."""
        merged = Intervals.union_of(self.start_us, self.end_us + gap_us)
        start_us, end_us = merged.start_us, merged.end_us - gap_us
        longest = np.sort(np.argsort(start_us - end_us, kind="stable")[:at_most])
        return np.column_stack((start_us[longest], end_us[longest]))

    def join(self, other: Intervals) -> Intervals:
        """Return the union with another union."""
        return Intervals.union_of(
            np.concatenate((self.start_us, other.start_us)), np.concatenate((self.end_us, other.end_us))
        )

    def minus(self, other: Intervals) -> Intervals:
        """Return what lies in this union and not in the other."""
        if not len(self.start_us) or not len(other.start_us):
            return self
        low = min(self.start_us[0], other.start_us[0]) - 1.0
        high = max(self.end_us[-1], other.end_us[-1]) + 1.0
        gap_start = np.concatenate(([low], other.end_us))
        gap_end = np.concatenate((other.start_us, [high]))
        return self.meet(Intervals(gap_start, gap_end))

    def meet(self, other: Intervals) -> Intervals:
        """Return the intersection with another union."""
        if not len(self.start_us) or not len(other.start_us):
            return EMPTY
        first = np.searchsorted(other.end_us, self.start_us, side="right")
        last = np.searchsorted(other.start_us, self.end_us, side="left")
        counts = np.maximum(last - first, 0)
        mine = np.repeat(np.arange(len(counts)), counts)
        offset = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
        theirs = first[mine] + offset
        start = np.maximum(self.start_us[mine], other.start_us[theirs])
        end = np.minimum(self.end_us[mine], other.end_us[theirs])
        keep = end > start
        return Intervals(start[keep], end[keep])


EMPTY = Intervals(np.empty(0), np.empty(0))


def exposed_lengths(
    start_us: NDArray[np.float64], end_us: NDArray[np.float64], cover: Intervals
) -> NDArray[np.float64]:
    """Return for each interval the length that the cover leaves free (us)."""
    if not len(cover.start_us):
        return np.maximum(end_us - start_us, 0.0)
    edges = np.concatenate(([0.0], np.cumsum(cover.end_us - cover.start_us)))

    def covered_before(time_us: NDArray[np.float64]) -> NDArray[np.float64]:
        index = np.searchsorted(cover.start_us, time_us, side="right")
        before = np.maximum(index - 1, 0)
        inside = np.minimum(time_us, cover.end_us[before]) - cover.start_us[before]
        out: NDArray[np.float64] = np.where(index > 0, edges[before] + inside, 0.0)
        return out

    length = np.maximum(end_us - start_us, 0.0)
    out: NDArray[np.float64] = np.maximum(length - (covered_before(end_us) - covered_before(start_us)), 0.0)
    return out


def union_length(group: NDArray[np.integer], start_us: NDArray[np.float64], end_us: NDArray[np.float64]) -> float:
    """Return the total length (us) of the unions of intervals, a union for each group."""
    import polars as pl

    table = pl.DataFrame({"group": group, "start": start_us, "end": end_us}).filter(pl.col("end") > pl.col("start"))
    covered = pl.col("end").cum_max().shift(1).over("group")
    beyond = pl.col("end") - pl.max_horizontal("start", covered)
    return float(table.sort("group", "start").select(beyond.clip(lower_bound=0.0).sum()).item())
